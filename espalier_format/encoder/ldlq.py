"""LDLQ: quantise rows of tiles one after the other, and let each make up for the errors of those before it.

With a Hessian G in the basis that is encoded and errors D = R - Q, the loss is tr(D^T G D). Let G = L P L^T be its
block factorisation, L unit lower triangular in blocks of 16 rows. Then the loss is the sum over blocks k of
tr(e_k^T P_k e_k), where

    e_k = D_k + sum over j > k of L[j, k]^T D_j

So from the last block to the first, ``R_k + sum L[j, k]^T D_j`` is what is encoded as Q_k, and e_k is what it costs.
Where G is made of a block for each rotation block, these are encoded side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rotation import hadamard
from espalier_format.codec.tile import TILE
from espalier_format.encoder.block_ldl import factorise
from espalier_format.encoder.hadamard_transform import rotate_rows
from espalier_format.encoder.hessian import Hessian
from espalier_format.errors import SourceError

_ERROR_UNIT: Final = 2.0**-16
_LARGEST_ERROR: Final = 2.0**21
"""Errors are rounded to 2^-16 and clipped to 32, of a weight of variance 1, before they are fed back: 22 bits."""
_LARGEST_SUM: Final = 30
"""Factors are scaled so that a column of L sums up to 2^30 at most. Then every sum of products is below 2^51: exact."""
_ESCALATION: Final = 10.0
_LARGEST_DAMPING: Final = 1.0
_ROWS: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """The factors L of a module, as integers, so that feedback is exact and the same everywhere."""

    factors: NDArray[np.float64]
    """(groups, size, size), size * groups = in_p: one factor for all rows, or one for each rotation block. Below the
    diagonal blocks of 16, L times ``1 / unit``; nothing of use elsewhere."""
    unit: float
    damping: float
    """The largest number that was added to a diagonal, relative to its mean."""

    def of(self, row: int, errors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what is added to rows [row, row + 16) of each group, (groups, 16, m).

        ``errors`` is (groups, size, m), in units of 2^-16, complete below those rows.
        """
        below = self.factors[:, row + TILE :, row : row + TILE]
        result: NDArray[np.float64] = np.matmul(below.swapaxes(1, 2), errors[:, row + TILE :])
        result *= self.unit * _ERROR_UNIT
        return result


def feedback_of_hessian(
    hessian: Hessian, inputs: NDArray[np.float64], block: int, *, damping: float, name: str
) -> Feedback | None:
    """Factorise ``H_in diag(a) H diag(a) H_in``, a = ``inputs`` (signs and scales, padded), with damping.

    ``damping`` times the mean of the diagonal is added to it. If the matrix is not positive definite even so, ten times
    as much is tried, and so on up to 1. Returns None for a Hessian that says nothing: zero wherever a weight is not.
    Memory: 8 bytes * in_p^2 and a little. Raises SourceError when no damping helps: such a matrix is no Hessian.
    """
    attempt = damping
    while True:
        matrix = _rotated(hessian, inputs, block)
        mean = float(np.trace(matrix)) / len(matrix)
        if not mean > 0:
            return None
        matrix /= mean
        matrix[np.diag_indices_from(matrix)] += attempt
        if factorise(matrix):
            return Feedback(matrix[None], _to_integers(matrix[None]), attempt)
        if attempt >= _LARGEST_DAMPING:
            raise SourceError(
                "the Hessian is not positive semidefinite: its factorisation fails with any damping",
                tensor=name,
                got=f"damping up to {attempt:g} of the mean of the diagonal",
            )
        del matrix
        attempt = min(attempt * _ESCALATION, _LARGEST_DAMPING)


def feedback_of_scales(inputs: NDArray[np.float64], block: int, *, damping: float) -> Feedback | None:
    """Return the feedback for the plain squared error, a Hessian of 1.

    Channels of different scale share a rotation block, and an error in the rotated basis costs most where it falls on
    the large ones: ``H_in diag(a)^2 H_in`` is not diagonal, but a matrix for each rotation block. Feedback moves errors
    to where they cost less. Padding and channels of zeros cost nothing. Returns None for a ``block`` of 0.
    """
    if not block:
        return None
    signs = hadamard(block).astype(np.float64)
    factors = np.empty((len(inputs) // block, block, block))
    for group, scales in enumerate(inputs.reshape(-1, block)):
        matrix = factors[group]
        squares = np.square(scales / (np.abs(scales).max() or 1.0))
        squares /= float(squares.sum()) / block or 1.0
        matrix[...] = signs * squares
        rotate_rows(matrix.T, block)  # now the transpose of H diag(a)^2 H, which is symmetric
        matrix /= np.sqrt(block)
        matrix[np.diag_indices(block)] += damping
        factorise(matrix)
    return Feedback(factors, _to_integers(factors), damping)


def quantise(
    targets: NDArray[np.float32],
    feedback: Feedback,
    encode: Callable[[int, NDArray[np.float32]], NDArray[np.float32]],
) -> None:
    """Encode the rows of tiles of ``targets`` (in_p, m), in each group from the last to the first, with feedback.

    ``encode(row, rows)`` gets what is to be encoded as rows [row, row + 16) of all groups, (groups, 16, m), and returns
    what became of it. A column's result does not depend on the others. Memory: 8 bytes * in_p * m.
    """
    groups, size, _ = feedback.factors.shape
    targets = targets.reshape(groups, size, -1)
    errors = np.zeros(targets.shape)
    for row in range(size - TILE, -1, -TILE):
        here = targets[:, row : row + TILE]
        became = encode(row, (here + feedback.of(row, errors)).astype(np.float32))
        scaled = np.rint((here.astype(np.float64) - became) * (1 / _ERROR_UNIT))
        np.clip(scaled, -_LARGEST_ERROR, _LARGEST_ERROR, out=errors[:, row : row + TILE])


def _rotated(hessian: Hessian, inputs: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    size = len(hessian.matrix)
    matrix = np.zeros((len(inputs), len(inputs)))
    largest = float(np.abs(inputs).max(initial=0.0)) or 1.0
    scales = inputs[:size] / largest  # only proportions matter; this keeps squares of small scales in range
    for top in range(0, size, _ROWS):
        rows = slice(top, min(top + _ROWS, size))
        matrix[rows, :size] = hessian.matrix[rows].astype(np.float64) * scales * scales[rows, None]
    rotate_rows(matrix, block)
    for top in range(0, len(matrix), _ROWS):  # the other side, as rows of a transposed copy
        part = np.ascontiguousarray(matrix[top : top + _ROWS].T)
        rotate_rows(part, block)
        matrix[top : top + _ROWS] = part.T
    return matrix


def _to_integers(factors: NDArray[np.float64]) -> float:
    """Scale L to integers, in place; return the unit."""
    largest = 1.0
    columns = range(0, factors.shape[1] - TILE, TILE)
    for column in columns:
        sums = np.abs(factors[:, column + TILE :, column : column + TILE]).sum(axis=1)
        largest = max(largest, float(sums.max()))
    exponent = _LARGEST_SUM - 2 - floor(log2(largest))
    for column in columns:
        part = factors[:, column + TILE :, column : column + TILE]
        np.rint(np.ldexp(part, exponent, out=part), out=part)
    return 2.0**-exponent
