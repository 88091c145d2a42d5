"""What device code has to know of a codebook, as macros: the counterpart of ``codebook.cuh``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from espalier_format.codec.codebook import Codebook

FAMILIES: Final[Mapping[str, int]] = MappingProxyType(
    {"e2m1": 1, "int5": 2, "int6": 3, "int8": 4, "exl3-3inst": 5, "exl3-mcg": 6, "exl3-mul1": 7}
)
"""The number of each family in device code; grids come before EXL3's."""


@cache
def codebook_macros(codebook: Codebook) -> Mapping[str, int | str]:
    """Return the macros that specialise ``codebook.cuh``: FAMILY, HALF_STEPS, MULTIPLIER, ADDEND and INDEX_BITS."""
    return MappingProxyType(
        {
            "FAMILY": FAMILIES[codebook.family],
            "HALF_STEPS": codebook.half_steps,
            "MULTIPLIER": f"{codebook.multiplier}u",
            "ADDEND": f"{codebook.addend}u",
            "INDEX_BITS": codebook.index_bits,
        }
    )
