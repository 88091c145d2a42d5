"""A trellis of each width that goes through all 65,536 states, so that no entry of a codebook stays untried."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.tile import RING
from espalier_format.codec.trellis import step_bits, unpack_states
from espalier_format.conformance.noise import halfwords

STATES: Final = 1 << 16
TILE_COLUMNS: Final = 8
_BATCH: Final = 32
_STRIDE: Final = 40503
"""Odd: multiples of it modulo 2^16 give the states in an order whose neighbours have little in common."""


@lru_cache(maxsize=16)
def state_tour(half_steps: int) -> NDArray[np.int16]:
    """Return a trellis, int16 (tiles / 8, 8, W), whose rings visit every 16-bit state; read-only.

    ``half_steps`` is twice the width. Where 16 stream bits that end at a position overlap no other such window, any
    state can be put there. Batches of tiles are filled with states that were not visited yet, and with noise between
    them, until none is left: some 350 tiles at 8 bits, 800 at 1 bit.
    """
    ends = np.cumsum(step_bits(half_steps))
    windows = _separate_windows(ends)
    stream_bits = RING * half_steps // 2
    order = (np.arange(STATES) * _STRIDE % STATES).astype(np.uint16)
    visited = np.zeros(STATES, dtype=bool)
    batches: list[NDArray[np.int16]] = []
    while not visited.all():
        missing = order[~visited[order]][: _BATCH * windows.size]
        wanted = np.resize(missing, (_BATCH, windows.size))
        stream = np.unpackbits(
            halfwords(f"tour/{half_steps}/{len(batches)}", _BATCH * stream_bits // 16).astype("<u2").view(np.uint8)
        ).reshape(_BATCH, stream_bits)
        bits = np.unpackbits(wanted.astype(">u2").view(np.uint8)).reshape(_BATCH, windows.size, 16)
        stream[:, windows[:, None] - 16 + np.arange(16)] = bits
        words = np.packbits(stream, axis=1).view(">u2").astype(np.uint16)
        tiles = words.reshape(_BATCH, -1, 2)[..., ::-1].reshape(_BATCH, -1).view(np.int16)
        visited[unpack_states(tiles).ravel()] = True
        batches.append(tiles)
    tour = np.concatenate(batches)
    tour = tour.reshape(-1, TILE_COLUMNS, tour.shape[1])
    tour.flags.writeable = False
    return tour


def _separate_windows(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ends of windows of 16 bits that do not overlap."""
    chosen: list[int] = []
    for end in ends.tolist():
        if end >= (chosen[-1] if chosen else 0) + 16:
            chosen.append(end)
    return np.array(chosen)
