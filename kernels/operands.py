"""Checks that every decoder makes before it touches a tensor, and the tensors in the form it works on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import DtypeError, NonFiniteScaleError, ShapeError


def checked_trellis(trellis: NDArray[Any], codebook: Codebook) -> NDArray[np.uint16]:
    """Return a trellis as uint16 of shape (in_p/16, out_p/16, W) without copying it.

    Raises DtypeError unless it is int16 or uint16, ShapeError unless it has three dimensions and the last is
    the codebook's ``halfwords_per_tile``.
    """
    if trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
        raise DtypeError("a trellis must be of 16-bit words", expected="int16", got=trellis.dtype)
    check_trellis_shape(trellis.shape, codebook)
    return trellis.view(np.uint16)


def check_trellis_shape(shape: tuple[int, ...], codebook: Codebook) -> None:
    """Raise ShapeError unless a trellis of that shape can be of that codebook."""
    if len(shape) != 3 or shape[2] != codebook.halfwords_per_tile:
        raise ShapeError(
            f"the trellis does not fit codebook {codebook.name}",
            expected=f"(in/16, out/16, {codebook.halfwords_per_tile})",
            got=shape,
        )


def checked_scales(suh: NDArray[Any], svh: NDArray[Any], padded_in: int, padded_out: int) -> None:
    """Raise unless both scale vectors are finite float16 of the padded sizes.

    DtypeError, ShapeError or NonFiniteScaleError, in that order; padding counts too.
    """
    for name, scales, size in (("suh", suh, padded_in), ("svh", svh, padded_out)):
        if scales.dtype != np.float16:
            raise DtypeError(f"{name} must be float16", expected="float16", got=scales.dtype)
        if scales.shape != (size,):
            raise ShapeError(f"{name} does not fit the trellis", expected=(size,), got=scales.shape)
        if not np.isfinite(scales).all():
            raise NonFiniteScaleError(f"{name} holds an infinity or a NaN")


def check_blocks(padded_in: int, padded_out: int, rotation_in: int, rotation_out: int) -> None:
    """Raise ShapeError unless the rotation blocks divide the padded sizes, UsageError for unknown blocks."""
    for side, size, block in (("input", padded_in, rotation_in), ("output", padded_out, rotation_out)):
        if padded(size, block) != size:
            raise ShapeError(f"the {side} side is no multiple of its rotation block {block}", got=size)


def check_true_size(padded_in: int, padded_out: int, in_features: int, out_features: int) -> None:
    """Raise ShapeError unless the true sizes are positive and within the padded ones."""
    if not (0 < in_features <= padded_in and 0 < out_features <= padded_out):
        raise ShapeError(
            "the true size does not fit the trellis",
            expected=f"at most {padded_out} x {padded_in}",
            got=f"{out_features} x {in_features}",
        )


def padded_size(trellis_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (padded_in, padded_out) of a trellis of that shape."""
    return trellis_shape[0] * TILE, trellis_shape[1] * TILE
