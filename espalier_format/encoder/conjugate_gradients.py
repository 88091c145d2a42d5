"""Conjugate gradients for a dense symmetric system, in a fixed order of operations."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEPS: Final = 40
_SMALL: Final = 1e-12


def solve(matrix: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a good approximation to the solution of ``matrix @ x = right``, (n,), from x = 0.

    ``matrix`` is symmetric and positive semidefinite; rows whose diagonal entry is not positive get x = 0.
    Preconditioned with the diagonal, 40 steps at most: each lowers ``x^T matrix x - 2 x^T right``, so any number
    of them is an improvement. No BLAS.
    """
    diagonal = matrix.diagonal()
    inverse = np.divide(1.0, diagonal, out=np.zeros(len(right)), where=diagonal > 0)
    x, residual = np.zeros(len(right)), np.where(diagonal > 0, right, 0.0)
    conditioned = residual * inverse
    direction, size = conditioned.copy(), _dot(residual, conditioned)
    first = size
    for _ in range(_STEPS):
        if not size > _SMALL * first:
            break
        image = np.where(diagonal > 0, np.einsum("ij,j->i", matrix, direction, optimize=False), 0.0)
        curvature = _dot(direction, image)
        if not curvature > 0:
            break
        step = size / curvature
        x += step * direction
        residual -= step * image
        conditioned = residual * inverse
        before, size = size, _dot(residual, conditioned)
        direction = conditioned + size / before * direction
    return x


def _dot(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    return float((left * right).sum())
