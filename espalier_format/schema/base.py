"""What all schema models share: frozen, closed, strict; and how their errors become one line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, Strict

from espalier_format.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic import ValidationError

MAX_SIZE: Final = 2**31
"""Largest matrix side, expert count or similar number that a config may state."""

_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_INPUT: Final = 60
_SHOWN_KEY: Final = 160
_TYPE_NAMES: Final = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "an array",
    "tuple": "an array",
    "dict": "an object",
}


class FrozenModel(BaseModel):
    """Base of all models: immutable, no unknown keys, no type conversions, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
    )


DottedName = Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")]
"""A module name: parts joined by dots, none of them empty."""

SimpleName = Annotated[str, Field(pattern=r"^[^.]+$")]
"""A name of one part, without a dot."""

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
"""A matrix side or a count: 1 to 2**31."""

Sha256Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in lower-case hexadecimal."""

Sha1Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
"""A SHA-1 in lower-case hexadecimal."""

JsonArray = Strict(strict=False)
"""Annotation for tuple fields: JSON arrays are parsed to lists, which strict mode would not take for a tuple."""


def json_path(root: str, parts: Sequence[str | int]) -> str:
    """Spell the place of a value in a JSON document, e.g. ``quantization_config.modules["a.b"].rotation.in``."""
    text = root
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part == "[key]":
            text += " (the key)"
        elif len(part) <= _SHOWN_KEY and _PLAIN_KEY.fullmatch(part):
            text += f".{part}"
        else:
            text += f'["{_shortened(part, _SHOWN_KEY)}"]'
    return text


def schema_error(error: ValidationError, root: str, path: str | Path | None) -> SchemaError:
    """Turn the first finding of a validation into a ``SchemaError`` of one line that names its JSON path."""
    first = error.errors(include_url=False)[0]
    where = json_path(root, first["loc"])
    kind = first["type"]
    if kind == "missing":
        message = f"{where} is required"
    elif kind == "extra_forbidden":
        message = f"{where} is not a key of this format version"
    elif kind in {"too_short", "too_long"}:
        bound = "least" if kind == "too_short" else "most"
        limit = first["ctx"]["min_length" if kind == "too_short" else "max_length"]
        message = f"{where} must have at {bound} {limit} {'entry' if limit == 1 else 'entries'}"
    else:
        rule = first["msg"].replace("Input should be", "must be").replace("String should", "must")
        rule = rule.replace("valid dictionary", "JSON object").replace("valid tuple", "JSON array")
        rule = rule[0].lower() + rule[1:]
        message = f"{where}: {rule}, but is {describe(first['input'])}"
    more = error.error_count() - 1
    if more:
        message += f" ({more} more finding{'s' if more > 1 else ''})"
    return SchemaError(message, path=path)


def describe(value: object) -> str:
    """Say what a JSON value is, shortened to fit in a line; containers are only named."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_INPUT:
        return "too large"  # Python refuses to print integers of more than 4300 digits
    if isinstance(value, str | int | float):
        return _shortened(repr(value), _SHOWN_INPUT)
    name = type(value).__name__
    return _TYPE_NAMES.get(name, name)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"
