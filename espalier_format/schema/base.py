"""What all schema models share: frozen, closed, strict; and how their errors become one line."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from espalier_format.errors import SchemaError
from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

MAX_SIZE: Final = 2**31
"""Largest matrix side, expert count or similar number that a config may state."""

_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PIECE: Final = 256
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
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, value: object) -> object:
        """Drop all unknown keys of a document but the first: a finding costs a thousand times what its key does."""
        fields = cls.model_fields
        if type(value) is not dict or len(value) <= len(fields) + 1:
            return value
        known = {field.alias or name for name, field in fields.items()}
        unknown = next(key for key in value if key not in known)
        return {key: item for key, item in value.items() if key in known or key is unknown}


def _in_pieces(value: Any, validate: Any) -> Any:
    """Validate a large object or array piece by piece, so that only one piece has findings."""
    if type(value) is dict and len(value) > _PIECE:
        entries = iter(value.items())
        merged: dict[Any, Any] = {}
        while piece := dict(itertools.islice(entries, _PIECE)):
            merged.update(validate(piece))
        return merged
    if type(value) is list and len(value) > _PIECE:
        items: list[Any] = []
        for start in range(0, len(value), _PIECE):
            try:
                items.extend(validate(value[start : start + _PIECE]))
            except ValidationError:
                # Once more with what precedes it, all of which is right, so that the finding has the right number.
                items.extend(validate(value[: start + _PIECE]))
        return tuple(items)
    return validate(value)


Large = WrapValidator(_in_pieces)
"""Annotation of mapping and tuple fields that may have very many entries: hostile ones must not all be reported."""

ReadOnly = AfterValidator(ReadOnlyDict)
"""Annotation of mapping fields: what is kept cannot be changed, as the object that holds it."""

_PART: Final = r"[^.\x00-\x1f]+"

DOTTED_NAME: Final = rf"^{_PART}(\.{_PART})*$"
"""Regular expression of a module name: parts joined by dots, none of them empty, no control characters."""

_NAME: Final = re.compile(DOTTED_NAME.removesuffix("$"))


def is_dotted_name(name: str) -> bool:
    """Tell whether a config can hold this name of a module, as ``DOTTED_NAME`` says."""
    return _NAME.fullmatch(name) is not None


DottedName = Annotated[str, Field(pattern=DOTTED_NAME)]
"""A module name, as ``DOTTED_NAME`` says."""

SimpleName = Annotated[str, Field(pattern=rf"^{_PART}$")]
"""A name of one part, without a dot."""


def _refuse_half_surrogates(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PydanticCustomError("surrogate", "must not hold half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_refuse_half_surrogates)]
"""Any string that UTF-8 can hold."""


@dataclass(frozen=True, slots=True)
class Document:
    """Validation context of the parsers: the value comes from JSON, where a field that says nothing is left out.

    ``path`` is the file it came from, for messages.
    """

    path: str | Path | None


def document_path(info: core_schema.ValidationInfo[Any]) -> str | Path | None:
    """Return the file that is being validated, None where the value comes from no document."""
    return info.context.path if isinstance(info.context, Document) else None


class NotNull:
    """Annotation of a field whose default is None: a document may leave it out, but not hold null there."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Refuse null before anything else; None may be given to the constructor."""
        return core_schema.with_info_before_validator_function(_refuse_null, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Leave null out of the types."""
        described = handler(schema)
        (stated,) = (option for option in described["anyOf"] if option != {"type": "null"})
        return dict(stated)


def _refuse_null(value: object, info: core_schema.ValidationInfo[Any]) -> object:
    if value is None and isinstance(info.context, Document):
        raise PydanticCustomError("null", "must be left out where there is nothing to say")
    return value


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
