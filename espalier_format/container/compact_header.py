"""The shortcut of `read_header`: headers in the form that all known writers make, without a JSON parser.

safetensors, transformers and exllamav3 write minified JSON with the fields of an entry in one order. Cut at its quotes,
such a text repeats every ten parts, and each column of parts can be checked and converted as a whole: several times
faster than the JSON parser with a check for each tensor. The checks are exact: nothing is accepted here that JSON would
not mean the same way. Any other text gives None and is left to the general parser.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from espalier_format.limits import MAX_HEADER_STRING_BYTES

_INTEGER = r"(?:0|[1-9][0-9]{0,17})"
# The joined column of ":[start,end]}," parts. A part holds no quote, so joining with quotes keeps them apart.
# Quantifiers are possessive: no input makes the match slower than linear.
_OFFSETS = re.compile(rf'(?::\[{_INTEGER},{_INTEGER}\]\}},")*+')
_SHAPE = re.compile(rf":\[((?:{_INTEGER}(?:,{_INTEGER})*+)?+)\],")
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_METADATA = re.compile(rf'\{{"__metadata__":(\{{(?:{_STRING}:{_STRING}(?:,{_STRING}:{_STRING})*+)?+\}}),')
_PARTS = 10
# What stands between the quotes of an entry, by its position: name, this, "dtype", this, F16, this, "shape", …
_FIXED = {2: ":{", 3: "dtype", 4: ":", 6: ",", 7: "shape", 9: "data_offsets"}


@dataclass(frozen=True, slots=True)
class CompactColumns:
    """The fields of all tensors, in file order; at least one tensor. Nothing but the JSON form is checked."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    starts: list[int]
    ends: list[int]
    metadata: bytes | None


def parse_compact(data: bytes) -> CompactColumns | None:
    """Return the fields of a minified header, or None where it is not of that form (it may still be valid)."""
    try:
        text = data.decode("utf-8").rstrip(" \t\r\n")
    except UnicodeDecodeError:
        return None
    if not text.startswith("{") or not text.endswith("}}"):
        return None
    metadata = _METADATA.match(text)
    # The last entry ends in "]}}", all others in "]},": made equal here.
    parts = (text[1:-1] if metadata is None else text[metadata.end() : -1]).split('"')
    if len(parts) <= 1 or len(parts) % _PARTS != 1 or parts[0]:
        return None
    parts[-1] += ","
    count = len(parts) // _PARTS
    if any(parts[position::_PARTS].count(fixed) != count for position, fixed in _FIXED.items()):
        return None
    names, dtypes, shape_parts = parts[1::_PARTS], parts[5::_PARTS], parts[8::_PARTS]
    joined = '"'.join(parts[10::_PARTS]) + '"'
    if "__metadata__" in names or not _OFFSETS.fullmatch(joined):
        return None
    # A character has at most four bytes: a longer name is left to the general parser, which counts them.
    if max(map(len, names)) > MAX_HEADER_STRING_BYTES // 4:
        return None
    joined_names = "".join(names)
    if "\\" in joined_names or not joined_names.isprintable():  # escapes and control characters
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for part in set(shape_parts):
        shape = _SHAPE.fullmatch(part)
        if shape is None:
            return None
        shapes[part] = tuple(map(int, shape[1].split(","))) if shape[1] else ()
    # The JSON parser reads a plain list of integers faster than int() reads them one by one.
    numbers: list[int] = json.loads("[" + joined[2:-4].replace(']},":[', ",") + "]")
    return CompactColumns(
        names,
        dtypes,
        list(map(shapes.__getitem__, shape_parts)),
        numbers[0::2],
        numbers[1::2],
        None if metadata is None else metadata[1].encode("utf-8"),
    )
