"""The gain of a codebook: the best global scale for a normal source of variance 1, where a search starts."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from espalier_format.codec.codebook import Codebook

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXL3_GAINS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "exl3-3inst@1": 0.6976,
        "exl3-3inst@2": 0.8078,
        "exl3-3inst@3": 0.8521,
        "exl3-3inst@4": 0.8866,
        "exl3-3inst@5": 0.9183,
        "exl3-3inst@6": 0.9719,
        "exl3-3inst@7": 1.0196,
        "exl3-3inst@8": 1.0664,
        "exl3-mcg@1": 0.6970,
        "exl3-mcg@2": 0.8069,
        "exl3-mcg@3": 0.8473,
        "exl3-mcg@4": 0.8830,
        "exl3-mcg@5": 0.9165,
        "exl3-mcg@6": 0.9714,
        "exl3-mcg@7": 1.0221,
        "exl3-mcg@8": 1.0680,
        "exl3-mul1@1": 0.8825,
        "exl3-mul1@1.5": 0.9706,
        "exl3-mul1@2": 1.0122,
        "exl3-mul1@2.5": 1.0351,
        "exl3-mul1@3": 1.0635,
        "exl3-mul1@3.5": 1.0827,
        "exl3-mul1@4": 1.0957,
        "exl3-mul1@5": 1.1258,
        "exl3-mul1@6": 1.1660,
        "exl3-mul1@7": 1.2141,
        "exl3-mul1@8": 1.2479,
    }
)
"""Measured with benchmarks/gains.py on tail-biting rings; the last digits hardly matter."""


def gain(codebook: Codebook) -> float:
    """Return what a value of the codebook stands for, in standard deviations of a normal source, at the least error."""
    if codebook.is_grid:
        return float(_grids()[codebook.family]["widths"][codebook.width]["gain"])
    return _EXL3_GAINS[codebook.name]


@cache
def _grids() -> dict[str, Any]:
    text = (resources.files("espalier_format.spec") / "grids.json").read_text(encoding="utf-8")
    grids: dict[str, Any] = json.loads(text)
    return grids
