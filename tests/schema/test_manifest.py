"""parse_manifest: what it takes and refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import espalier_format
from espalier_format.errors import EspalierError, FormatVersionError, PathError, SchemaError
from espalier_format.schema import Manifest, parse_manifest

ENTRY = {"size": 3, "sha256": "a" * 64, "git_blob_sha1": "b" * 40}
LARGE = {"size": 10 * 1024 * 1024 + 1, "sha256": "c" * 64}
DOCUMENT: dict[str, Any] = {
    "manifest_version": 1,
    "producer": {"name": "x", "version": "1"},
    "base_model": {"repo": "a/b", "revision": "main", "license": "apache-2.0"},
    "command": "convert a b",
    "files": {"config.json": ENTRY, "sub/model.safetensors": LARGE},
    "decode_digests": {"lm_head": "d" * 64},
}


def test_a_valid_manifest_comes_back_unchanged() -> None:
    manifest = parse_manifest(copy.deepcopy(DOCUMENT))
    assert manifest.to_json() == DOCUMENT
    assert list(manifest.to_json()) == list(DOCUMENT)


def test_optional_parts_may_be_absent() -> None:
    document = {key: DOCUMENT[key] for key in ("manifest_version", "producer", "files")}
    manifest = parse_manifest(document)
    assert manifest.decode_digests is None
    assert manifest.to_json() == document


REFUSALS: list[tuple[dict[str, Any], type[EspalierError]]] = [
    ({"manifest_version": 2}, FormatVersionError),
    ({"manifest_version": "1"}, FormatVersionError),
    ({"manifest_version": True}, FormatVersionError),
    ({"manifest_version": None, "new": 1}, FormatVersionError),
    ({"new": 1}, SchemaError),
    ({"files": []}, SchemaError),
    ({"files": {"a": {**ENTRY, "size": -1}}}, SchemaError),
    ({"files": {"a": {**ENTRY, "size": 3.0}}}, SchemaError),
    ({"files": {"a": {**ENTRY, "size": 2**63}}}, SchemaError),
    ({"files": {"a": {**ENTRY, "sha256": "A" * 64}}}, SchemaError),
    ({"files": {"a": {**ENTRY, "git_blob_sha1": "b" * 39}}}, SchemaError),
    ({"files": {"a": {**ENTRY, "md5": "x"}}}, SchemaError),
    ({"files": {"a": {"size": 3, "sha256": "a" * 64}}}, SchemaError),
    ({"files": {"a": {**LARGE, "git_blob_sha1": "b" * 40}}}, SchemaError),
    ({"files": {"espalier_manifest.json": ENTRY}}, SchemaError),
    ({"files": {"espalier_manifest.json.sig": ENTRY}}, SchemaError),
    ({"files": {"README.md": ENTRY}}, SchemaError),
    ({"files": {".gitattributes": ENTRY}}, SchemaError),
    ({"files": {"../a": ENTRY}}, PathError),
    ({"files": {"/a": ENTRY}}, PathError),
    ({"files": {"": ENTRY}}, PathError),
    ({"files": {"a//b": ENTRY}}, PathError),
    ({"files": {"a\\b": ENTRY}}, PathError),
    ({"decode_digests": {"a..b": "d" * 64}}, SchemaError),
    ({"decode_digests": {"a": "d" * 63}}, SchemaError),
    ({"base_model": {}}, SchemaError),
    ({"command": ["a"]}, SchemaError),
]


@pytest.mark.parametrize(("change", "kind"), REFUSALS)
def test_refusals(change: dict[str, Any], kind: type[EspalierError]) -> None:
    with pytest.raises(EspalierError) as caught:
        parse_manifest({**DOCUMENT, **change}, "espalier_manifest.json")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("document", [None, [], "x"])
def test_a_manifest_that_is_no_object(document: object) -> None:
    with pytest.raises(SchemaError):
        parse_manifest(document)


def test_files_in_sub_folders_may_have_reserved_names() -> None:
    """Only the README.md of the top level is left out of a manifest."""
    assert parse_manifest({**DOCUMENT, "files": {"docs/README.md": ENTRY}}).files


@pytest.mark.parametrize("size", [0, 10 * 1024 * 1024])
def test_small_files_have_a_git_blob_hash(size: int) -> None:
    assert parse_manifest({**DOCUMENT, "files": {"a": {**ENTRY, "size": size}}}).files["a"].size == size


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"manifest_version": 2}, FormatVersionError),
        ({"files": {"../a": ENTRY}}, PathError),
        ({"files": {"README.md": ENTRY}}, SchemaError),
    ],
)
def test_no_way_to_make_one_skips_a_rule(change: dict[str, Any], error: type[EspalierError]) -> None:
    wrong = {**DOCUMENT, **change}
    for make in (Manifest.model_validate, lambda document: Manifest(**document), espalier_format.parse_manifest):
        with pytest.raises(error):
            make(wrong)


@pytest.mark.parametrize("key", ["files", "decode_digests"])
def test_findings_are_bounded(key: str) -> None:
    document = {"manifest_version": 1, "producer": {"name": "a", "version": "1"}, "files": {}}
    document[key] = {f"f{number}": {} for number in range(20_000)}
    with pytest.raises(SchemaError, match=rf"{key}\.f0.* \(\d{{1,4}} more") as caught:
        parse_manifest(document)
    assert len(str(caught.value)) < 300
