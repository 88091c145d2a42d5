"""Config groups that are no more than the name of a preset and its targets, as compressed-tensors takes them.

Nothing writes such a group, but people do. The names are read whatever their case. Presets that every release which
has them defines alike are read; W8A16 is not one of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from espalier_format.errors import SchemaError, SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_IN_GROUPS: Final = re.compile(r"W([2-8])A(4|8|16)")
_CHANNEL: Final = frozenset({"W8A8", "INT8"})
_UNQUANTIZED: Final = "UNQUANTIZED"
_AMBIGUOUS: Final = "W8A16"
_OTHER: Final = frozenset(
    {
        "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP4XFP8", "MXFP6A16", "MXFP6A8",
        "MXFP8A16", "MXFP8",
    }
)  # fmt: skip
"""Presets of weights that are no integers."""


def preset_group(name: str, targets: list[Any], where: str, path: Path) -> dict[str, Any]:
    """Return a preset as the config group that states it.

    Raises:
        SchemaError: there is no such preset.
        SourceError: its weights are not integers, or releases of compressed-tensors differ in what it means.
    """
    preset = name.upper()
    if preset == _UNQUANTIZED:
        return {"targets": targets}
    if preset == _AMBIGUOUS:
        message = f"{where}: the preset has one scale per row up to release 0.13, groups of 128 in later ones; state it"
        raise SourceError(message, path=path)
    if preset in _OTHER:
        raise SourceError(f"{where}: the weights of this preset are no integers, which is not read", path=path)
    weights = _weights(preset)
    if weights is None:
        raise SchemaError(f"{where} must be an object, or a list of targets under the name of a preset", path=path)
    group: dict[str, Any] = {"targets": targets, "weights": weights}
    if not preset.endswith(("A16", "A16_ASYM")):
        group["input_activations"] = {"dynamic": True}
    return group


def _weights(preset: str) -> Mapping[str, Any] | None:
    if preset in _CHANNEL:
        return {"num_bits": 8, "strategy": "channel"}
    if preset == "W4AFP8":
        return _grouped(4)
    found = _IN_GROUPS.fullmatch(preset.removesuffix("_ASYM") if preset == "W4A16_ASYM" else preset)
    if found is None or int(found[1]) > int(found[2]):
        return None
    return _grouped(int(found[1]), symmetric=preset != "W4A16_ASYM")


def _grouped(bits: int, *, symmetric: bool = True) -> Mapping[str, Any]:
    return {"num_bits": bits, "strategy": "group", "group_size": 128, "symmetric": symmetric}
