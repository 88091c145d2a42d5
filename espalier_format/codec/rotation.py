"""Rotation blocks: which Hadamard matrices a module may use, and how sizes are padded (spec/rotation.md)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCKS: Final = (0, 32, 64, 128, 256)
"""Allowed rotation block sizes of either side; 0 means that the side is not rotated."""


EXL3_BLOCK: Final = 128
"""EXL3 rotates both sides in blocks of this size, and pads to them (spec/exl3.md)."""


def padded(size: int, block: int) -> int:
    """Return ``size`` rounded up to whole rotation blocks, or to whole tiles of 16 where block is 0.

    Raises UsageError for a block that is not in `BLOCKS`.
    """
    step = _checked(block) or TILE
    return -(-size // step) * step


@lru_cache(maxsize=len(BLOCKS))
def hadamard(block: int) -> NDArray[np.int8]:
    """Return the Sylvester-Hadamard matrix of that size with entries +1 and -1, int8, read-only.

    Entry (i, j) is (-1)^popcount(i AND j). The rotation itself is this matrix divided by sqrt(block).
    For block 0 the result is the 1x1 matrix [1]: no rotation. Raises UsageError for other sizes.
    """
    import numpy as np  # noqa: PLC0415 - sizes are asked for where nothing is decoded

    matrix = np.ones((1, 1), dtype=np.int8)
    while matrix.shape[0] < _checked(block):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=len(BLOCKS))
def kronecker_factors(block: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factors of a Hadamard matrix between tiles and within a tile, float64 and read-only.

    H_block = H_(block/16) x H_16 (Kronecker product), of shapes (block/16, block/16) and (16, 16). Applying one
    after the other takes a fraction of the operations of H_block. For block 0 they are unit matrices.
    """
    import numpy as np  # noqa: PLC0415 - as above

    signs = hadamard(block).astype(np.float64)
    if block:
        factors = np.ascontiguousarray(signs[::TILE, ::TILE]), np.ascontiguousarray(signs[:TILE, :TILE])
    else:
        factors = signs, np.eye(TILE)
    for factor in factors:
        factor.flags.writeable = False
    return factors


def _checked(block: int) -> int:
    if block not in BLOCKS:
        raise UsageError("no such rotation block", expected=list(BLOCKS), got=block)
    return block
