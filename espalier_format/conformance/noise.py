"""Reproducible numbers that every program can make: hashes of a label and a counter (spec/conformance.md §4)."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPECIAL_SCALES: Final = (0x0000, 0x8000, 0x0001, 0x83FF, 0x3C01, 0xBBFF, 0x5BFF, 0x3555)
"""Patterns that scales begin with: +0, -0, the smallest subnormal, the largest negative one, 1 + ulp, -(1 - ulp / 2),
255.9, one third."""


def halfwords(label: str, count: int) -> NDArray[np.uint16]:
    """Return the first ``count`` halfwords of noise(label): uint16 (count,)."""
    blocks = -(-count // 16)
    data = b"".join(sha256(b"%b:%d" % (label.encode("ascii"), block)).digest() for block in range(blocks))
    return np.frombuffer(data, "<u2")[:count].astype(np.uint16)


def trellis(label: str, shape: tuple[int, int, int]) -> NDArray[np.int16]:
    """Return a random trellis, int16 of that shape; every value of it is valid."""
    return halfwords(label, int(np.prod(shape))).view(np.int16).reshape(shape)


def scales(label: str, padded: int, true: int, *, large: bool) -> NDArray[np.float16]:
    """Return scales of one side, float16 (padded,), with +0 in the padding.

    Of either sign, with magnitudes from 2^-7 to 2^-3. `SPECIAL_SCALES` stand from index 3 on where there is room;
    only where ``large`` is 255.9 among them, else 1 - ulp / 2 in its place: two large ones would overflow float16.
    A side of one channel has none of them: the zero would stand first, and hide whatever is wrong with the module.
    """
    patterns = np.zeros(padded, np.uint16)
    patterns[:true] = halfwords(label, true) & 0x8FFF | 0x2000
    if true > 1:
        special = [pattern if large or pattern != 0x5BFF else 0x3BFF for pattern in SPECIAL_SCALES]
        start = 3 if true > 12 else 0
        patterns[start : min(start + len(special), true)] = special[: true - start]
    return patterns.view(np.float16)


def activations(label: str, rows: int, columns: int) -> NDArray[np.float32]:
    """Return inputs of a product, float32 (rows, columns), about uniform in (-2, 2).

    They have at most seven significant bits, so they are exact in float16 and bfloat16 too.
    """
    words = halfwords(label, rows * columns).reshape(rows, columns)
    magnitudes = (words & 127).astype(np.float32) / np.float32(64)
    return np.where(words >> 15 == 1, -magnitudes, magnitudes) + np.float32(0)
