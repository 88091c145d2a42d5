"""Trellis packing: how 256 states of 16 bits lie in the halfwords of a tile (spec/packing.md).

A 16x16 tile is a tail-biting ring of 256 positions. Position i adds ``step_bits[i]`` new bits to the
stream, and its state is the 16 stream bits that end with them. The functions here are written to be
read; the decoders in `espalier_format.kernels` unpack the same bits faster.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.tile import HALFWORDS, RING, TILE
from espalier_format.errors import DtypeError, ShapeError, UsageError


def _tile_positions() -> NDArray[np.intp]:
    position = np.arange(RING)
    lane, element = position // 8, position % 8
    row = 2 * (lane % 4) + (element & 1) + 8 * ((element >> 1) & 1)
    column = lane // 4 + 8 * ((element >> 2) & 1)
    order: NDArray[np.intp] = (TILE * row + column).astype(np.intp)
    order.flags.writeable = False
    return order


TILE_POSITION: Final = _tile_positions()
"""Ring position to place in the tile, (256,): the value of position i goes to row p // 16 (the input index) and column
p % 16 (the output index), p = TILE_POSITION[i] (spec/packing.md §5)."""


def step_bits(half_steps: int) -> NDArray[np.int64]:
    """Return how many new bits each of the 256 ring positions adds to the stream.

    ``half_steps`` is twice the width. At a half-integer width even positions take the smaller number
    and odd positions the larger one. Raises UsageError for a width that the format does not have.
    """
    if 8 * half_steps not in HALFWORDS:
        raise UsageError(f"no width of {half_steps}/2 bits exists")
    return half_steps // 2 + (np.arange(RING) % 2) * (half_steps % 2)


def unpack_states(trellis: NDArray[Any]) -> NDArray[np.uint16]:
    """Unpack the states of packed tiles, in ring order.

    ``trellis`` is int16 or uint16 of shape (..., W), W in `HALFWORDS`; the result is uint16 of shape
    (..., 256). Exact, and every input is valid. Raises DtypeError and ShapeError.
    """
    stream = _stream_halfwords(trellis).astype(np.uint32)
    halfwords = stream.shape[-1]
    window_start = np.cumsum(step_bits(halfwords // 8)) - 16  # from -15: the ring wraps, as does the index below
    first, offset = window_start // 16, (window_start % 16).astype(np.uint32)
    pair = (stream[..., first] << np.uint32(16)) | stream[..., (first + 1) % halfwords]
    return ((pair >> (np.uint32(16) - offset)) & np.uint32(0xFFFF)).astype(np.uint16)


def pack_states(states: NDArray[Any], half_steps: int) -> NDArray[np.int16]:
    """Pack the states of tiles: the inverse of `unpack_states`.

    ``states`` is an integer array of shape (..., 256) in ring order with entries 0..65535, ``half_steps``
    twice the width; the result is int16 of shape (..., 8 * half_steps). A stream holds only the new bits
    of each step, so states that are no tail-biting path would be lost silently: they raise UsageError, as
    do entries outside 16 bits. Raises ShapeError for another last dimension than 256.
    """
    bits = step_bits(half_steps)
    if states.ndim == 0 or states.shape[-1] != RING:
        raise ShapeError("states must have a last dimension of one ring", expected=RING, got=states.shape)
    if states.dtype.kind not in "iu" or (states.size and not 0 <= int(states.min()) <= int(states.max()) <= 0xFFFF):
        raise UsageError("states must be integers from 0 to 65535")
    wide = states.astype(np.uint32)
    # Stream bit n belongs to position owner[n], and is bit significance[n] of that state.
    owner = np.repeat(np.arange(RING), bits)
    significance = (np.cumsum(bits)[owner] - 1 - np.arange(owner.size)).astype(np.uint32)
    stream_bits = ((wide[..., owner] >> significance) & np.uint32(1)).astype(np.uint8)
    stream = np.ascontiguousarray(np.packbits(stream_bits, axis=-1)).view(">u2").astype(np.uint16)
    packed = _swap_pairs(stream).view(np.int16)
    if not np.array_equal(unpack_states(packed), wide):
        raise UsageError("the states are no tail-biting path: a state does not continue its predecessor on the ring")
    return packed


def _stream_halfwords(trellis: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the halfwords in stream order: storage swaps the two of each 32-bit word."""
    if trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)):
        raise DtypeError("a trellis must be of 16-bit words", expected="int16", got=trellis.dtype)
    if trellis.ndim == 0 or trellis.shape[-1] not in HALFWORDS:
        raise ShapeError("no width has this many halfwords a tile", expected=list(HALFWORDS), got=trellis.shape)
    return _swap_pairs(trellis.view(np.uint16))


def _swap_pairs(halfwords: NDArray[np.uint16]) -> NDArray[np.uint16]:
    pairs = halfwords.reshape(*halfwords.shape[:-1], halfwords.shape[-1] // 2, 2)
    return pairs[..., ::-1].reshape(halfwords.shape)
