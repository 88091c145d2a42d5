"""Which modules the kit decodes: every codebook with every rotation block on either side, and the cases at the edge."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS
from espalier_format.codec.tile import TILE
from espalier_format.conformance.module_case import ModuleCase

_MOST_BLOCKS: Final = {0: 4, 32: 3, 64: 2, 128: 2, 256: 1}
"""Rotation blocks (tiles, where a side is not rotated) of a side, at most."""

_CROPPED: Final = (0, 1, 5, 13, 3, 11)
"""By how much true sizes are smaller than the padded ones."""

EDGES: Final = (
    ModuleCase("edge/all-outputs-zero", "int6@4", 64, 64, 60, 61, "zero"),
    ModuleCase("edge/numbers-in-the-padding", "e2m1@2", 32, 128, 50, 100, "padding"),
    ModuleCase("edge/numbers-in-the-padding-unrotated", "exl3-mul1@3", 0, 0, 35, 37, "padding"),
    ModuleCase("edge/ties", "int8@5", 0, 0, 48, 32, "ties"),
    ModuleCase("edge/ties-rotated", "int5@3", 64, 0, 64, 40, "ties"),
    ModuleCase("edge/subnormal-float16", "e2m1@1", 32, 32, 64, 60, "subnormal"),
    ModuleCase("edge/steep-scales", "e2m1@2", 0, 0, 48, 30, "steep"),
    ModuleCase("edge/steep-scales-rotated", "exl3-mul1@3", 128, 128, 100, 128, "steep"),
    ModuleCase("edge/one-by-one", "int8@6", 0, 0, 1, 1),
    ModuleCase("edge/one-output", "e2m1@1.5", 128, 128, 130, 1),
    ModuleCase("edge/one-input", "exl3-mcg@4", 128, 64, 1, 70),
    ModuleCase("edge/two-blocks-of-256", "exl3-mul1@2.5", 256, 256, 500, 300),
    ModuleCase("edge/larger", "int5@3", 128, 64, 640, 330),
    ModuleCase("edge/overflow-float16", "e2m1@2", 0, 0, 32, 32, "overflow"),
    ModuleCase("edge/scale-nan", "int6@4", 32, 32, 64, 64, "nan"),
    ModuleCase("edge/scale-infinite-in-the-padding", "int8@6", 0, 64, 32, 50, "infinite"),
)
"""Modules that are special in one way each, which the label says."""


@lru_cache(maxsize=1)
def weight_modules() -> tuple[ModuleCase, ...]:
    """Return all modules whose weights the kit decodes: five for each codebook, then `EDGES`.

    Each codebook meets each of the five rotation blocks once on either side; each pair of blocks occurs with at least
    seven codebooks. Sizes are one to four blocks, most of them cropped by an odd number.
    """
    found = []
    for number, name in enumerate(CODEBOOKS):
        for turn, block_in in enumerate(BLOCKS):
            block_out = BLOCKS[(turn + number) % len(BLOCKS)]
            found.append(
                ModuleCase(
                    f"{name}/in{block_in}-out{block_out}",
                    name,
                    block_in,
                    block_out,
                    _true_size(block_in, number + turn, 2 * number + turn),
                    _true_size(block_out, number // 2 + turn, number + 3 * turn + 1),
                )
            )
    return (*found, *EDGES)


def _true_size(block: int, blocks: int, cropped: int) -> int:
    return (1 + blocks % _MOST_BLOCKS[block]) * (block or TILE) - _CROPPED[cropped % len(_CROPPED)]
