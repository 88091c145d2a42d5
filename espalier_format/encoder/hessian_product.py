"""Products with a Hessian that are the same everywhere: what the loss of a module is measured with."""

from __future__ import annotations

from math import floor, log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.encoder.hessian import Hessian

_SUM_BITS: Final = 30
_ROW_BITS: Final = 21
_PANEL: Final = 256


class HessianProduct:
    """Multiplies rows (of weights, of errors) with an undamped Hessian.

    In units of given scales ``a`` of the inputs, ``diag(a) H diag(a)`` is rounded to integers whose columns sum up to
    at most 2^30, and each row to 22 bits of its largest entry: a result is the exact product of those. Memory: 8 bytes
    * in_features^2.
    """

    def __init__(self, hessian: Hessian, scales: NDArray[np.float64]) -> None:
        """Prepare for ``scales``, (in_features,): signs do not matter, and inputs of scale 0 are left out."""
        size = len(scales)
        matrix = np.empty((size, size))
        largest = float(np.abs(scales).max(initial=0.0)) or 1.0
        scaled = np.abs(scales) / largest
        for top in range(0, size, _PANEL):
            rows = slice(top, min(top + _PANEL, size))
            matrix[rows] = hessian.matrix[rows].astype(np.float64) * scaled * scaled[rows, None]
        sums = np.zeros(size)
        for top in range(0, size, _PANEL):
            sums += np.abs(matrix[top : top + _PANEL]).sum(axis=0)
        # A common factor is dropped: losses are only looked at as ratios.
        exponent = _SUM_BITS - 2 - floor(log2(float(sums.max()) or 1.0))
        for top in range(0, size, _PANEL):
            part = matrix[top : top + _PANEL]
            np.rint(np.ldexp(part, exponent, out=part), out=part)
        self._matrix = matrix
        self._inverse: NDArray[np.float64] = np.divide(1.0, scaled, out=np.zeros(size), where=scaled > 0)

    def times(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a multiple of ``rows @ H``, (m, in_features), always the same multiple."""
        scaled = rows * self._inverse
        units = np.ldexp(1.0, np.frexp(np.abs(scaled).max(axis=1, keepdims=True, initial=0.0))[1] - _ROW_BITS)
        scaled /= units
        result: NDArray[np.float64] = np.rint(scaled, out=scaled) @ self._matrix
        result *= units
        result *= self._inverse
        return result

    def for_inputs(self, rows_product: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the same multiple of ``H * rows_product``, entry by entry, in place; ``rows_product`` is (in, in)."""
        rows_product *= self._inverse
        rows_product *= self._inverse[:, None]
        rows_product *= self._matrix
        return rows_product

    def loss(self, rows: NDArray[np.float64]) -> float:
        """Return the same multiple of ``tr(rows H rows^T)``."""
        return float((self.times(rows) * rows).sum())
