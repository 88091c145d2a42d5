"""The JSON Schemas in spec/ are those of the models, and take and refuse the same documents.

Not checked: that a document which the schema takes is valid; rules between fields are beyond it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
from builders import espalier_draft
from jsonschema import Draft202012Validator
from schema_cases import REMOVE, SCHEMA_FAULTS, changed

import espalier_format.spec
from espalier_format.schema.json_schema import main, schema_documents
from espalier_format.spec import CONFIG_SCHEMA, MANIFEST_SCHEMA

SPEC = Path(espalier_format.spec.__file__).parent
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize("name", [CONFIG_SCHEMA, MANIFEST_SCHEMA])
def test_the_committed_schema_is_current(name: str) -> None:
    """After a change to the models: python -m espalier_format.schema.json_schema."""
    pinned = re.search(r"^pydantic==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    if pinned[1] != pydantic.VERSION:
        pytest.skip(f"the text depends on the release of pydantic; the shipped one is made with {pinned[1]}")
    assert (SPEC / name).read_text(encoding="utf-8") == schema_documents()[name]


def test_main_writes_both(tmp_path: Path) -> None:
    main(tmp_path)
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == schema_documents()


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads((SPEC / CONFIG_SCHEMA).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_a_valid_block_fits(validator: Draft202012Validator) -> None:
    block = espalier_draft(source={"format": "exl3", "quantization_config": {"a": None}}).block
    assert list(validator.iter_errors(block)) == []


def test_the_manifest_schema_is_well_formed() -> None:
    schema = json.loads((SPEC / MANIFEST_SCHEMA).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    document = {
        "manifest_version": 1,
        "producer": {"name": "x", "version": "1"},
        "files": {"a": {"size": 1, "sha256": "a" * 64, "git_blob_sha1": "b" * 40}},
    }
    assert Draft202012Validator(schema).is_valid(document)
    assert not Draft202012Validator(schema).is_valid({**document, "manifest_version": 2})


# What JSON cannot say, or JSON Schema does not tell apart: NaN and infinity; 96.0 is an integer there.
_BEYOND = {"nan", "inf", "96.0"}


@pytest.mark.parametrize(
    ("path", "value"), [fault[:2] for fault in SCHEMA_FAULTS if str(fault[1]) not in _BEYOND and fault[1] != 10**400]
)
def test_the_schema_refuses_what_the_models_refuse(
    validator: Draft202012Validator, path: tuple[str | int, ...], value: Any
) -> None:
    block = changed(json.loads(json.dumps(espalier_draft(source={"format": "exl3"}).block)), path, value)
    assert value is REMOVE or list(path)
    assert not validator.is_valid(block)
