"""Sizes of a packed tile (spec/packing.md §1, §2): the constants, apart from numpy, which inspecting does without."""

from __future__ import annotations

from typing import Final

TILE: Final = 16
"""Rows and columns of a tile."""

RING: Final = 256
"""Positions of the trellis ring of a tile: its weights."""

HALFWORDS: Final = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Allowed sizes of a packed tile in 16-bit words: 16 times 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8 bits."""
