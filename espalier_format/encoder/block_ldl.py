"""The block LDL factorisation of a symmetric matrix, the same bit for bit whatever the BLAS library does."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.tile import TILE
from espalier_format.encoder.exact_product import Pieces

_PANEL: Final = 8 * TILE


def factorise(matrix: NDArray[np.float64]) -> bool:
    """Replace a symmetric matrix (16n, 16n) by L of its block factorisation L D L^T, in place.

    L is unit lower triangular in blocks of 16: afterwards the blocks below the diagonal hold it, while those on and
    above the diagonal hold nothing of use. Only the lower triangle is read. Returns False, and leaves the matrix in
    any state, when a pivot block is not positive definite to working accuracy or a number is not finite.
    """
    size = len(matrix)
    for left in range(0, size, _PANEL):
        right = min(left + _PANEL, size)
        unscaled = np.empty((size - right, right - left))  # the panel's rows below it: L D
        for column in range(left, right, TILE):
            here, after = slice(column, column + TILE), column + TILE
            inverse = _inverse(matrix[here, here])
            if inverse is None:
                return False
            below = matrix[after:, here].copy()
            unscaled[:, column - left : after - left] = below[right - after :]
            scaled = np.einsum("ik,kj->ij", below, inverse, optimize=False)  # no BLAS: one order of summing
            matrix[after:, here] = scaled
            if after < right:
                rest = matrix[after:, after:right]
                rest -= np.einsum("ik,jk->ij", scaled, below[: right - after], optimize=False)
        scaled_pieces, unscaled_pieces = Pieces.of(matrix[right:, left:right]), Pieces.of(unscaled)
        for start in range(right, size, _PANEL):
            stop = min(start + _PANEL, size)
            low, columns = slice(start - right, None), slice(start - right, stop - right)
            matrix[start:, start:stop] -= scaled_pieces.rows(low).times_transposed(unscaled_pieces.rows(columns))
    return True


def _inverse(block: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the inverse of a positive definite block, from its lower triangle, or None if it is none."""
    size = len(block)
    work = np.tril(block) + np.tril(block, -1).T
    result = np.eye(size)
    tiny = np.finfo(np.float64).eps * float(np.abs(work).max(initial=0.0))
    for pivot in range(size):  # Gauss-Jordan; pivots are those of the LDL factorisation, so positive
        value = work[pivot, pivot]
        if not (np.isfinite(value) and value > tiny):
            return None
        factors = work[:, pivot] / value
        factors[pivot] = 0.0
        work -= factors[:, None] * work[pivot]
        result -= factors[:, None] * result[pivot]
        work[pivot] /= value
        result[pivot] /= value
    return result if np.isfinite(result).all() else None
