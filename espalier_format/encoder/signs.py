"""Random signs of channels, from a seed that a checkpoint records (spec/encoding.md §2)."""

from __future__ import annotations

from hashlib import sha256
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from espalier_format.errors import UsageError

MAX_SEED: Final = (1 << 64) - 1
"""Largest seed."""


def random_signs(seed: int, module: str, side: Literal["in", "out"], size: int) -> NDArray[np.float64]:
    """Return ``size`` random signs, +1.0 and -1.0, for one side of a module.

    SHA-256 over the seed (8 bytes, little-endian), the module's name (UTF-8) and the side (ASCII); the first 16 bytes
    of it, as a little-endian number, seed numpy's PCG64; bit i % 64 (from the lowest) of its raw output number i // 64
    belongs to channel i, 1 means minus. Both the seeding and the raw output are stable across numpy's versions.
    Raises UsageError for a seed outside 0..`MAX_SEED`.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UsageError("a seed must be a number of 64 bits", expected=f"0 to {MAX_SEED}", got=seed)
    digest = sha256(seed.to_bytes(8, "little") + module.encode() + side.encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(-(-size // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little", count=size)
    return 1.0 - 2.0 * bits.astype(np.float64)
