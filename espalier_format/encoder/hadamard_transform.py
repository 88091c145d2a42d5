"""The Hadamard rotation by butterflies: the same sums, in the same order, on every machine."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rotation import padded
from espalier_format.errors import ShapeError

_COLUMNS: Final = 1024
"""Columns that are rotated at a time: 128 rows of them stay in a cache of 1 MiB."""


def rotate_rows(matrix: NDArray[Any], block: int) -> None:
    """Multiply each group of ``block`` rows with the orthonormal Hadamard matrix, in place (spec/rotation.md §1).

    ``matrix`` is float32 or float64 (n * block, m); block 0 leaves it alone. Additions and subtractions of two numbers
    in a fixed order, and one multiplication: no BLAS, so the result depends on nothing else. Raises ShapeError when
    the rows are no whole blocks, UsageError for an unknown block.
    """
    if padded(len(matrix), block) != len(matrix) and block:
        raise ShapeError(
            "only whole rotation blocks can be rotated", expected=f"a multiple of {block}", got=len(matrix)
        )
    if not block:
        return
    norm = matrix.dtype.type(1 / np.sqrt(block))
    for top in range(0, len(matrix), block):
        for left in range(0, matrix.shape[1], _COLUMNS):
            part = matrix[top : top + block, left : left + _COLUMNS]
            _butterflies(part)
            part *= norm


def _butterflies(rows: NDArray[Any]) -> None:
    half = 1
    while half < len(rows):
        pairs = rows.reshape(-1, 2, half, rows.shape[1])
        upper, lower = pairs[:, 0], pairs[:, 1]
        difference = upper - lower
        upper += lower
        lower[...] = difference
        half *= 2
