"""Fast unpacking of many tiles: the same states as `codec.trellis.unpack_states`, straight to their places.

The stream repeats every 32 ring positions: after them it has advanced by a whole number of halfwords. So
the windows of positions p, p + 32, p + 64, ... lie at the same bit offset, a fixed number of halfwords
apart, and one shift-and-or over strided slices unpacks them for all tiles at once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.trellis import TILE_POSITION, step_bits

PERIOD: Final = 32
"""Ring positions after which the windows lie at the same offsets in their halfwords again."""


def window_starts(half_steps: int) -> list[int]:
    """Return, for the first `PERIOD` ring positions, the first stream bit of the window plus 16.

    Adding 16 keeps it from being negative: decoders put a copy of the stream's last halfword in front.
    """
    return list(accumulate(int(bits) for bits in step_bits(half_steps)[:PERIOD]))


def places(position: int) -> tuple[int, int]:
    """Return (row, first column) in the tile of ring position ``position`` < `PERIOD`.

    Positions p, p + 32, ..., p + 224 lie in one row, in eight neighbouring columns.
    """
    place = int(TILE_POSITION[position])
    return place // 16, place % 16


def unpack_to(trellis: NDArray[np.uint16], states: NDArray[np.uint16]) -> None:
    """Unpack tiles of shape (A, B, W) into ``states``, a uint16 view of shape (16 rows, 16 columns, A, B).

    The view may have any strides: they decide how tiles and their rows and columns interleave in memory.
    """
    halfwords = trellis.shape[2]
    half_steps = halfwords // 8
    stream = np.empty((halfwords + 1, *trellis.shape[:2]), np.uint16)
    stream[1::2] = trellis[:, :, 1::2].transpose(2, 0, 1)  # storage swaps the halfwords of each pair
    stream[2::2] = trellis[:, :, 0::2].transpose(2, 0, 1)
    stream[0] = stream[halfwords]  # the ring is tail-biting

    high = np.empty((8, *trellis.shape[:2]), np.uint16)
    low = np.empty_like(high)
    for position, start in enumerate(window_starts(half_steps)):
        first, offset = divmod(start, 16)
        row, column = places(position)
        target = states[row, column : column + 8]
        if offset == 0:
            target[...] = stream[first::half_steps]
            continue
        np.left_shift(stream[first:-1:half_steps], np.uint16(offset), out=high)
        np.right_shift(stream[first + 1 :: half_steps], np.uint16(16 - offset), out=low)
        np.bitwise_or(high, low, out=target)
