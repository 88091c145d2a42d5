"""Whether a layer of a model has the sizes that a checkpoint states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.codec.rotation import padded
from espalier_format.errors import ShapeError

if TYPE_CHECKING:
    from espalier_format.schema.config import ModuleSpec
    from espalier_format.schema.expert_bank import Projection


def check_sizes(name: str, spec: ModuleSpec | Projection, in_features: int, out_features: int) -> None:
    """Raise ShapeError unless a layer of the model has the sizes of a module or projection.

    Where the checkpoint knows the padded sizes only, the model's own must be the ones that were padded.
    """
    sizes = (in_features, out_features)
    if spec.size_source == "padded":
        sizes = (padded(in_features, spec.rotation.in_), padded(out_features, spec.rotation.out))
    if sizes != (spec.in_features, spec.out_features):
        raise ShapeError(
            "config.json makes it another size",
            tensor=name,
            expected=f"{spec.out_features} x {spec.in_features}",
            got=f"{out_features} x {in_features}",
        )
