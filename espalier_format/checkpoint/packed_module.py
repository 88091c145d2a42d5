"""One quantized linear module of a compressed-tensors checkpoint: integers, packed or not, and their scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from espalier_format.checkpoint.components import Component, component_of

if TYPE_CHECKING:
    import numpy as np

    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.converters.compressed_tensors_packing import Packing
    from espalier_format.converters.compressed_tensors_schemes import Scheme


@dataclass(frozen=True, slots=True)
class PackedModule:
    """Sizes of a module and where its tensors lie; nothing is read before ``rows``.

    ``weight`` is I32 words, (out_features, words), in the layout ``packing``, or I8, (out_features, in_features), where
    that is None. ``scale`` is (out, in / group size), (out, 1) or (1,), as ``scheme.strategy`` says. ``zero_point`` is
    packed along the outputs in the layout ``zero_packing``, or I8 of the scale's shape where that is None. ``g_idx`` is
    the group of each input, I32. ``activations`` are scales for run time, which say nothing about the weight.

    ``size_source`` is "padded" where ``in_features`` is an upper bound: packed words of one scale per row leave it
    open, and ``shape``, which states it, has not been read.
    """

    name: str
    scheme: Scheme
    in_features: int
    out_features: int
    packing: Packing | None
    weight: TensorRef
    scale: TensorRef
    zero_point: TensorRef | None = None
    zero_packing: Packing | None = None
    g_idx: TensorRef | None = None
    shape: TensorRef | None = None
    bias: TensorRef | None = None
    activations: tuple[TensorRef, ...] = ()
    size_source: Literal["exact", "padded"] = "exact"

    @property
    def component(self) -> Component:
        """Part of the model that the module belongs to."""
        return component_of(self.name)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features

    @property
    def dtype(self) -> str:
        """Dtype of the weight once it is decoded: the scale's, as compressed-tensors gives it."""
        return self.scale.dtype

    @property
    def parameters(self) -> tuple[TensorRef, ...]:
        """The tensors beside ``weight`` that are needed to decode it."""
        stored = (self.scale, self.zero_point, self.g_idx, self.shape)
        return tuple(tensor for tensor in stored if tensor is not None)

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All stored tensors of the module but its bias."""
        return (self.weight, *self.parameters, *self.activations)

    def rows(self, start: int, stop: int, *, threads: int = 1) -> np.ndarray:
        """Return rows [start, stop) of the weight in ``dtype``, (rows, in_features); BF16 as uint16 bit patterns.

        (code - zero point) x scale, the exact product rounded once to nearest even. The result is the same for any
        number of ``threads``; each takes a few MB.

        Raises:
            ShapeError: ``shape`` states other sizes than the tensors have, or ``g_idx`` a group that there is not.
            NonFiniteScaleError: a scale is infinite or NaN.
            ScaleOverflowError: a product is too large for ``dtype``.
            TruncatedError: the file has changed its size.
        """
        from espalier_format.converters.compressed_tensors import decode_rows  # noqa: PLC0415 - imports numpy

        return decode_rows(self, start, stop, threads=threads)
