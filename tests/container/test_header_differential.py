"""Headers of any structure, right and nearly right, read here and by the safetensors library.

What is accepted here must mean the same there. What only the library accepts must be one of the cases that the table in
spec/espalier-v1.md §4.1 lists. Which error is raised is for test_header.py.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from espalier_format.container.header import DTYPE_BITS, Header, read_header
from espalier_format.errors import EspalierError, LimitError, MalformedError, ShapeError

SPEC = Path(__file__).parents[2] / "spec" / "espalier-v1.md"
# Dtypes that every release of the library knows.
DTYPES = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64")

Entry = dict[str, Any]
Members = list[tuple[str, Any]]


class Raw(str):
    """JSON text that stands in a document as it is."""

    __slots__ = ()


def dumps(value: object) -> str:
    """Write JSON with `Raw` parts in it."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return dumps_members(list(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def dumps_members(members: Members) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in members) + "}"


def file_of(text: str, data_size: int) -> bytes:
    header = text.encode("utf-8")
    return len(header).to_bytes(8, "little") + header + bytes(data_size)


def ours(data: bytes) -> Header | None:
    try:
        return read_header(io.BytesIO(data), len(data), "x.safetensors")
    except EspalierError:
        return None


def theirs(data: bytes) -> dict[str, Any] | None:
    try:
        return dict(deserialize(data))
    except SafetensorError:
        return None


def compare(data: bytes) -> tuple[bool, bool]:
    """Return who accepts the file, this reader and the library; both must then see the same tensors."""
    header, tensors = ours(data), theirs(data)
    if header is not None and tensors is not None:
        assert tensors.keys() == header.tensors.keys()
        for name, tensor in tensors.items():
            info = header.tensors[name]
            assert tuple(tensor["shape"]) == info.shape
            assert len(tensor["data"]) == info.nbytes
            assert tensor["dtype"] == info.dtype
    return header is not None, tensors is not None


names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")
metadata = st.none() | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.text('aé\\"', max_size=8))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Members, int]:
    """A valid header: tensors one after the other, listed in any order, fields in any order."""
    entries: Members = []
    position = 0
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = DTYPE_BITS[dtype] // 8
        for side in shape:
            size *= side
        fields = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        entries.append((name, dict(draw(st.permutations(list(fields.items()))))))
        position += size
    entries = draw(st.permutations(entries))
    stated = draw(st.sampled_from(["absent", "null", "object"]))
    if stated != "absent":
        value = None if stated == "null" else draw(metadata)
        entries.insert(draw(st.integers(0, len(entries))), ("__metadata__", value))
    return list(entries), position


ODD_VALUES = [
    None, True, False, -1, Raw("-0"), Raw("1.0"), Raw("1e0"), Raw("0.0"), "1", [], [1], {}, 2**31, 2**53 + 1, 2**63 - 1,
    2**64, 10**30, Raw("NaN"), Raw("Infinity"), Raw("-1e400"),
]  # fmt: skip
ODD_DTYPES = ["f16", "F8", "", " F16", None, 16, "U128", "F4 ", "E8M0", Raw('"\\u0046\\u0031\\u0036"')]
odd_values, fields = st.sampled_from(ODD_VALUES), st.sampled_from(["dtype", "shape", "data_offsets"])


def change_entry(draw: st.DrawFn, entry: Entry) -> None:
    field = draw(fields)
    stored = entry.get(field)
    how = draw(st.sampled_from(["drop", "replace", "inside", "shift", "longer"]))
    if how == "drop":
        entry.pop(field, None)
    elif field == "dtype":
        entry[field] = draw(st.sampled_from([*ODD_DTYPES, *DTYPES]))
    elif not isinstance(stored, list) or how == "replace":
        entry[field] = draw(odd_values)
    elif how == "longer":
        entry[field] = [*stored, draw(st.integers(0, 2))]
    elif how == "shift":
        by = draw(st.sampled_from([-1, 1, 8]))
        entry[field] = [number + by if type(number) is int else number for number in stored]
    elif stored:
        stored[draw(st.integers(0, len(stored) - 1))] = draw(odd_values)


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[str, int]:
    """A header with one or two things changed, and the size of its data section."""
    members, size = draw(layouts())
    end = ""
    for _ in range(draw(st.integers(1, 2))):
        position = draw(st.integers(0, len(members) - 1))
        name, value = members[position]
        kind = draw(st.sampled_from(["entry", "entry", "entry", "value", "name", "data", "metadata", "end"]))
        if kind == "entry" and isinstance(value, dict) and name != "__metadata__":
            change_entry(draw, value)
        elif kind == "value":
            members[position] = (name, draw(odd_values))
        elif kind == "name" and all(other != "__metadata__" for other, _ in members):
            members[position] = ("__metadata__", value)
        elif kind == "data":
            size = max(0, size + draw(st.sampled_from([-1, 1, 8])))
        elif kind == "metadata":
            stated = draw(st.sampled_from([{"a": draw(odd_values)}, {"a": "b"}, None, {}]))
            members = [*(member for member in members if member[0] != "__metadata__"), ("__metadata__", stated)]
        elif kind == "end":
            end = draw(st.sampled_from([" ", "\n", "\t ", "\0", "x", "{}", ","]))
    return dumps_members(members) + end, size


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_valid_headers_are_accepted_by_both(layout: tuple[Members, int]) -> None:
    members, size = layout
    assert compare(file_of(dumps_members(members), size)) == (True, True)


@settings(max_examples=1500, deadline=None)
@given(near_misses())
def test_near_misses_are_judged_alike(miss: tuple[str, int]) -> None:
    """None of these changes is in the table, so neither side may accept alone."""
    text, size = miss
    mine, library = compare(file_of(text, size))
    assert mine == library, text


ONE = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
STRICTER: dict[str, tuple[str, int, type[EspalierError]]] = {
    "white space before the header's `{`": (" {" + ONE + "}", 1, MalformedError),
    "the name of a tensor twice": ("{" + ONE + "," + ONE + "}", 1, MalformedError),
    "a key of `__metadata__` twice": ('{"__metadata__":{"a":"b","a":"c"},' + ONE + "}", 1, MalformedError),
    "an entry with a key besides the three": ("{" + ONE[:-1] + ',"strides":[1]}}', 1, MalformedError),
    "an entry that is an array of the three values": ('{"a":["U8",[1],[0,1]]}', 1, MalformedError),
    "a dtype that is an object with the dtype as its key": (
        "{" + ONE.replace('"U8"', '{"U8":null}') + "}",
        1,
        MalformedError,
    ),
    "a size from 2^63 to 2^64 − 1 in a shape that also has a 0": (
        '{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
        0,
        ShapeError,
    ),
    "a string of more than 65,536 bytes": ('{"__metadata__":{"a":"' + "x" * 65_537 + '"},' + ONE + "}", 1, LimitError),
}


def test_the_table_lists_what_is_tested() -> None:
    page = SPEC.read_text(encoding="utf-8")
    table = page.partition("stricter than the safetensors library")[2].split("\n\n")[1]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == list(STRICTER)


@pytest.mark.parametrize("case", STRICTER)
def test_stricter_than_the_library(case: str) -> None:
    text, size, error = STRICTER[case]
    data = file_of(text, size)
    assert theirs(data) is not None
    with pytest.raises(error):
        read_header(io.BytesIO(data), len(data), "x.safetensors")
