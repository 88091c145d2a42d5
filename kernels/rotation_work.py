"""The rotation of a block of tiles in numpy, in buffers that are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rotation import kronecker_factors
from espalier_format.codec.tile import TILE


class RotationWork:
    """Buffers in which blocks of tiles are rotated, one after the other.

    Fresh buffers for each block would cost more, in page faults, than the rotation. Not for several threads at once.
    """

    def __init__(self, tile_columns: int, tile_rows: int) -> None:
        self._shape = (tile_columns, TILE, TILE, tile_rows)
        self._indices = np.empty(self._shape, np.intp)
        self._buffers = np.empty(self._shape), np.empty(self._shape)

    def rotated_sums(
        self, values: NDArray[np.float64], states: NDArray[np.uint16], rotation_in: int, rotation_out: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return H_out V^T H_in with matrices of +1 and -1, exactly, and the buffer that is free now.

        ``states`` is (tile column n, column, row, tile row k), n at most that of the buffers; the result is
        (16 n, 16 k), rows and columns in natural order: the product within tiles of the input side also moves the
        tile row before the row.
        """
        columns, rows = states.shape[0], states.shape[3]
        indices, now, free = self._indices[:columns], self._buffers[0][:columns], self._buffers[1][:columns]
        between_in, within_in = kronecker_factors(rotation_in)
        between_out, within_out = kronecker_factors(rotation_out)
        np.copyto(indices, states)
        np.take(values, indices, out=now, mode="clip")  # the mode "raise" would buffer
        if rotation_in:
            shape: tuple[int, ...] = (-1, between_in.shape[0])
            np.matmul(now.reshape(shape), between_in, out=free.reshape(shape))
            now, free = free, now
        within = now.reshape(columns * TILE, TILE, rows).swapaxes(1, 2)
        np.matmul(within, within_in, out=free.reshape(columns * TILE, rows, TILE))
        now, free = free, now
        if rotation_out:
            shape = (columns, TILE, rows * TILE)
            np.matmul(within_out, now.reshape(shape), out=free.reshape(shape))
            now, free = free, now
            shape = (-1, between_out.shape[0], TILE * rows * TILE)
            np.matmul(between_out, now.reshape(shape), out=free.reshape(shape))
            now, free = free, now
        return now.reshape(columns * TILE, rows * TILE), free
