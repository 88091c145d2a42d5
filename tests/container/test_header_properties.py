"""Whatever bytes come: a header that parses is self-consistent, anything else raises an EspalierError."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

import espalier_format
from espalier_format.container import header as header_module
from espalier_format.container.header import DTYPE_BITS, Header, read_header, serialise_header
from espalier_format.errors import EspalierError

LLAMA = Path(espalier_format.__file__).parent / "demo_data" / "llama-3.0-mcg" / "model.safetensors"
QMOE = Path(__file__).parents[1] / "fixtures" / "exl3" / "qmoe-2.5-mul1" / "model.safetensors"
SAMPLES = [
    path.name for path in sorted((Path(__file__).parents[1] / "fixtures" / "compressed-tensors").glob("*.safetensors"))
]


@cache
def content(path: Path) -> bytes:
    return path.read_bytes()


@cache
def seeds() -> tuple[bytes, ...]:
    """Headers of all sorts, each with its data section cut to what a mutation may need."""
    small = [
        serialise_header([("a", "F16", (2, 3)), ("b", "I32", ()), ("c", "U8", (0,))]) + bytes(16),
        serialise_header([("x.trellis", "I16", (1, 1, 16)), ("x.suh", "F16", (16,))], {"format": "pt"}) + bytes(64),
        serialise_header([("é", "F4", (2,))], {"k": '"{[\\'}, pad=False) + bytes(1),
    ]
    spaced = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, indent=1).encode()
    small.append(len(spaced).to_bytes(8, "little") + spaced + bytes(2))
    return tuple(small)


def attempt(data: bytes) -> Header | None:
    try:
        return read_header(io.BytesIO(data), len(data), "x.safetensors")
    except EspalierError as error:
        if not error.code or "\n" in str(error):
            raise AssertionError(repr(error)) from error
        return None


@cache
def known_to_the_library() -> frozenset[str]:
    """The dtypes that the installed release of safetensors reads: all of them since 0.8."""
    known = set()
    for dtype, bits in DTYPE_BITS.items():
        with contextlib.suppress(SafetensorError):
            deserialize(serialise_header([("a", dtype, (8,))]) + bytes(bits))
            known.add(dtype)
    return frozenset(known)


def test_the_library_knows_all_dtypes() -> None:
    if version("safetensors") < "0.8":
        assert known_to_the_library() >= {"F16", "BF16", "F32", "I16", "I32", "U8"}
    else:
        assert known_to_the_library() == DTYPE_BITS.keys()


def check(data: bytes) -> Header | None:
    """Check the promise of `read_header`, by its definition; the safetensors library must take what we take."""
    header = attempt(data)
    if header is None:
        return None
    covered = 0
    for info in sorted(header.tensors.values(), key=lambda info: (info.start, info.end)):
        count = 1
        for size in info.shape:
            assert type(size) is int
            count *= size
        assert info.start == covered
        assert (info.end - info.start) * 8 == count * DTYPE_BITS[info.dtype]
        covered = info.end
    assert header.data_start + covered == header.file_size == len(data)
    try:
        theirs = dict(deserialize(data))
    except SafetensorError as error:  # a dtype that only one of the two knows would show here
        if {info.dtype for info in header.tensors.values()} <= known_to_the_library():
            pytest.fail(f"safetensors refuses what we accept: {error}")
        return header
    assert theirs.keys() == header.tensors.keys()
    for name, tensor in theirs.items():
        info = header.tensors[name]
        assert tuple(tensor["shape"]) == info.shape
        assert bytes(tensor["data"]) == data[header.data_start + info.start : header.data_start + info.end]
    return header


def paths_agree(data: bytes) -> None:
    """The fast path gives what the general one gives, or nothing."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        return
    text, size = data[8 : 8 + length], len(data) - 8 - length
    try:
        fast = header_module._parse_fast(text, size, "x")
    except EspalierError:
        fast = None
    if fast is not None:
        general = header_module._parse_general(text, size, "x")
        assert (list(fast[0].items()), fast[1]) == (list(general[0].items()), general[1])


@pytest.mark.parametrize("path", [LLAMA, QMOE], ids=["llama", "qmoe"])
def test_real_files(path: Path) -> None:
    header = check(content(path))
    assert header is not None
    assert len(header.tensors) > 60
    paths_agree(content(path))


@pytest.mark.parametrize("name", SAMPLES)
def test_files_of_other_writers(name: str, fixtures: Path) -> None:
    data = content(fixtures / "compressed-tensors" / name)
    assert check(data) is not None
    paths_agree(data)


def test_seeds_are_valid() -> None:
    for seed in seeds():
        assert check(seed) is not None


mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "replace", "splice", "digit"]),
        st.integers(0, 2**32),
        st.integers(0, 2**32),
        st.binary(max_size=6)
        | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"-1", b"true", b" "]),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, steps: list[tuple[str, int, int, bytes]], span: int) -> bytes:
    """Change `data` within its first `span` bytes."""
    out = bytearray(data)
    for kind, first, second, extra in steps:
        end = min(span, len(out))
        if end == 0:
            break
        at = first % end
        if kind == "flip":
            out[at] ^= 1 << second % 8
        elif kind == "cut":
            del out[at : at + 1 + second % 40]
        elif kind == "insert":
            out[at:at] = extra
        elif kind == "replace":
            out[at : at + len(extra)] = extra
        elif kind == "splice":
            other = second % end
            out[at : at + 30] = out[other : other + 30]
        else:
            digits = [index for index in range(end) if 48 <= out[index] <= 57]
            if digits:
                out[digits[first % len(digits)]] = 48 + second % 10
    return bytes(out)


def with_length(data: bytes, original: bytes) -> bytes:
    """Correct the header length for what was inserted or removed, so that the JSON is what is tested."""
    length = int.from_bytes(original[:8], "little") + len(data) - len(original)
    return max(length, 0).to_bytes(8, "little") + data[8:]


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 3), mutations, st.booleans())
def test_mutated_small_files(which: int, steps: list[tuple[str, int, int, bytes]], mend: bool) -> None:
    original = seeds()[which]
    data = mutate(original, steps, len(original))
    if mend:
        data = with_length(data, original)
    check(data)
    paths_agree(data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([LLAMA, QMOE]), mutations, st.booleans())
def test_mutated_real_headers(path: Path, steps: list[tuple[str, int, int, bytes]], mend: bool) -> None:
    original = content(path)
    span = 8 + int.from_bytes(original[:8], "little")
    data = mutate(original, steps, span)
    if mend:
        data = with_length(data, original)
    check(data)
    paths_agree(data)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([LLAMA, QMOE]), st.integers(0, 2**32))
def test_truncated_real_files(path: Path, at: int) -> None:
    original = content(path)
    assert attempt(original[: at % len(original)]) is None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(data: bytes, framed: bool) -> None:
    check(len(data).to_bytes(8, "little") + data if framed else data)


names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())
tensors = st.lists(
    st.tuples(
        names, st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=3).map(lambda s: (*s, 8))
    ),
    max_size=6,
    unique_by=lambda item: item[0],
)


@given(tensors, st.none() | st.dictionaries(st.text(alphabet=st.characters(codec="utf-8")), names), st.booleans())
def test_round_trip(
    planned: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None, pad: bool
) -> None:
    text = serialise_header(planned, metadata, pad=pad)
    size = sum(shape_bytes(dtype, shape) for _, dtype, shape in planned)
    data = text + bytes(size)
    header = check(data)
    assert header is not None
    assert [(info.name, info.dtype, info.shape) for info in header.tensors.values()] == planned
    assert header.metadata == (metadata or {})
    paths_agree(data)


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * DTYPE_BITS[dtype] // 8
