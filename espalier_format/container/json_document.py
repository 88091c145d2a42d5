"""JSON with bounds: every document is checked for size, depth, string length and duplicate keys.

The bounds are those of spec/errors.md (code ``limit``). NaN and Infinity literals are accepted, since
real config.json files hold them; lone surrogates in escapes are accepted, since Python writes them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from espalier_format.container.lfs_pointer import refuse_pointer
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import LimitError, MalformedError, SchemaError
from espalier_format.limits import MAX_CONFIG_STRING_BYTES, MAX_JSON_BYTES, MAX_JSON_CONTAINERS, MAX_JSON_DEPTH

_SCAN_BYTES = 1 << 20
_MAX_INDENT = 16
_QUOTE, _COMMA, _COLON = b'",:'

_SCALARS = frozenset((int, float, bool, type(None)))  # JSON types that hold no string
_STEP = np.zeros(256, np.int8)  # what a byte outside of strings adds to the nesting depth
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


def parse_json(
    data: bytes,
    *,
    path: str | Path,
    max_string: int = MAX_CONFIG_STRING_BYTES,
    parse_int: Callable[[str], int | float] | None = None,
) -> object:
    """Parse one UTF-8 JSON document.

    `max_string` bounds each string, keys included, in UTF-8 bytes; `parse_int` converts integers in place of `int`.
    Memory is bounded by a small multiple of `len(data)`, and the nesting depth is known to be harmless before the
    parser sees the document.

    Raises:
        MalformedError: not UTF-8, not JSON, or an object names a key twice.
        LimitError: the document is too large or too deep, or holds too many objects and arrays or too long a string.
    """
    if len(data) > MAX_JSON_BYTES:
        raise LimitError("JSON document is too large", path=path, expected=f"at most {MAX_JSON_BYTES}", got=len(data))
    refuse_pointer(data, path)
    containers = count_containers(data)
    if containers > MAX_JSON_CONTAINERS:
        raise LimitError(
            "JSON holds too many objects and arrays",
            path=path,
            expected=f"at most {MAX_JSON_CONTAINERS}",
            got=containers,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"JSON is not valid UTF-8 at byte {error.start}", path=path) from error
    # Their number is an upper bound on the depth that settles most documents.
    if containers > MAX_JSON_DEPTH and _depth(data) > MAX_JSON_DEPTH:
        raise LimitError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels", path=path)
    if text.startswith("\ufeff"):
        raise MalformedError("begins with a byte order mark, which JSON must not have; save it without", path=path)
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_int=parse_int)
    except _DuplicateKeyError as error:
        raise MalformedError(f"JSON object names the key {_excerpt(error.key)} twice", path=path) from error
    except RecursionError as error:
        raise LimitError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels", path=path) from error
    except json.JSONDecodeError as error:
        raise MalformedError(f"not valid JSON: {error.msg} at character {error.pos}", path=path) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise MalformedError("JSON holds a number of too many digits", path=path) from error
    if len(data) > max_string:
        _check_strings(document, max_string, path)
    return document


def count_containers(data: bytes) -> int:
    """Return how many bytes of a JSON text begin an object or array, or would outside of a string."""
    return data.count(b"[") + data.count(b"{")


def read_json(path: Path) -> object:
    """Read and parse a JSON file; the file size is checked before anything is read.

    Raises:
        MissingFileError, MalformedError, LimitError, SourceError: as `read_regular` and `parse_json`.
    """
    return parse_json(read_regular(path, MAX_JSON_BYTES), path=path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose document is an object.

    Raises:
        SchemaError: the document is something else.
        MissingFileError, MalformedError, LimitError, SourceError: as `read_json`.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise SchemaError("must hold a JSON object", path=path, got=type(document).__name__)
    return document


@dataclass(frozen=True, slots=True)
class JsonStyle:
    r"""The layout of a JSON text, so that a rewritten file keeps it.

    A text that `json.dump` made with any indent, either `ensure_ascii`, default or minimal separators and
    any trailing white space is reproduced byte for byte by `JsonStyle.detect(text).dumps(json.loads(text))`; only an
    indent of more than 16 characters becomes one of two blanks.
    """

    indent: int | str | None = 2
    item_separator: str = ","
    key_separator: str = ": "
    ascii_only: bool = True
    newline: str = "\n"
    end: str = "\n"

    @classmethod
    def detect(cls, text: str | bytes) -> Self:
        """Return the layout of `text`, which must be valid JSON; bytes must be UTF-8."""
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        body = text.rstrip(" \t\r\n")
        newline = "\r\n" if "\r\n" in text else "\n"
        spaced = re.match(r"[\[{](\r?\n)([ \t]*)", body)
        indent: int | str | None = None
        if spaced:
            indent = spaced[2] if "\t" in spaced[2] else len(spaced[2])
            if len(spaced[2]) > _MAX_INDENT:
                indent = 2
        return cls(
            indent=indent,
            item_separator=_first_separator(body, _COMMA) if indent is None else ",",
            key_separator=_first_separator(body, _COLON),
            ascii_only=body.isascii(),
            newline=newline,
            end=text[len(body) :],
        )

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Return the layout of a JSON file that is to be written again, with other values.

        Raises:
            MalformedError: it holds a number that overflows, and would come out as an infinity.
            MissingFileError, MalformedError, LimitError, SourceError: as `read_regular` and `parse_json`.
        """
        data = read_regular(path, MAX_JSON_BYTES)

        def parse_float(literal: str) -> float:
            value = float(literal)
            if math.isinf(value):
                raise MalformedError(
                    "holds a number that is too large to be written again", path=path, got=literal[:60]
                )
            return value

        json.loads(data, parse_float=parse_float)
        return cls.detect(data)

    def dumps(self, document: object) -> bytes:
        """Serialise `document` in this layout, as UTF-8.

        NaN and infinities are written as Python does. A lone surrogate is written as its escape even where
        other characters are not escaped, for UTF-8 has no code for it.

        Raises:
            LimitError: the text would have more than `MAX_JSON_BYTES` characters, which no reader accepts; deep
                nesting multiplies the indent.
        """
        encoder = json.JSONEncoder(
            indent=self.indent,
            separators=(self.item_separator, self.key_separator),
            ensure_ascii=self.ascii_only,
        )
        text = encoder.encode(document) if self.indent is None else _bounded(encoder.iterencode(document))
        if self.newline != "\n":
            text = text.replace("\n", self.newline)
        return (text + self.end).encode("utf-8", "backslashreplace")


def _bounded(pieces: Iterable[str]) -> str:
    text = io.StringIO()
    size = 0
    for piece in pieces:
        size += text.write(piece)
        if size > MAX_JSON_BYTES:
            raise LimitError("JSON to write is too large", expected=f"at most {MAX_JSON_BYTES}")
    return text.getvalue()


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _depth(data: bytes) -> int:
    """Return the deepest nesting of brackets outside of strings; exact for valid JSON."""
    if b"\\" in data:  # a backslash before a quote is possible only inside of a string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(data, np.uint8)
    deepest = depth = 0
    inside = np.uint8(0)
    for start in range(0, len(codes), _SCAN_BYTES):
        block = codes[start : start + _SCAN_BYTES]
        in_string = np.bitwise_xor.accumulate((block == _QUOTE).view(np.uint8)) ^ inside
        inside = in_string[-1]
        steps = _STEP[block] * (in_string == 0)
        levels = np.cumsum(steps[steps != 0], dtype=np.int64)
        if levels.size:
            deepest = max(deepest, depth + int(levels.max()))
            depth += int(levels[-1])
    return deepest


def _check_strings(document: object, limit: int, path: str | Path) -> None:
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            # A character has at most four bytes: encode only what can be too long.
            if len(value) * 4 > limit and len(value.encode("utf-8", "surrogatepass")) > limit:
                raise LimitError(f"JSON holds a string of more than {limit} bytes: {_excerpt(value)}", path=path)
        elif isinstance(value, dict):
            pending.extend(value)
            pending.extend(value.values())
        elif isinstance(value, list) and not _SCALARS.issuperset(map(type, value)):
            pending.extend(value)


def _first_separator(body: str, mark: int) -> str:
    """Return the first comma or colon outside of strings with the blank after it, if there is one."""
    character = chr(mark)
    for match in re.finditer(r'"(?:[^"\\]++|\\.)*+"|[,:] ?', body, re.DOTALL):
        if match[0][0] == character:
            return match[0]
    return character + " "


def _excerpt(text: str, length: int = 60) -> str:
    shown = text if len(text) <= length else text[:length] + "…"
    return json.dumps(shown)
