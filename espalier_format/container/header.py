"""The header of a safetensors file: read with full validation, and written.

A header that `read_header` returns is self-consistent: known dtypes, byte ranges that follow from the shapes,
that cover the data section without hole or overlap, and a file of exactly that size. Data may start at any
offset: the format has no alignment rule (exllamav3 writes none).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from espalier_format.container.compact_header import parse_compact
from espalier_format.container.json_document import count_containers, parse_json
from espalier_format.container.lfs_pointer import POINTER_BEGINNING, refuse_pointer
from espalier_format.container.regular_file import read_exactly
from espalier_format.errors import DtypeError, LimitError, MalformedError, OverlapError, ShapeError, TruncatedError
from espalier_format.limits import (
    MAX_HEADER_BYTES,
    MAX_HEADER_STRING_BYTES,
    MAX_JSON_CONTAINERS,
    MAX_TENSORS,
    MAX_WRITTEN_HEADER_BYTES,
)

DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element of every dtype of the safetensors format."""

LENGTH_BYTES: Final = 8
METADATA_KEY: Final = "__metadata__"
_MAX_SIZE: Final = 2**63 - 1
_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))


class TensorInfo(NamedTuple):
    """Where one tensor lies: `start` and `end` are byte offsets in the data section of its file."""

    # A NamedTuple and not a frozen dataclass: 92,160 of them are made in 10 ms instead of 90.
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header, and where the data section lies in the file (bytes).

    `tensors` are in the order of the header's JSON, which need not be that of their bytes.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


def tensor_bytes(dtype: str, shape: Sequence[int], *, path: str | Path | None = None, tensor: str | None = None) -> int:
    """Return the size in bytes of a tensor, computed without overflow.

    Raises:
        DtypeError: the dtype is not one of `DTYPE_BITS`.
        ShapeError: a side, the element count or the size exceeds 2^63 - 1, or the elements do not fill whole bytes.
    """
    if dtype not in DTYPE_BITS:
        raise DtypeError(f"unknown dtype {dtype[:40]!r}", path=path, tensor=tensor)
    count = 1
    for size in shape:
        # Checked at each step, before a later 0 can hide it, so that every reader agrees.
        count *= size
        if count > _MAX_SIZE or size > _MAX_SIZE:
            raise ShapeError("shape has a side, or elements, beyond 2^63 - 1", path=path, tensor=tensor)
    bits = count * DTYPE_BITS[dtype]
    if bits % 8:
        raise ShapeError(f"{count} elements of {dtype} do not fill whole bytes", path=path, tensor=tensor)
    if bits // 8 > _MAX_SIZE:
        raise ShapeError("tensor has more than 2^63 - 1 bytes", path=path, tensor=tensor)
    return bits // 8


def read_header(file: BinaryIO, size: int, path: str | Path) -> Header:
    """Read and validate the header of an open safetensors file of `size` bytes, from its first byte on.

    Sizes are compared with the file length and the limits before anything is read.

    Raises:
        TruncatedError: the file is shorter than its header or its data section.
        LimitError: header size, string length, nesting, number of tensors or of objects and arrays.
        MalformedError: not a JSON object of the required form, holes between tensors, or bytes after the last one; or
            the file is a Git LFS pointer.
        DtypeError: unknown dtype.
        ShapeError: shape and byte range disagree, or the shape overflows.
        OverlapError: tensors share bytes.
    """
    if size < LENGTH_BYTES:
        raise TruncatedError(
            "file ends within the header length", path=path, expected=f"{LENGTH_BYTES} bytes", got=size
        )
    beginning = read_exactly(file, LENGTH_BYTES, path)
    if POINTER_BEGINNING.startswith(beginning):
        refuse_pointer(beginning + read_exactly(file, min(size, len(POINTER_BEGINNING)) - LENGTH_BYTES, path), path)
    length = int.from_bytes(beginning, "little")
    if length > MAX_HEADER_BYTES:
        what = "header is too large" + (", or this is no safetensors file" if length > size else "")
        raise LimitError(what, path=path, expected=f"at most {MAX_HEADER_BYTES} bytes", got=length)
    data_start = LENGTH_BYTES + length
    if data_start > size:
        raise TruncatedError("file ends within its header", path=path, expected=f"{data_start} bytes", got=size)
    return parse_header(read_exactly(file, length, path), size, path)


def parse_header(data: bytes, file_size: int, path: str | Path) -> Header:
    """Validate the JSON part of a header, of a file of `file_size` bytes; errors as `read_header`."""
    data_start = LENGTH_BYTES + len(data)
    tensors = _parse_fast(data, file_size - data_start, path) or _parse_general(data, file_size - data_start, path)
    return Header(tensors[0], tensors[1], data_start, file_size)


def serialise_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    pad: bool = True,
) -> bytes:
    """Return the 8-byte length and the JSON of a header; offsets are assigned in the given order, without holes.

    `pad` adds blanks so that the data section starts at a multiple of 8 bytes, as the safetensors library does.
    Without it and without metadata the bytes are those that exllamav3 writes.

    Raises:
        MalformedError: a name is given twice, is reserved, or is not valid Unicode.
        DtypeError, ShapeError: as `tensor_bytes`.
        LimitError: the header is larger than 25,000,000 bytes, what the Hub's client still reads.
    """
    document: dict[str, object] = {}
    if metadata is not None:
        document[METADATA_KEY] = dict(metadata)
    offset = 0
    for name, dtype, shape in tensors:
        if name in document or name == METADATA_KEY:
            raise MalformedError("tensor name is given twice or reserved", tensor=name)
        end = offset + tensor_bytes(dtype, shape, tensor=name)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedError("header to write holds a string with a lone surrogate") from error
    if pad:
        text += b" " * (-len(text) % 8)
    if len(text) > MAX_WRITTEN_HEADER_BYTES:
        raise LimitError(
            "header to write is too large; use more, smaller shards",
            expected=f"at most {MAX_WRITTEN_HEADER_BYTES} bytes",
            got=len(text),
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


_Parsed = tuple[dict[str, TensorInfo], dict[str, str]]


def _parse_fast(data: bytes, data_size: int, path: str | Path) -> _Parsed | None:
    """Parse a header that is minified, in offset order and valid, as all known writers make them; else None.

    Accepts a subset of what `_parse_general` accepts, with the same result (property test).
    """
    if len(data) > MAX_JSON_CONTAINERS and count_containers(data) > MAX_JSON_CONTAINERS:
        return None
    columns = parse_compact(data)
    if columns is None or len(columns.names) > MAX_TENSORS:
        return None
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    try:
        for dtype, shape in set(zip(columns.dtypes, columns.shapes, strict=True)):
            sizes[dtype, shape] = tensor_bytes(dtype, shape)
    except (DtypeError, ShapeError):
        return None
    starts, ends = columns.starts, columns.ends
    expected = map(sizes.__getitem__, zip(columns.dtypes, columns.shapes, strict=True))
    if any(map(int.__ne__, map(int.__sub__, ends, starts), expected)):
        return None
    if starts[0] != 0 or starts[1:] != ends[:-1] or ends[-1] != data_size:
        return None
    infos = map(TensorInfo, columns.names, columns.dtypes, columns.shapes, starts, ends)
    tensors = dict(zip(columns.names, infos, strict=True))
    if len(tensors) != len(columns.names):
        return None
    metadata: object = {}
    if columns.metadata is not None:
        metadata = parse_json(columns.metadata, path=path, max_string=MAX_HEADER_STRING_BYTES)
    return tensors, _checked_metadata(metadata, path)


def _parse_general(data: bytes, data_size: int, path: str | Path) -> _Parsed:
    """Parse and check any header, one tensor after the other; normative for errors."""
    if data[:1] != b"{":
        raise MalformedError("header does not begin with a JSON object", path=path)
    document = parse_json(data, path=path, max_string=MAX_HEADER_STRING_BYTES, parse_int=_parse_int)
    if not isinstance(document, dict):
        raise MalformedError("header is not a JSON object", path=path)
    metadata = _checked_metadata(document.pop(METADATA_KEY, {}), path)
    if len(document) > MAX_TENSORS:
        raise LimitError("too many tensors", path=path, expected=f"at most {MAX_TENSORS}", got=len(document))
    tensors = {name: _checked_tensor(name, entry, path) for name, entry in document.items()}
    position = 0
    previous = ""
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < position:
            raise OverlapError(f"shares bytes with {previous}", path=path, tensor=info.name)
        if info.start > position:
            raise MalformedError(
                f"{info.start - position} bytes before it belong to no tensor", path=path, tensor=info.name
            )
        position, previous = info.end, info.name
    if position > data_size:
        raise TruncatedError(
            "file ends within its data section", path=path, expected=f"{position} bytes", got=data_size
        )
    if position < data_size:
        raise MalformedError("bytes after the last tensor", path=path, expected=f"{position} bytes", got=data_size)
    return tensors, metadata


def _checked_tensor(name: str, entry: object, path: str | Path) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise MalformedError("header entry must hold exactly dtype, shape and data_offsets", path=path, tensor=name)
    _check_unicode(name, path)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise MalformedError("dtype is not a string", path=path, tensor=name)
    if not _are_sizes(shape):
        raise MalformedError("shape is not a list of non-negative integers", path=path, tensor=name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedError("data_offsets is not a pair of ascending non-negative integers", path=path, tensor=name)
    start, end = offsets
    if end > _MAX_SIZE:
        raise MalformedError("data_offsets lie beyond 2^63 - 1", path=path, tensor=name)
    size = tensor_bytes(dtype, shape, path=path, tensor=name)
    if end - start != size:
        raise ShapeError(f"{dtype} {_excerpt(shape)} has {size} bytes, its range {end - start}", path=path, tensor=name)
    return TensorInfo(name, dtype, tuple(shape), start, end)


def _parse_int(digits: str) -> int | float:
    """Return an integer; -0 as a float, as the safetensors library reads it, so that it is no size."""
    return -0.0 if digits == "-0" else int(digits)


def _are_sizes(value: object) -> bool:
    # type() and not isinstance(): a bool is an int to isinstance.
    return type(value) is list and all(type(item) is int and item >= 0 for item in value)


def _checked_metadata(value: object, path: str | Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise MalformedError(f"{METADATA_KEY} is not an object of strings", path=path)
    for key, item in value.items():
        _check_unicode(key, path)
        _check_unicode(item, path)
    return value


def _check_unicode(text: str, path: str | Path) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise MalformedError("header holds a string with a lone surrogate", path=path) from error


def _excerpt(shape: list[int]) -> str:
    return str(shape if len(shape) <= 8 else [*shape[:8], "…"])[:80]
