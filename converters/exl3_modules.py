"""Decide how each EXL3 module enters an Espalier checkpoint, and check its scales, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from espalier_format.checkpoint.module import expect_scales
from espalier_format.converters.espalier_block import OutputModule

if TYPE_CHECKING:
    import numpy as np

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.tensors import TensorRef


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A module with the sizes that it gets in the config; its bias is cropped to ``out_features`` values."""

    module: QuantizedModule
    in_features: int
    out_features: int
    size_source: Literal["exact", "padded"]
    doubtful: Literal["bias", "svh"] | None = None
    """The tensor that is not zero beyond the true size as it is stated, which is why the padded one is kept."""

    @property
    def crops_bias(self) -> bool:
        """Whether the stored bias is longer than the module's outputs."""
        bias = self.module.bias
        return bias is not None and bias.shape[0] > self.out_features

    @property
    def has_unpadded_bias(self) -> bool:
        """Whether the stored bias is shorter than the stored outputs, unlike what exllamav3 writes."""
        bias = self.module.bias
        return bias is not None and bias.shape[0] < self.module.padded_out

    def as_output(self) -> OutputModule:
        """Return what the config of the output says about the module."""
        rotation = (self.module.rotation.in_, self.module.rotation.out)
        return OutputModule(
            self.module.name, self.module.codebook, self.in_features, self.out_features, rotation, self.size_source
        )


def import_modules(source: Checkpoint) -> tuple[dict[str, ImportedModule], tuple[str, ...]]:
    """Return all modules of an EXL3 checkpoint, in order, and warnings about their sizes (spec/exl3.md §5).

    A padded bias can be cropped only where what is cut off is +0, and svh that ends in zeros has them throughout the
    padding: a module with other values there keeps its padded size, since the true one may be larger than it is said
    to be, and the way back must give the same bytes. Reads all scales; memory stays bounded.

    Raises:
        NonFiniteScaleError: a scale is infinite or NaN.
    """
    imported: dict[str, ImportedModule] = {}
    warnings: list[str] = []
    kept: dict[str, list[str]] = {}
    expect_scales(source.modules.values())
    for name, module in source.modules.items():
        _, svh = module.scales()
        sizes = ImportedModule(module, module.in_features, module.out_features, module.size_source)
        if module.size_source == "padded":
            warnings.extend(_zeros_of_unknown_size(module, svh))
        else:
            reason: Literal["bias", "svh"] | None = None
            if module.bias is not None and sizes.crops_bias and not _is_zero_from(module.bias, module.out_features):
                reason = "bias"
            elif svh[-1] == 0 and svh[module.out_features :].any():
                reason = "svh"
            if reason is not None:
                sizes = ImportedModule(module, module.padded_in, module.padded_out, "padded", reason)
                kept.setdefault(reason, []).append(name)
        imported[name] = sizes
    for kind, names in kept.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.append(f"padded size kept: the {kind} of {names[0]}{more} is not zero beyond the true size")
    return imported, tuple(warnings)


def _is_zero_from(bias: TensorRef, start: int) -> bool:
    """Tell whether all bits of the values from ``start`` on are 0; -0 would not come back."""
    width = bias.nbytes // bias.shape[0]
    return not any(bias.data()[start * width :])


def _zeros_of_unknown_size(module: QuantizedModule, svh: np.ndarray) -> tuple[str, ...]:
    """Point out the zeros that newer files have in the padding of svh; they alone decide nothing.

    An output may be dead. Without zeros at the end, the file is older than the habit.
    """
    if svh[-1] != 0:
        return ()
    last = int(svh.nonzero()[0][-1]) + 1 if svh.any() else 0
    return (f"svh of {module.name} ends in {len(svh) - last} zeros: its true output size may be {last}",)
