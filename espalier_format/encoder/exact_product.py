"""Matrix products that are the same with every BLAS library, number of threads and processor.

A sum of floating-point products depends on its order, which a BLAS chooses. Here operands are cut into pieces of few
bits, so that every sum of products of pieces fits the 53 bits of float64: it is exact, in whatever order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

_PIECE_BITS: Final = 22
MOST_TERMS: Final = 1 << (53 - 2 * _PIECE_BITS)
"""Longest sums that are exact: 512 terms."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A matrix of at most 512 columns as ``(first + second * 2^-22) * unit``: integers, and powers of two by row."""

    first: NDArray[np.float64]
    second: NDArray[np.float64]
    units: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: NDArray[np.float64]) -> Self:
        """Cut a matrix into pieces; what is below 2^-44 of the largest entry of a row is lost."""
        largest = np.abs(matrix).max(axis=1, keepdims=True, initial=0.0)
        units = np.ldexp(1.0, np.frexp(largest)[1] - _PIECE_BITS)
        scaled = matrix / units
        first = np.rint(scaled)
        scaled -= first
        scaled *= 2.0**_PIECE_BITS
        return cls(first, np.rint(scaled, out=scaled), units)

    def rows(self, rows: slice) -> Self:
        """Return some rows."""
        return type(self)(self.first[rows], self.second[rows], self.units[rows])

    def times_transposed(self, other: Pieces) -> NDArray[np.float64]:
        """Return ``self @ other.T``, to about 2^-43 of the product of the rows' largest entries a term."""
        result = self.first @ other.second.T
        result += self.second @ other.first.T
        result *= 2.0**-_PIECE_BITS
        result += self.first @ other.first.T
        result *= self.units
        result *= other.units.T
        return result

    def roughly_times_transposed(self, other: Pieces) -> NDArray[np.float64]:
        """Return the same to about 2^-21, in a third of the time."""
        result = self.first @ other.first.T
        result *= self.units
        result *= other.units.T
        return result
