"""Change config.json as little as possible, and undo it: the way back gives the same values again."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.text_sections import TEXT_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK: Final = "quantization_config"
TIE: Final = "tie_word_embeddings"
_TIES: Final = (TIE, *(f"{part}.{TIE}" for part in TEXT_PARTS))


def with_block(config: Mapping[str, Any], block: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy with another ``quantization_config``, in the place of the old one or last."""
    edited = copy.deepcopy(dict(config))
    edited[BLOCK] = block
    return edited


def without_block(config: Mapping[str, Any], replaced: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy without ``quantization_config``, or with a null where ``replaced`` says that one stood there."""
    edited = copy.deepcopy(dict(config))
    if BLOCK in replaced:
        edited[BLOCK] = None
    else:
        edited.pop(BLOCK, None)
    return edited


def untie(config: dict[str, Any]) -> dict[str, object]:
    """Set every true ``tie_word_embeddings`` to false, in place, top level and text part.

    Returns what stood there: dotted path to value.
    """
    replaced: dict[str, object] = {}
    for path in _TIES:
        owner = _owner(config, path)
        if owner is not None and owner.get(TIE) is True:
            owner[TIE] = False
            replaced[path] = True
    return replaced


def is_replaceable(path: str, value: object) -> bool:
    """Tell whether `replaced_config` may hold this: a tie that was true, or a null ``quantization_config``."""
    return value is True if path in _TIES else path == BLOCK and value is None


def restore(config: dict[str, Any], replaced: Mapping[str, object]) -> None:
    """Put replaced values back, in place, where what replaced them still stands there."""
    for path, value in replaced.items():
        if path in _TIES:
            owner = _owner(config, path)
            if owner is not None and owner.get(TIE) is False:
                owner[TIE] = value


def _owner(config: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the object that holds the last key of a dotted path."""
    owner: Any = config
    for key in path.split(".")[:-1]:
        owner = owner.get(key) if isinstance(owner, dict) else None
    return owner if isinstance(owner, dict) else None
