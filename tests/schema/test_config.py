"""parse_quantization_config: what it takes, what it refuses, in which order, and in which words."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from builders import Bank, Module, espalier_draft
from pydantic import ValidationError
from schema_cases import BANK, REMOVE, SCHEMA_FAULTS, SEMANTIC_FAULTS, changed

from espalier_format.errors import (
    CodebookError,
    EspalierError,
    FeatureError,
    FormatVersionError,
    PathError,
    SchemaError,
    SourceError,
)
from espalier_format.schema import QuantizationConfig, Rotation, parse_quantization_config


@pytest.fixture
def block() -> dict[str, Any]:
    return copy.deepcopy(
        espalier_draft(source={"format": "exl3", "quantization_config": {"bits": None, "x": [1, {}]}, "seed": 3}).block
    )


def refused(block: object, kind: type[EspalierError]) -> str:
    with pytest.raises(EspalierError) as caught:
        parse_quantization_config(block, "config.json")
    assert type(caught.value) is kind
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("config.json: ")
    assert "pydantic" not in line
    assert len(line) < 400
    return line


def test_a_valid_block_comes_back_unchanged(block: dict[str, Any]) -> None:
    before = copy.deepcopy(block)
    config = parse_quantization_config(block)
    assert config.to_json() == before
    assert list(config.to_json()) == list(before)
    assert block == before
    assert parse_quantization_config(config.to_json()) == config


def test_the_objects_are_frozen(block: dict[str, Any]) -> None:
    config = parse_quantization_config(block)
    with pytest.raises(ValidationError):
        config.bits = 1.0  # type: ignore[misc]


def test_rotation_can_be_made_by_keyword() -> None:
    assert Rotation(in_=64, out=0).to_json() == {"in": 64, "out": 0}


def test_source_may_be_absent(block: dict[str, Any]) -> None:
    del block["source"]
    assert parse_quantization_config(block).source is None


@pytest.mark.parametrize("value", [2, 0, -1, "1", 1.0, True, None, [1], {}, 10**400])
def test_other_versions_are_refused(block: dict[str, Any], value: object) -> None:
    block["format_version"] = value
    assert "format_version" in refused(block, FormatVersionError)


def test_a_missing_version_is_refused(block: dict[str, Any]) -> None:
    del block["format_version"]
    assert "missing" in refused(block, FormatVersionError)


@pytest.mark.parametrize("value", ["exl3", "ESPALIER", None, 1, ["espalier"]])
def test_other_methods_are_refused(block: dict[str, Any], value: object) -> None:
    block["quant_method"] = value
    refused(block, SourceError)


def test_order_of_checks(block: dict[str, Any]) -> None:
    """Each fault is found before the later ones: a later version is refused for its version."""
    block["ignore"] = ["b", "a"]
    refused(block, SchemaError)
    block["codebooks"]["e2m1@2"]["sha256"] = "0" * 64
    refused(block, CodebookError)
    block["new_key"] = 1
    refused(block, SchemaError)
    block["required_features"] = ["new"]
    assert "'new'" in refused(block, FeatureError)
    block["format_version"] = 2
    refused(block, FormatVersionError)
    block["quant_method"] = "x"
    refused(block, SourceError)


@pytest.mark.parametrize("block", [None, [], "espalier", 3])
def test_a_block_that_is_no_object(block: object) -> None:
    refused(block, SchemaError)


@pytest.mark.parametrize(("path", "value", "message"), SCHEMA_FAULTS + SEMANTIC_FAULTS)
def test_faults_are_named_by_their_path(
    block: dict[str, Any], path: tuple[str | int, ...], value: object, message: str
) -> None:
    assert message in refused(changed(block, path, value), SchemaError)


def test_codebooks_of_one_width_are_sorted_by_name() -> None:
    bank = Bank(BANK, {"up_proj": (64, 64)}, ("e2m1@2", "exl3-mcg@2", "exl3-mul1@2.5", "int5@2.5"), "0132")
    wrong = Bank(BANK, {"up_proj": (64, 64)}, ("exl3-mcg@2", "e2m1@2"), "01")
    parse_quantization_config(espalier_draft((), (bank,)).block)
    refused(espalier_draft((), (wrong,)).block, SchemaError)


def test_an_unused_codebook_is_refused(block: dict[str, Any]) -> None:
    block["modules"]["lm_head"]["codebook"] = "int6@4"
    assert 'codebooks["int8@6"]: no module' in refused(block, SchemaError)


@pytest.mark.parametrize("expert", ["0", "3", "4", "007", "99999999999999999999"])
def test_a_module_in_the_namespace_of_a_bank_is_refused(block: dict[str, Any], expert: str) -> None:
    """Numbers beyond the bank too: nobody could tell what such a name means."""
    block["modules"][f"{BANK}.{expert}.gate_proj"] = block["modules"]["lm_head"]
    assert "expert_banks" in refused(block, SchemaError)


@pytest.mark.parametrize(
    "name", [f"{BANK}.0.up_proj", f"{BANK}.x.gate_proj", f"{BANK}.0.a.gate_proj", f"{BANK}.gate_proj"]
)
def test_modules_beside_a_bank_are_allowed(block: dict[str, Any], name: str) -> None:
    block["modules"][name] = block["modules"]["lm_head"]
    assert name in parse_quantization_config(block).modules


@pytest.mark.parametrize("name", [f"{BANK}.2.gate_proj", f"{BANK}.4.gate_proj", f"{BANK}.00.gate_proj", "anything"])
def test_names_that_may_be_ignored(block: dict[str, Any], name: str) -> None:
    """Expert 2 is stored plain, 4 and "00" are no experts, and unknown names do no harm."""
    block["ignore"] = [name]
    assert parse_quantization_config(block).ignore == (name,)


@pytest.mark.parametrize("key", ["model.layers.0.mlp", "experts2", "model.experts.0"])
def test_a_bank_key_must_end_in_experts(block: dict[str, Any], key: str) -> None:
    block["expert_banks"] = {key: block["expert_banks"][BANK]}
    assert "experts" in refused(block, SchemaError)


def test_more_than_36_codebooks_are_refused(block: dict[str, Any]) -> None:
    block["expert_banks"][BANK]["projections"]["gate_proj"]["codebooks"] = ["e2m1@1"] * 37
    refused(block, SchemaError)


@pytest.mark.parametrize(
    "name", ["e2m1@3", "e2m1@2.0", "e2m1@02", "E2M1@2", "e2m1", "e2m1@", "int7@3", "exl3-mcg@2.5", ""]
)
def test_unknown_codebooks_are_refused(block: dict[str, Any], name: str) -> None:
    block["modules"]["lm_head"]["codebook"] = name
    assert "quantization_config.modules.lm_head.codebook" in refused(block, CodebookError)


def test_a_codebook_without_constants_is_refused(block: dict[str, Any]) -> None:
    del block["codebooks"]["int8@6"]
    assert "int8@6" in refused(block, CodebookError)


@pytest.mark.parametrize(
    ("field", "value"), [("multiplier", "0x41E72F88"), ("sha256", "0" * 64), ("addend", "0x03D45AA4")]
)
def test_other_constants_are_refused(block: dict[str, Any], field: str, value: str) -> None:
    block["codebooks"]["e2m1@2"][field] = value
    assert f'codebooks["e2m1@2"].{field}' in refused(block, CodebookError)


@pytest.mark.parametrize("addend", [None, "0x03D45E64", "0x00000000"])
def test_3inst_needs_its_addend(addend: str | None) -> None:
    block = espalier_draft((Module("a", 16, 16, "exl3-3inst@4", (0, 0)),), ()).block
    assert block["codebooks"]["exl3-3inst@4"]["addend"] == "0x03D45AA4"
    parse_quantization_config(block)
    changed(block, ("codebooks", "exl3-3inst@4", "addend"), REMOVE if addend is None else addend)
    refused(block, CodebookError)


@pytest.mark.parametrize("name", ["../x", "/x", "a\\b", "a/../b", "", "a\x00b", "C:x"])
def test_carried_files_stay_in_the_folder(block: dict[str, Any], name: str) -> None:
    block["source"]["carried_files"] = {"quantization_config.json": name}
    refused(block, PathError)
    block["source"]["carried_files"] = {name: "quantization_config.json"}
    refused(block, PathError)


def test_every_codebook_can_be_stated() -> None:
    """All 28 codebooks of the format, with constants derived by the builders."""
    families = {
        "e2m1": "1 1.5 2",
        "int5": "2.5 3",
        "int6": "3.5 4",
        "int8": "5 6",
        "exl3-3inst": "1 2 3 4 5 6 7 8",
        "exl3-mcg": "1 2 3 4 5 6 7 8",
        "exl3-mul1": "1 1.5 2 2.5 3 3.5 4 5 6 7 8",
    }
    names = [f"{family}@{width}" for family, widths in families.items() for width in widths.split()]
    modules = [Module(f"m{number}", 16, 16, name, (0, 0)) for number, name in enumerate(names)]
    config = parse_quantization_config(espalier_draft(modules, ()).block)
    assert set(config.codebooks) == set(names)


def test_a_long_message_stays_short(block: dict[str, Any]) -> None:
    """A hostile name or value is cut in the message, and findings are counted, not listed."""
    for number in range(50):
        block["x" * 5000 + str(number)] = 1
    block["modules"]["y" * 100_000] = {"codebook": "z" * 100_000}
    assert re.search(r"\(\d+ more findings\)", refused(block, SchemaError))


def test_expert_codebooks(block: dict[str, Any]) -> None:
    config = parse_quantization_config(block)
    assert config.expert_banks[BANK].projections["gate_proj"].expert_codebooks() == ["e2m1@1", "e2m1@2", None, "int5@3"]


def test_the_model_alone_is_strict(block: dict[str, Any]) -> None:
    """Building the object directly checks forms, not the rules between fields."""
    assert QuantizationConfig.model_validate(block) == parse_quantization_config(block)
