"""One linear module of the source: what may be quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier_format.checkpoint.components import Component, component_of

if TYPE_CHECKING:
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.quantize.matrices import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear module as the output will have it; ``matrix`` is where its weight lies in the source.

    ``replaces`` names the stored tensors that go when it is quantized. Where the first of them stands, the module's
    tensors will stand. ``fused``: that tensor holds other modules as well, so a part of it that is kept becomes a
    tensor of its own as soon as another part is quantized. A tied head replaces nothing; it comes after ``anchor``.
    ``decoded``: it is stored in a form that the output does not have, so a plain weight is written where it is kept;
    ``fixed``: which it always is.
    """

    name: str
    matrix: Matrix
    anchor: str
    replaces: tuple[str, ...]
    bias: TensorRef | None = None
    fused: bool = False
    quantized: QuantizedModule | None = None
    decoded: bool = False
    fixed: bool = False

    @property
    def out_features(self) -> int:
        """Number of outputs, without padding."""
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs, without padding."""
        return self.matrix.shape[1]

    @property
    def weights(self) -> int:
        """Number of weights, without padding."""
        return self.in_features * self.out_features

    @property
    def component(self) -> Component:
        """Part of the model that it belongs to."""
        return component_of(self.name)

    @property
    def tied(self) -> bool:
        """Whether it is a head that shares the weight of the embedding."""
        return not self.replaces
