"""Encode tiles: from normalised weights to trellis states, through one of several equal back ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.tile import RING, TILE
from espalier_format.codec.trellis import TILE_POSITION, pack_states
from espalier_format.encoder.backend import load_backend
from espalier_format.encoder.branch_cost import branch_cost
from espalier_format.encoder.effort import THOROUGH, Effort
from espalier_format.errors import DtypeError, ShapeError, UsageError

_LARGEST: Final = 1e30
"""Bound of targets and scale: far from where squares and quotients overflow float64."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTiles:
    """The result of `encode_tiles`: a tail-biting path for each ring."""

    states: NDArray[np.uint16]
    """(n, 256), ring order."""
    codebook: Codebook
    scale: float
    errors: NDArray[np.float64]
    """Squared error of each ring: sum of (target - scale * value)^2, (n,)."""

    @property
    def values(self) -> NDArray[np.float32]:
        """What the targets became: scale * value, float32 (n, 256), ring order."""
        return _values(self.states, self.codebook, self.scale).astype(np.float32)

    def pack(self) -> NDArray[np.int16]:
        """Return the packed trellis, int16 (n, `Codebook.halfwords_per_tile`)."""
        return pack_states(self.states, self.codebook.half_steps)


def encode_tiles(
    targets: NDArray[Any],
    codebook: Codebook,
    *,
    scale: float,
    effort: Effort = THOROUGH,
    backend: str = "auto",
    threads: int = 1,
) -> EncodedTiles:
    """Find the trellis path of each ring whose values times ``scale`` are nearest to the targets.

    ``targets`` is floating point (n, 256) in **ring order** (`to_rings` makes it from a matrix), about normally
    distributed with variance 1; ``scale`` is what a value of the codebook (code times ``value_scale``) stands
    for, near ``gain`` of spec/grids.json for such targets. "Nearest" is the exact search of `numpy_backend` on
    the integer costs of `branch_cost`: the result is the same for every back end and number of ``threads``, and
    for each ring on its own, whatever rings are encoded with it. Outliers are fine.

    ``effort`` is `effort.FAST`, `effort.EXACT` or `effort.THOROUGH`, which take 1, 4/3 and 2 times as long; more passes
    gain next to nothing.

    ``backend`` is "auto", "cuda", "numba" or "numpy".
    Raises ShapeError and DtypeError; UsageError for an unknown back end, "cuda" on a GPU that is too small for the
    codebook, targets that are not finite or a scale that is not positive (neither may be beyond 10^30 or, the scale,
    below 10^-30); and DependencyError for a back end whose package is missing: also for "auto" without numba where no
    GPU can encode the codebook.
    """
    if targets.ndim != 2 or targets.shape[1] != RING:
        raise ShapeError("targets must be rings", expected=f"(n, {RING})", got=targets.shape)
    if targets.dtype.kind != "f":
        raise DtypeError("targets must be floating point", got=targets.dtype)
    if not 1 / _LARGEST <= scale <= _LARGEST:
        raise UsageError("the scale must be positive and of a sane size", got=scale)
    if not float(np.abs(targets).max(initial=0)) <= _LARGEST:  # a NaN too
        raise UsageError("targets must be finite and of a sane size", expected=f"at most {_LARGEST} in magnitude")
    if not isinstance(effort, Effort):
        raise UsageError("the effort must be an Effort; get_effort finds it by name", got=repr(effort))
    if threads < 1:
        raise UsageError("threads must be at least 1", got=threads)
    cost = branch_cost(codebook)
    states = load_backend(backend, codebook)(cost.fixed_point(targets, scale), cost, effort, threads)
    residual = targets.astype(np.float64) - _values(states, codebook, scale)
    return EncodedTiles(states, codebook, scale, np.square(residual).sum(axis=1))


def to_rings(matrix: NDArray[Any]) -> NDArray[Any]:
    """Cut a matrix (16a, 16b), input rows by output columns, into rings (a * b, 256): the tile order of a trellis.

    Raises ShapeError when a side is no multiple of 16.
    """
    if matrix.ndim != 2 or matrix.shape[0] % TILE or matrix.shape[1] % TILE:
        raise ShapeError("only whole tiles can be encoded", expected="multiples of 16", got=matrix.shape)
    rows, columns = matrix.shape[0] // TILE, matrix.shape[1] // TILE
    tiles = matrix.reshape(rows, TILE, columns, TILE).transpose(0, 2, 1, 3).reshape(rows * columns, RING)
    return tiles[:, TILE_POSITION]


def from_rings(rings: NDArray[Any], columns: int) -> NDArray[Any]:
    """Put rings (a * b, 256) together to the matrix (16a, 16b) with ``columns`` = 16b: the inverse of `to_rings`.

    Raises ShapeError when they do not fill it.
    """
    per_row = columns // TILE
    if rings.ndim != 2 or rings.shape[1] != RING or columns % TILE or per_row == 0 or len(rings) % per_row:
        raise ShapeError("the rings do not fill a matrix", expected=f"{columns} columns", got=rings.shape)
    tiles = np.empty_like(rings)
    tiles[:, TILE_POSITION] = rings
    return tiles.reshape(-1, per_row, TILE, TILE).transpose(0, 2, 1, 3).reshape(-1, columns)


def _values(states: NDArray[np.uint16], codebook: Codebook, scale: float) -> NDArray[np.float64]:
    table = codebook.codes.astype(np.float64) * (codebook.value_scale * scale)
    values: NDArray[np.float64] = table[states]
    return values
