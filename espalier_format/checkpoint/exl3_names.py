"""What the tensors of an EXL3 module are called: the last parts of their names (spec/exl3.md)."""

from __future__ import annotations

from typing import Final

from espalier_format.codec.codebook import EXL3_MARKERS

SCALE_KINDS: Final = ("suh", "svh", "su", "sv")
"""The scale vectors, and the packed signs that earlier versions wrote in their place."""

MODULE_KINDS: Final = frozenset({"trellis", *SCALE_KINDS, *EXL3_MARKERS, "scale"})
"""All tensors that belong to a quantized module, but its bias; no version of EXL3 writes ``scale``."""
