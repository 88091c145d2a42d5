"""The JSON Schemas in spec/ are those of the models, and take and refuse the same documents.

Not checked: that a document which the schema takes is valid; rules between fields are beyond it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from builders import Bank, Module, espalier_draft
from jsonschema import Draft202012Validator
from schema_cases import REMOVE, SCHEMA_FAULTS, changed

import espalier_format.spec
from espalier_format.errors import (
    CodebookError,
    FeatureError,
    FormatVersionError,
    PathError,
    SchemaError,
    SourceError,
)
from espalier_format.schema.base import Document, FrozenModel
from espalier_format.schema.config import QuantizationConfig
from espalier_format.schema.json_schema import main, schema_documents
from espalier_format.schema.manifest import Manifest
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
_BEYOND = {"nan", "inf", "96.0", "32.0", "0.0", "-0.0"}


@pytest.mark.parametrize(
    ("path", "value"), [fault[:2] for fault in SCHEMA_FAULTS if str(fault[1]) not in _BEYOND and fault[1] != 10**400]
)
def test_the_schema_refuses_what_the_models_refuse(
    validator: Draft202012Validator, path: tuple[str | int, ...], value: Any
) -> None:
    block = changed(json.loads(json.dumps(espalier_draft(source={"format": "exl3"}).block)), path, value)
    assert value is REMOVE or list(path)
    assert not validator.is_valid(block)


_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    32,
    48,
    2**31 + 1,
    0.5,
    "",
    "x",
    "0x00000000",
    "a" * 64,
    [],
    ["x"],
    {},
    {"x": 1},
)
"""One of each kind, and what is right in one place only."""


def _places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every place of a document but its top, with the value there."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key), member
        yield from _places(member, (*path, key))


def _mutants(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield copies with one value replaced, or one key gone, misspelt or doubled under another name."""
    for path, old in _places(block):
        if "quantization_config" in path[:-1]:
            continue  # the source's own block, which may hold anything
        *above, key = path
        for value in _VALUES:
            yield f"{path} = {value!r}", changed(copy.deepcopy(block), path, value)
        if isinstance(key, str):
            for renamed in (f"{key}_", key.upper(), f" {key}", f"{key}."):
                added = changed(copy.deepcopy(block), (*above, renamed), old)
                yield f"{path} also as {renamed!r}", added
                yield f"{path} as {renamed!r}", changed(copy.deepcopy(added), path, REMOVE)
            yield f"{path} gone", changed(copy.deepcopy(block), path, REMOVE)


def _config() -> dict[str, Any]:
    bank = Bank("experts", {"w1": (16, 16)}, ("e2m1@1",), "0-", (0, 32))
    source = {"format": "exl3", "quantization_config": {"a": 1}, "packed_signs": ["x"], "seed": 1}
    block: dict[str, Any] = espalier_draft(
        (Module("lm_head", 96, 96, "exl3-3inst@2"),), (bank,), {}, source=source
    ).block
    return block


def _manifest() -> dict[str, Any]:
    return {
        "manifest_version": 1,
        "producer": {"name": "x", "version": "1"},
        "command": "x",
        "base_model": {"repo": "a/b", "revision": "c", "license": "d"},
        "files": {
            "a": {"size": 1, "sha256": "a" * 64, "git_blob_sha1": "b" * 40},
            "b": {"size": 2**30, "sha256": "c" * 64},
        },
        "decode_digests": {"lm_head": "d" * 64},
    }


@pytest.mark.parametrize(
    ("model", "schema", "make"),
    [(QuantizationConfig, CONFIG_SCHEMA, _config), (Manifest, MANIFEST_SCHEMA, _manifest)],
    ids=["config", "manifest"],
)
def test_models_and_schema_agree_on_every_mutation(
    model: type[FrozenModel], schema: str, make: Callable[[], dict[str, Any]]
) -> None:
    """A fault of form is one for both; what the models take, or refuse by a rule between fields, fits the schema."""
    validator = Draft202012Validator(json.loads((SPEC / schema).read_text(encoding="utf-8")))
    document = json.loads(json.dumps(make()))
    model.model_validate(document, context=Document(None))
    faults = taken = 0
    for what, mutant in _mutants(document):
        fits = validator.is_valid(mutant)
        try:
            model.model_validate(mutant, context=Document(None))
        except pydantic.ValidationError:
            faults += 1
            assert not fits, what
        except (SourceError, FormatVersionError):
            assert not fits, what
        except (FeatureError, CodebookError):
            pass  # the schema has no names of features, and of codebooks the names only
        except (SchemaError, PathError):
            assert fits, what
        else:
            taken += 1
            assert fits, what
    assert faults > 300
    assert taken > 20
