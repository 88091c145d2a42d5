"""One test per way in which a header can be wrong, named after the error class."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from espalier_format.container import header as header_module
from espalier_format.container.header import (
    DTYPE_BITS,
    Header,
    TensorInfo,
    parse_header,
    read_header,
    serialise_header,
    tensor_bytes,
)
from espalier_format.errors import (
    DtypeError,
    EspalierError,
    LimitError,
    MalformedError,
    OverlapError,
    ShapeError,
    TruncatedError,
)


def read(data: bytes) -> Header:
    return read_header(io.BytesIO(data), len(data), "x.safetensors")


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture(params=["minified", "spaced"])
def layout(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every test runs through the fast path and through the general one."""
    return {"minified": {"separators": (",", ":")}, "spaced": {"separators": (", ", ": ")}}[request.param]


def refuse(error: type[EspalierError], header: object, data: bytes, layout: dict[str, Any]) -> EspalierError:
    with pytest.raises(error) as caught:
        read(file_of(json.dumps(header, **layout).encode(), data))
    assert type(caught.value) is error
    assert caught.value.path == "x.safetensors"
    assert "\n" not in str(caught.value)
    return caught.value


def test_valid(layout: dict[str, Any]) -> None:
    document = {
        "__metadata__": {"format": "pt", "note": 'é"\\{}'},
        "b": entry("F16", [2, 3], [0, 12]),
        "scalar": entry("I32", [], [12, 16]),
        "empty": entry("F32", [0, 5], [16, 16]),
        "name with é": entry("BF16", [1], [16, 18]),
    }
    text = json.dumps(document, **layout).encode()
    parsed = read(file_of(text, bytes(18)))
    assert list(parsed.tensors) == ["b", "scalar", "empty", "name with é"]
    assert parsed.tensors["b"] == TensorInfo("b", "F16", (2, 3), 0, 12)
    assert parsed.tensors["b"].nbytes == 12
    assert parsed.metadata == {"format": "pt", "note": 'é"\\{}'}
    assert (parsed.data_start, parsed.file_size) == (8 + len(text), 8 + len(text) + 18)


def test_valid_out_of_order(layout: dict[str, Any]) -> None:
    """File order is kept, whatever the order of the byte ranges; empty tensors may stand at any border."""
    document = {"c": entry(offsets=[4, 8]), "z": entry(shape=[0], offsets=[4, 4]), "a": entry(offsets=[0, 4])}
    parsed = read(file_of(json.dumps(document, **layout).encode(), bytes(8)))
    assert list(parsed.tensors) == ["c", "z", "a"]


@pytest.mark.parametrize(
    "text",
    [b"{}", b'{"__metadata__":{}}', b'{"__metadata__":null}', b"{}   ", b'{"__metadata__":{"a":"b"}}\n'],
)
def test_valid_without_tensors(text: bytes) -> None:
    assert read(file_of(text)).tensors == {}


def test_valid_padding_of_header(layout: dict[str, Any]) -> None:
    for padding in range(9):
        text = json.dumps({"a": entry()}, **layout).encode() + b" " * padding
        assert read(file_of(text, bytes(4))).data_start == 8 + len(text)


def test_every_dtype(layout: dict[str, Any]) -> None:
    for dtype, bits in DTYPE_BITS.items():
        document = {"a": entry(dtype, [3, 8], [0, 3 * bits])}
        parsed = read(file_of(json.dumps(document, **layout).encode(), bytes(3 * bits)))
        assert parsed.tensors["a"].nbytes == 3 * bits


@pytest.mark.parametrize("size", range(8))
def test_truncated_error_in_the_length(size: int) -> None:
    with pytest.raises(TruncatedError):
        read(file_of({"a": entry()}, bytes(4))[:size])


def test_truncated_error_at_every_byte(layout: dict[str, Any]) -> None:
    data = file_of(json.dumps({"a": entry(), "b": entry(offsets=[4, 8])}, **layout).encode(), bytes(8))
    for size in range(len(data)):
        with pytest.raises(TruncatedError):
            read(data[:size])


def test_truncated_error_when_the_file_shrinks_meanwhile() -> None:
    data = file_of({"a": entry()}, bytes(4))
    with pytest.raises(TruncatedError):
        read_header(io.BytesIO(data[:20]), len(data), "x.safetensors")


@pytest.mark.parametrize("length", [100_000_001, 2**31, 2**60, 2**64 - 1])
def test_limit_error_for_header_length(length: int) -> None:
    with pytest.raises(LimitError):
        read(length.to_bytes(8, "little") + b"{}")


def test_limit_error_for_objects_and_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a name, and also in the form that is read without the general parser."""
    text = json.dumps({"[" * 20: entry()}, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    assert list(read(data).tensors) == ["[" * 20]
    for module in ("header", "json_document"):
        monkeypatch.setattr(f"espalier_format.container.{module}.MAX_JSON_CONTAINERS", 23)
    with pytest.raises(LimitError, match="too many objects and arrays"):
        read(data)


@pytest.mark.parametrize("length", [23, 24, 130])
def test_malformed_error_for_a_git_lfs_pointer(length: int) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16\n" + bytes(100)
    with pytest.raises(MalformedError, match=r"Git LFS pointer.*git lfs pull"):
        read(pointer[:length])


@pytest.mark.parametrize("data", [b"version ", b"version https://git-lf", b"version https://git-xx" + bytes(100)])
def test_what_only_begins_like_a_pointer(data: bytes) -> None:
    with pytest.raises(LimitError):
        read(data)


def test_truncated_error_for_header_length() -> None:
    with pytest.raises(TruncatedError):
        read((100_000_000).to_bytes(8, "little") + b"{}")


def test_limit_error_for_depth() -> None:
    for value in (b"[" * 10**6 + b"]" * 10**6, b'{"a":' * 10**6 + b"1" + b"}" * 10**6):
        with pytest.raises(LimitError):
            read(file_of(b'{"a":' + value + b"}"))


def test_limit_error_for_strings(layout: dict[str, Any]) -> None:
    for fits in (65536, 65537):
        documents: list[tuple[dict[str, object], bytes]] = [
            ({"n" * fits: entry()}, bytes(4)),
            ({"é" * (fits // 2) + "n" * (fits % 2): entry()}, bytes(4)),
            ({"__metadata__": {"k": "v" * fits}, "a": entry()}, bytes(4)),
            ({"__metadata__": {"k" * fits: "v"}, "a": entry()}, bytes(4)),
        ]
        for document, data in documents:
            text = json.dumps(document, ensure_ascii=False, **layout).encode()
            if fits == 65536:
                read(file_of(text, data))
            else:
                with pytest.raises(LimitError):
                    read(file_of(text, data))
    refuse(LimitError, {"a": entry(dtype="U" * 65537)}, bytes(4), layout)


def test_limit_error_for_number_of_tensors(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MAX_TENSORS", 3)
    for count in (3, 4):
        document = {str(index): entry(shape=[0], offsets=[0, 0]) for index in range(count)}
        if count == 3:
            read(file_of(json.dumps(document, **layout).encode()))
        else:
            refuse(LimitError, document, b"", layout)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b" {}",
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b'{"a":',
        b"{'a':1}",
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}',
        b'{"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[,1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,01]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
        b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
        b'{"a\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"a":"\\udfff"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,' + b"9" * 5000 + b"]}}",
    ],
)
def test_malformed_error_for_json(text: bytes) -> None:
    with pytest.raises(MalformedError):
        read(file_of(text, b"\0"))


@pytest.mark.parametrize(
    "wrong",
    [
        1,
        None,
        "U8",
        [],
        {},
        {"dtype": "U8", "shape": [4]},
        {**entry(), "extra": 1},
        entry(dtype=8),
        entry(dtype=None),
        entry(dtype=["U8"]),
        entry(shape=4),
        entry(shape="4"),
        entry(shape=None),
        entry(shape={"0": 4}),
        entry(shape=[4.0]),
        entry(shape=["4"]),
        entry(shape=[True, 4]),
        entry(shape=[-4]),
        entry(shape=[-2, -2]),
        entry(shape=[[4]]),
        entry(offsets=[0]),
        entry(offsets=[0, 4, 4]),
        entry(offsets=[False, 4]),
        entry(offsets=[0.0, 4]),
        entry(offsets=[0, float("nan")]),
        entry(offsets=[-4, 0]),
        entry(offsets=[4, 0]),
        entry(offsets=["0", "4"]),
        entry(offsets=None),
        entry(offsets={"0": 0, "4": 4}),
    ],
)
def test_malformed_error_for_an_entry(wrong: object, layout: dict[str, Any]) -> None:
    refuse(MalformedError, {"a": wrong}, bytes(4), layout)


@pytest.mark.parametrize("wrong", [1, "x", [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}, entry()])
def test_malformed_error_for_metadata(wrong: object, layout: dict[str, Any]) -> None:
    refuse(MalformedError, {"__metadata__": wrong, "a": entry()}, bytes(4), layout)
    refuse(MalformedError, {"a": entry(), "__metadata__": wrong}, bytes(4), layout)


@pytest.mark.parametrize(
    "document",
    [
        {"a": entry(offsets=[4, 8])},
        {"a": entry(), "b": entry(offsets=[5, 9])},
        {"a": entry(), "b": entry(shape=[0], offsets=[6, 6]), "c": entry(offsets=[8, 12])},
    ],
)
def test_malformed_error_for_holes(document: object, layout: dict[str, Any]) -> None:
    error = refuse(MalformedError, document, bytes(12), layout)
    assert "belong to no tensor" in str(error)


def test_malformed_error_for_bytes_behind_the_data(layout: dict[str, Any]) -> None:
    refuse(MalformedError, {"a": entry()}, bytes(5), layout)
    refuse(MalformedError, {}, bytes(1), layout)
    refuse(MalformedError, {"a": entry(shape=[0], offsets=[0, 0])}, bytes(1), layout)


@pytest.mark.parametrize("dtype", ["", "u8", "F12", "U8 ", "FLOAT", "F4_E2M1", "é", "U8\n"])
def test_dtype_error(dtype: str, layout: dict[str, Any]) -> None:
    error = refuse(DtypeError, {"name.of.it": entry(dtype)}, bytes(4), layout)
    assert error.tensor == "name.of.it"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("U8", [3]),
        ("U8", [5]),
        ("U8", [0]),
        ("U8", []),
        ("F16", [4]),
        ("I64", [1]),
        ("F4", [4]),
        ("F4", [7]),
        ("F6_E2M3", [1]),
        ("U8", [2**62, 4]),
        ("U8", [2**63, 0]),
        ("U8", [2**32, 2**32, 0]),
        ("U8", [2**64 + 4]),
        ("I64", [2**61]),
        ("U8", [10**30]),
        ("U8", [2] * 5000),
    ],
)
def test_shape_error(dtype: str, shape: list[int], layout: dict[str, Any]) -> None:
    refuse(ShapeError, {"a": entry(dtype, shape)}, bytes(4), layout)


@pytest.mark.parametrize(
    "document",
    [
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(offsets=[3, 7])},
        {"a": entry(offsets=[3, 7]), "b": entry()},
        {"a": entry(shape=[8], offsets=[0, 8]), "b": entry(shape=[2], offsets=[2, 4])},
        {"a": entry(), "b": entry(shape=[0], offsets=[2, 2])},
    ],
)
def test_overlap_error(document: object, layout: dict[str, Any]) -> None:
    refuse(OverlapError, document, bytes(8), layout)


def test_truncated_error_for_offsets_beyond_the_file(layout: dict[str, Any]) -> None:
    refuse(TruncatedError, {"a": entry(shape=[2**62], offsets=[0, 2**62])}, bytes(4), layout)


def test_serialise_is_what_safetensors_writes(tmp_path: Path) -> None:
    """Compared with the safetensors library, which sorts by alignment and name: the order is given that way."""
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    arrays = {"b": numpy.zeros((2, 3), "f4"), "c": numpy.zeros((), "i4"), "a": numpy.ones((5,), "f2")}
    path = tmp_path / "x.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file(arrays, path, metadata=metadata)
        data = path.read_bytes()
        ours = serialise_header([("b", "F32", (2, 3)), ("c", "I32", ()), ("a", "F16", (5,))], metadata)
        assert data.startswith(ours)
        assert len(ours) % 8 == 0


def test_serialise_is_what_exllamav3_writes(llama_exl3: Path, qmoe_exl3: Path) -> None:
    for folder in (llama_exl3, qmoe_exl3):
        data = (folder / "model.safetensors").read_bytes()
        parsed = read(data)
        ordered = sorted(parsed.tensors.values(), key=lambda info: (info.start, info.end))
        assert ordered == list(parsed.tensors.values())
        ours = serialise_header([(info.name, info.dtype, info.shape) for info in ordered], pad=False)
        assert ours == data[: parsed.data_start]


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_serialise_malformed_error_for_names(names: list[str]) -> None:
    for metadata in (None, {"format": "pt"}):
        with pytest.raises(MalformedError):
            serialise_header([(name, "U8", (1,)) for name in names], metadata)


@pytest.mark.parametrize("name", ["\ud800", "ok"])
def test_serialise_malformed_error_for_surrogates(name: str) -> None:
    with pytest.raises(MalformedError):
        serialise_header([(name, "U8", (1,))], {"k": "\udfff"} if name == "ok" else None)


def test_serialise_dtype_and_shape_errors() -> None:
    with pytest.raises(DtypeError):
        serialise_header([("a", "FP16", (1,))])
    with pytest.raises(ShapeError):
        serialise_header([("a", "F4", (1,))])


def test_serialise_limit_error() -> None:
    """Larger headers are readable for us, but not for the Hub's client."""
    names = [("x" * 60_000 + str(index), "U8", (0,)) for index in range(420)]
    with pytest.raises(LimitError):
        serialise_header(names)
    assert len(serialise_header(names[:400])) < 25_000_000


def test_tensor_bytes_of_all_small_shapes() -> None:
    for dtype, bits in DTYPE_BITS.items():
        for shape in itertools.product(range(4), repeat=3):
            count = shape[0] * shape[1] * shape[2]
            if count * bits % 8 == 0:
                assert tensor_bytes(dtype, shape) == count * bits // 8
            else:
                with pytest.raises(ShapeError):
                    tensor_bytes(dtype, shape)


def test_92160_tensors() -> None:
    """The size of a real mixture of experts; both paths agree on it. Time is measured in benchmarks, not here."""
    triples = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{suffix}", dtype, shape)
        for layer in range(40)
        for expert in range(256)
        for projection in ("gate_proj", "up_proj", "down_proj")
        for suffix, dtype, shape in (("suh", "F16", (16,)), ("svh", "F16", (16,)), ("trellis", "I16", (1, 1, 32)))
    ]
    data = serialise_header(triples, pad=False)
    size = len(data) + len(triples) // 3 * (32 + 32 + 64)
    fast = parse_header(data[8:], size, "x")
    general = parse_header(data[8:].replace(b'":{', b'": {', 1), size + 1, "x")
    assert fast.tensors == general.tensors
    assert list(fast.tensors) == [name for name, _, _ in triples]
