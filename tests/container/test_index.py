from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.header import Header, TensorInfo
from espalier_format.container.index import INDEX_NAME, Index, IndexDifference, IndexProblem
from espalier_format.errors import MalformedError, PathError, SchemaError


def header(*names: str) -> Header:
    """A header of tensors of 4 bytes each."""
    tensors = {
        name: TensorInfo(name, "U8", (4,), 4 * position, 4 * position + 4) for position, name in enumerate(names)
    }
    return Header(tensors, {}, 100, 100 + 4 * len(names))


HEADERS = {"m-1.safetensors": header("b", "a"), "m-2.safetensors": header("c")}
GOOD = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}


def write(folder: Path, document: object) -> CheckpointFolder:
    (folder / INDEX_NAME).write_text(json.dumps(document))
    return CheckpointFolder(folder)


def test_no_index(tmp_path: Path) -> None:
    assert Index.read(CheckpointFolder(tmp_path)) is None


def test_read(tmp_path: Path) -> None:
    index = Index.read(write(tmp_path, {"metadata": {"total_size": 12, "x": None}, "weight_map": GOOD}))
    assert index is not None
    assert index.weight_map == GOOD
    assert index.metadata == {"total_size": 12, "x": None}
    assert index.compare(HEADERS) == []


def test_metadata_may_be_missing(tmp_path: Path) -> None:
    index = Index.read(write(tmp_path, {"weight_map": GOOD}))
    assert index is not None
    assert index.compare(HEADERS) == []


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"weight_map": []},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": None}},
        {"metadata": 1, "weight_map": {}},
    ],
)
def test_schema_error(tmp_path: Path, document: object) -> None:
    with pytest.raises(SchemaError):
        Index.read(write(tmp_path, document))


def test_malformed_error(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(MalformedError):
        Index.read(CheckpointFolder(tmp_path))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", ""])
def test_path_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathError) as caught:
        Index.read(write(tmp_path, {"weight_map": {"a": name}}))
    assert caught.value.path == str(tmp_path / INDEX_NAME)


def test_path_error_when_the_index_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").write_text("{}")
    (tmp_path / "root" / INDEX_NAME).symlink_to("../other")
    with pytest.raises(PathError):
        Index.read(CheckpointFolder(tmp_path / "root"))


def test_build_is_what_transformers_writes() -> None:
    """Form as in transformers' save_pretrained: json.dumps(indent=2, sort_keys=True) and a newline."""
    built = Index.build(HEADERS)
    assert built.compare(HEADERS) == []
    assert (
        built.dumps()
        == b"""{
  "metadata": {
    "total_size": 12
  },
  "weight_map": {
    "a": "m-1.safetensors",
    "b": "m-1.safetensors",
    "c": "m-2.safetensors"
  }
}
"""
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"d": "m-2.safetensors"}, IndexDifference(IndexProblem.TENSOR_MISSING, "d", "m-2.safetensors")),
        ({"c": None}, IndexDifference(IndexProblem.TENSOR_UNLISTED, "c", found="m-2.safetensors")),
        (
            {"a": "m-2.safetensors"},
            IndexDifference(IndexProblem.WRONG_SHARD, "a", "m-2.safetensors", "m-1.safetensors"),
        ),
    ],
)
def test_differences(change: dict[str, str | None], expected: IndexDifference) -> None:
    weight_map = {tensor: shard for tensor, shard in (GOOD | change).items() if shard is not None}
    differences = Index(weight_map, {"total_size": 12}).compare(HEADERS)
    assert differences == [expected]
    assert not differences[0].informational
    assert str(expected.tensor) in str(expected)


def test_difference_shard_missing() -> None:
    differences = Index(GOOD | {"d": "m-3.safetensors"}, {}).compare(HEADERS)
    assert differences == [
        IndexDifference(IndexProblem.SHARD_MISSING, shard="m-3.safetensors"),
        IndexDifference(IndexProblem.TENSOR_MISSING, "d", "m-3.safetensors"),
    ]


@pytest.mark.parametrize("stated", [11, "12", 12.5, [12]])
def test_difference_total_size_is_informational(stated: object) -> None:
    (difference,) = Index(GOOD, {"total_size": stated}).compare(HEADERS)
    assert difference.problem is IndexProblem.TOTAL_SIZE
    assert difference.informational


def test_a_tensor_in_two_shards_may_be_listed_in_either() -> None:
    headers = HEADERS | {"m-3.safetensors": header("c")}
    assert Index(GOOD, {}).compare(headers) == []
    assert Index(GOOD | {"c": "m-3.safetensors"}, {}).compare(headers) == []
    assert Index.build(headers).weight_map["c"] == "m-3.safetensors"
