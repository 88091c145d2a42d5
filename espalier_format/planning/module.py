"""The tensors of one quantized linear module, by its entry in the config (spec/espalier-v1.md §4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.codec.codebook import Codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.runtimes.tensor_parallel import FeatureRange, ModuleSlice, equal_share, slice_module

if TYPE_CHECKING:
    from espalier_format.schema.expert_bank import SizeSource

ITEM_BYTES: Final = 2
"""Bytes of an element of every tensor of a quantized module: I16 and F16."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to allocate: ``dtype`` as safetensors spells it, "I16" or "F16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return ITEM_BYTES * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One quantized linear module, an expert's projection perhaps, with its true sizes and rotation blocks.

    A bias is not in the config: where ``<name>.bias`` is among the tensors of the checkpoint, it has ``out_features``
    elements.

    >>> from espalier_format.codec.codebook import get_codebook
    >>> module = PlannedModule(
    ...     "model.layers.0.mlp.down_proj", get_codebook("e2m1@2"),
    ...     in_features=512, out_features=2048, rotation_in=128, rotation_out=128,
    ... )
    >>> module.row_parallel(rank=1, world=4).trellis_rows
    ((8, 16),)
    >>> module.row_parallel(rank=1, world=8)
    Traceback (most recent call last):
    espalier_format.errors.UsageError: a rank would hold 64 to 128 of the 512 in_features, and 64 is within a rotation \
block of 128
    """

    name: str
    codebook: Codebook
    _: KW_ONLY
    in_features: int
    out_features: int
    rotation_in: int
    rotation_out: int
    size_source: SizeSource = "exact"

    @property
    def component(self) -> Component:
        """Part of the model that the module belongs to."""
        return component_of(self.name)

    @property
    def padded_in(self) -> int:
        """Size of suh: the inputs, filled up to whole rotation blocks."""
        return padded(self.in_features, self.rotation_in)

    @property
    def padded_out(self) -> int:
        """Size of svh: the outputs, filled up to whole rotation blocks."""
        return padded(self.out_features, self.rotation_out)

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        """Shape of the trellis: (padded_in / 16, padded_out / 16, 16-bit words of a tile)."""
        return self.padded_in // TILE, self.padded_out // TILE, self.codebook.halfwords_per_tile

    @property
    def suh(self) -> TensorSpec:
        """Input signs and scales, F16 (padded_in,)."""
        return TensorSpec(f"{self.name}.esp_suh", "F16", (self.padded_in,))

    @property
    def svh(self) -> TensorSpec:
        """Output signs and scales, F16 (padded_out,)."""
        return TensorSpec(f"{self.name}.esp_svh", "F16", (self.padded_out,))

    @property
    def trellis(self) -> TensorSpec:
        """Packed codes, I16 of ``trellis_shape``."""
        return TensorSpec(f"{self.name}.esp_trellis", "I16", self.trellis_shape)

    @property
    def tensors(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """suh, svh and trellis."""
        return self.suh, self.svh, self.trellis

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return ITEM_BYTES * (math.prod(self.trellis_shape) + self.padded_in + self.padded_out)

    @property
    def weights(self) -> int:
        """Number of weights, without padding."""
        return self.in_features * self.out_features

    def column_parallel(self, rank: int, world: int) -> ModuleSlice:
        """Return the part of rank ``rank`` of ``world`` when the outputs are split; each rank needs all inputs.

        Raises:
            UsageError: the outputs cannot be split so: not into equal parts, or not between rotation blocks (tiles,
                where the outputs are not rotated); the message says why.
        """
        return self.part(outputs=[equal_share(self.out_features, rank, world)])

    def row_parallel(self, rank: int, world: int) -> ModuleSlice:
        """Return the part of rank ``rank`` of ``world`` when the inputs are split; the results of the ranks are summed.

        Raises:
            UsageError: as `column_parallel`, for the inputs.
        """
        return self.part(inputs=equal_share(self.in_features, rank, world))

    def part(self, inputs: FeatureRange | None = None, outputs: Iterable[FeatureRange] | None = None) -> ModuleSlice:
        """Return the part with these inputs and outputs, None for all, whatever the ranks of a runtime are.

        Raises:
            UsageError, ShapeError: as `slice_module`.
        """
        return slice_module(self, (self.rotation_in, self.rotation_out), inputs, outputs)
