from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_format.container import json_document
from espalier_format.container.json_document import JsonStyle, parse_json, read_json, read_json_object
from espalier_format.errors import LimitError, MalformedError, MissingFileError, SchemaError
from espalier_format.limits import MAX_JSON_CONTAINERS


def parse(data: bytes, **options: int) -> object:
    return parse_json(data, path="x.json", **options)


def test_values_survive() -> None:
    document = parse(b'{"a": [1, -0, 1e400, 123456789012345678901234567890, null, true], "\\ud800": "\\u00e9\xc3\xa9"}')
    assert document == {"a": [1, 0, math.inf, 123456789012345678901234567890, None, True], "\ud800": "éé"}


@pytest.mark.parametrize("blank", [" ", "\t"])
def test_a_huge_indent_is_not_kept(blank: str) -> None:
    document = {"a": {"b": [1, 2]}}
    kept = json.dumps(document, indent=blank * 16).encode()
    assert JsonStyle.detect(kept).dumps(document) == kept
    bomb = json.dumps(document, indent=blank * 17).encode()
    assert JsonStyle.detect(bomb).dumps(document) == json.dumps(document, indent=2).encode()


def test_limit_error_for_a_text_that_no_reader_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short lists without line feeds grow when each entry gets a line of its own."""
    monkeypatch.setattr(json_document, "MAX_JSON_BYTES", 10_000)
    with pytest.raises(LimitError, match="too large"):
        JsonStyle(indent=16).dumps([[0] * 600])
    assert JsonStyle(indent=None).dumps([[0] * 600])


def test_infinity_and_nan_literals_are_accepted() -> None:
    values = parse(b"[Infinity, -Infinity, NaN]")
    assert isinstance(values, list)
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"[1,]",
        b"{'a': 1}",
        b'{"a": 1} x',
        b'"\xff"',
        b'"\xed\xa0\x80"',  # a surrogate, encoded
        b'\xef\xbb\xbf{"a": 1}',  # a byte order mark
        '{"a": 1}'.encode("utf-16"),
        b'"a\nb"',
        b"01",
        b"9" * 10_000,
    ],
)
def test_malformed_error(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(data)


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(
        MalformedError, match="begins with a byte order mark, which JSON must not have; save it without"
    ):
        parse(b'\xef\xbb\xbf{"a": 1}')


@pytest.mark.parametrize("data", [b'{"a": 1, "a": 1}', b'[{"b": {"x": 1, "y": 2, "x": 3}}]', b'{"a": 1, "\\u0061": 2}'])
def test_malformed_error_for_duplicate_keys(data: bytes) -> None:
    with pytest.raises(MalformedError, match="twice"):
        parse(data)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"k":', b"}")])
def test_limit_error_for_depth_is_exact(opening: bytes, closing: bytes) -> None:
    parse(opening * 64 + b"1" + closing * 64)
    with pytest.raises(LimitError, match="deep"):
        parse(opening * 65 + b"1" + closing * 65)


@pytest.mark.parametrize("data", [b"[" * 10**6 + b"]" * 10**6, b'{"a":' * 10**6, b'[{"\\"]}": ' * 10**6, b"[" * 10**6])
def test_limit_error_for_a_million_levels(data: bytes) -> None:
    """Whatever recursion limit the host program has set: the parser would overflow the stack of the process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**7)
    try:
        with pytest.raises(LimitError, match="deep"):
            parse(data)
    finally:
        sys.setrecursionlimit(before)


def test_brackets_in_strings_do_not_count() -> None:
    data = json.dumps(["[" * 100 + '"' + "{" * 100 + "\\", "]" * 100, "\\\\"] * 40).encode()
    assert parse(data) == json.loads(data)


def test_brackets_in_strings_hide_no_depth() -> None:
    deep = b"[" + b'"]",[' * 70 + b"]" * 70 + b"]"
    with pytest.raises(LimitError, match="deep"):
        parse(deep)


def test_depth_across_scan_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_document, "_SCAN_BYTES", 7)
    document = [{"a[": ["\\", '"', [{}], {"b": [1, [2]]}]}] * 30
    data = json.dumps(document).encode()
    assert json_document._depth(data) == 6
    assert parse(data) == document


def test_limit_error_for_strings_is_exact() -> None:
    for text in ("a" * 100, "é" * 50, "\N{GRINNING FACE}" * 25):
        for document in (text, [1, text], {text: 1}, {"k": [None, [2.5, {"v": text}]]}):
            parse(json.dumps(document).encode(), max_string=100)
            for style in (True, False):
                longer = json.dumps(_lengthen(document), ensure_ascii=style).encode()
                with pytest.raises(LimitError, match="string"):
                    parse(longer, max_string=100)


def _lengthen(document: object) -> object:
    if isinstance(document, str):
        return document + "x"
    if isinstance(document, list):
        return [_lengthen(item) for item in document]
    if isinstance(document, dict):
        return {_lengthen(key): _lengthen(value) for key, value in document.items()}
    return document


def test_limit_error_for_a_string_of_nearly_100_mb() -> None:
    begin = time.monotonic()
    with pytest.raises(LimitError, match="string"):
        parse(b'"' + b"x" * 99_000_000 + b'"')
    assert time.monotonic() - begin < 30  # generous: the bound is on the order of growth


def test_limit_error_for_document_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(json_document, "MAX_JSON_BYTES", 10)
    assert parse(b"[1,2,3,45]") == [1, 2, 3, 45]
    with pytest.raises(LimitError, match="large"):
        parse(b"[1,2,3,456]")


def test_limit_error_before_a_huge_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(LimitError, match="large"):
        read_json(path)


def test_limit_error_for_objects_and_arrays() -> None:
    """Two bytes of text, sixty of memory: they are counted before the parser sees them."""
    parse(b"[" + b"[]," * 100_000 + b"[]]")
    for document in (b"[" + b"{}," * MAX_JSON_CONTAINERS + b"1]", b'["' + b"[" * (MAX_JSON_CONTAINERS + 1) + b'"]'):
        with pytest.raises(LimitError, match="too many objects and arrays"):
            parse(document)


def test_malformed_error_for_a_git_lfs_pointer() -> None:
    with pytest.raises(MalformedError, match=r"Git LFS pointer.*git lfs pull"):
        parse(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def test_missing_file_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_json(tmp_path / "config.json")


def test_schema_error_when_not_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[]")
    with pytest.raises(SchemaError):
        read_json_object(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.sampled_from([None, 0, 1, 2, 4, "\t"]), st.booleans(), st.sampled_from(["", "\n", " \n\n"]))
def test_style_reproduces_json_dump(document: object, indent: int | str | None, ascii_only: bool, end: str) -> None:
    """Only documents in a container: a bare value shows no layout to keep."""
    text = json.dumps({"key": document}, indent=indent, ensure_ascii=ascii_only) + end
    data = text.encode("utf-8", "backslashreplace")
    parsed = parse(data)
    assert JsonStyle.detect(data).dumps(parsed) == data


@given(st.dictionaries(st.text(), st.lists(st.integers()), max_size=4))
def test_style_reproduces_minimal_separators(document: object) -> None:
    data = json.dumps(document, separators=(",", ":")).encode()
    assert JsonStyle.detect(data).dumps(parse(data)) == data


def test_style_keeps_crlf() -> None:
    text = json.dumps({"a": {"b": [1, 2]}}, indent=2).replace("\n", "\r\n") + "\r\n"
    assert JsonStyle.detect(text).dumps(json.loads(text)) == text.encode()


def test_style_of_changed_document() -> None:
    style = JsonStyle.detect('{\n    "a": 1\n}')
    assert style.dumps({"a": 1, "b": [2]}) == b'{\n    "a": 1,\n    "b": [\n        2\n    ]\n}'


def test_style_of_fixtures(llama_exl3: Path, qmoe_exl3: Path) -> None:
    """Files that exllamav3 and transformers wrote come back byte for byte."""
    for folder in (llama_exl3, qmoe_exl3):
        for path in folder.glob("*.json"):
            if path.name != "tokenizer.json":  # written by another library, never rewritten here
                data = path.read_bytes()
                assert JsonStyle.detect(data).dumps(json.load(io.BytesIO(data))) == data, path


def test_malformed_error_for_a_number_that_would_become_an_infinity(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1e308, Infinity, 0.1]}')
    assert JsonStyle.of_file(path) == JsonStyle.detect(path.read_bytes())
    path.write_text('{"a": [-1e400]}')
    with pytest.raises(MalformedError, match=r"written again \(got -1e400\)"):
        JsonStyle.of_file(path)
