"""Packed signs: the legacy ``su`` and ``sv`` tensors of pre-release EXL3 files (spec/exl3.md §3).

Such a file holds only the signs of a module's scales, 16 to a word, least significant bit first; a set
bit means negative. They are the scales +1 and -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_format.errors import DtypeError, LossyError, ShapeError


def unpack_signs(packed: NDArray[Any]) -> NDArray[np.float16]:
    """Expand packed signs to scales of +1 and -1.

    ``packed`` is int16 (or uint16) of shape (n / 16,); the result is float16 of shape (n,). Raises
    DtypeError and ShapeError.
    """
    if packed.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
        raise DtypeError("packed signs must be 16-bit words", expected="int16", got=packed.dtype)
    if packed.ndim != 1:
        raise ShapeError("packed signs must have one dimension", got=packed.shape)
    little_endian = np.ascontiguousarray(packed).astype("<i2", copy=False).view(np.uint8)
    negative = np.unpackbits(little_endian, bitorder="little")
    return (1 - 2 * negative.astype(np.int8)).astype(np.float16)


def pack_signs(scales: NDArray[Any]) -> NDArray[np.int16]:
    """Pack scales of exactly +1 and -1: the inverse of `unpack_signs`.

    ``scales`` is float16 of shape (n,), n a multiple of 16; the result is int16 of shape (n / 16,).
    Raises LossyError when a scale is anything but +1 or -1, since its magnitude would be lost, and
    DtypeError and ShapeError.
    """
    if scales.dtype != np.float16:
        raise DtypeError("scales must be float16", expected="float16", got=scales.dtype)
    if scales.ndim != 1 or scales.shape[0] % 16:
        raise ShapeError("scales to pack must be one row of a multiple of 16", got=scales.shape)
    if not np.all(np.abs(scales) == 1):
        raise LossyError("only scales of exactly +1 and -1 can be packed as signs")
    return np.packbits(scales < 0, bitorder="little").view("<i2").astype(np.int16, copy=False)
