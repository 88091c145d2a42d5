"""The modules of the output: encoded anew, or kept in the quantization that they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from espalier_format.codec.codebook import Codebook


@dataclass(frozen=True, slots=True)
class OutputModule:
    """What config.json says about a quantized module of the output."""

    name: str
    codebook: Codebook
    in_features: int
    out_features: int
    rotation: tuple[int, int]
    size_source: Literal["exact", "padded"] = "exact"
