"""Values in a config that are written in several ways, all of which compressed-tensors takes."""

from __future__ import annotations

import re
from typing import Final

_WHOLE: Final = re.compile(r"\s*0*([0-9]{1,4})(?:\.0*)?\s*")
_EXACT: Final = 1 << 53
"""Floats below it are the numbers that they look like."""

_TRUE: Final = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE: Final = frozenset({"false", "f", "no", "n", "off", "0"})


def lower(value: object) -> object:
    """Return a name in lower case; what is no name stays as it is."""
    return value.lower() if isinstance(value, str) else value


def whole(value: object) -> int | None:
    """Return a whole number, which may be written as 4, 4.0 or "4"; None for anything else.

    >>> whole(4.0), whole("32"), whole(4.5), whole(True)
    (4, 32, None, None)
    """
    if isinstance(value, str):
        found = _WHOLE.fullmatch(value)
        return None if found is None else int(found[1])
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT else None
    return value if type(value) is int else None


def truth(value: object) -> bool | None:
    """Return a truth value, which may be written as a word or as 0 or 1; None for anything else.

    >>> truth(False), truth("False"), truth(1), truth(None)
    (False, False, True, None)
    """
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else str(whole(value))
    return True if word in _TRUE else False if word in _FALSE else None
