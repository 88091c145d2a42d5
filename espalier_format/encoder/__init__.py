"""Encoding: from weights to trellis states. The search for a tile is here; `tiles` is where to begin reading."""

from __future__ import annotations

from espalier_format.encoder.effort import EXACT, FAST, THOROUGH, Effort
from espalier_format.encoder.tiles import EncodedTiles, encode_tiles, from_rings, to_rings

__all__ = ["EXACT", "FAST", "THOROUGH", "Effort", "EncodedTiles", "encode_tiles", "from_rings", "to_rings"]
