"""parse_quantization_config: what it takes, what it refuses, in which order, and in which words."""

from __future__ import annotations

import copy
import json
import math
import re
import tracemalloc
from typing import Any

import pytest
from builders import Bank, Module, espalier_draft
from pydantic import ValidationError
from schema_cases import BANK, REMOVE, SCHEMA_FAULTS, SEMANTIC_FAULTS, changed

import espalier_format
from espalier_format.errors import (
    CodebookError,
    EspalierError,
    FeatureError,
    FormatVersionError,
    LimitError,
    PathError,
    SchemaError,
    SourceError,
)
from espalier_format.schema import CodebookConstants, QuantizationConfig, Rotation, parse_quantization_config


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


def test_rotation_can_be_made_without_the_key_in() -> None:
    assert Rotation.of(64, 0).to_json() == {"in": 64, "out": 0}


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


def test_the_model_alone_checks_forms(block: dict[str, Any]) -> None:
    assert QuantizationConfig.model_validate(block) == parse_quantization_config(block)
    with pytest.raises(ValidationError):
        QuantizationConfig.model_validate({**block, "bits": "2"})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"quant_method": "exl3"}, SourceError),
        ({"format_version": 2}, FormatVersionError),
        ({"required_features": ["x"]}, FeatureError),
        ({"codebooks": {}}, CodebookError),
        ({"ignore": ["b", "a"]}, SchemaError),
        ({"source": {"format": "exl3", "carried_files": {"a": "../b"}}}, PathError),
    ],
)
def test_no_way_to_make_one_skips_a_rule(
    block: dict[str, Any], change: dict[str, Any], error: type[EspalierError]
) -> None:
    wrong = {**block, **change}
    for make in (
        QuantizationConfig.model_validate,
        lambda block: QuantizationConfig(**block),
        lambda block: QuantizationConfig.model_validate_json(json.dumps(block)),
    ):
        with pytest.raises(error) as caught:
            make(wrong)
        with pytest.raises(error) as parsed:
            espalier_format.parse_quantization_config(wrong, "config.json")
        assert str(parsed.value) == f"config.json: {caught.value}"


def test_constants_of_another_codebook_are_refused_by_the_model(block: dict[str, Any]) -> None:
    name = next(iter(block["codebooks"]))
    block["codebooks"][name] = {**block["codebooks"][name], "multiplier": "0x00000001"}
    with pytest.raises(CodebookError, match="multiplier"):
        QuantizationConfig.model_validate(block)


@pytest.mark.parametrize(
    "path", [("producer", "name"), ("codebooks", "e2m1@2", "\ud800"), ("source", "carried_files", "\ud800")]
)
def test_half_surrogates_are_refused(block: dict[str, Any], path: tuple[str, ...]) -> None:
    """In keys and values; what the specification does not define may hold them, and NaN."""
    block["source"] = {
        "format": "exl3",
        "quantization_config": {"\ud800": math.nan},
        "replaced_config": {"x": "\udfff"},
    }
    block["source"]["carried_files"] = {}
    assert parse_quantization_config(block).to_json()["source"]["quantization_config"].keys() == {"\ud800"}  # type: ignore[index]
    changed(block, path, "\ud800")
    with pytest.raises(SchemaError):
        parse_quantization_config(block)


def test_none_may_be_given_to_the_constructors() -> None:
    """What must not be null in a document is still a way to say nothing in Python."""
    constants = CodebookConstants(multiplier="0x8A5B438F", addend=None, sha256="0" * 64)
    assert "addend" not in constants.to_json()


def test_experts_per_codebook(block: dict[str, Any]) -> None:
    projection = parse_quantization_config(block).expert_banks[BANK].projections["gate_proj"]
    assert projection.assignment == "01-2"
    assert projection.experts_per_codebook() == {"e2m1@1": 1, "e2m1@2": 1, "int5@3": 1}


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("modules",), {f"m{number}": {} for number in range(20_000)}, "modules.m0"),
        (("codebooks",), {f"c{number}": {} for number in range(20_000)}, "codebooks.c0"),
        (("expert_banks",), {f"e{number}.experts": {} for number in range(20_000)}, "expert_banks"),
        (("expert_banks", BANK, "projections"), {f"p{number}": {} for number in range(20_000)}, "projections.p0"),
        (("ignore",), ["a"] * 1000 + [""] * 20_000, r"ignore\[1000\]"),
        (("source",), {"format": "exl3", "packed_signs": [1] * 20_000}, r"packed_signs\[0\]"),
        (("source",), {"format": "exl3", "carried_files": dict.fromkeys(map(str, range(20_000)), 1)}, "carried_files"),
        (("producer",), {f"x{number}": 1 for number in range(20_000)}, "producer"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_findings_are_bounded(block: dict[str, Any], path: tuple[str, ...], value: object, where: str) -> None:
    """A finding costs a thousand times what its three bytes of JSON do: they are not all collected."""
    changed(block, path, value)
    with pytest.raises(SchemaError, match=where) as caught:
        parse_quantization_config(block)
    more = re.search(r"\((\d+) more finding", str(caught.value))
    assert more is None or int(more[1]) < 3000


def test_two_files_carried_under_one_name_are_refused(block: dict[str, Any]) -> None:
    block["source"] = {"format": "exl3", "carried_files": {"a": "c", "b": "c"}}
    with pytest.raises(SchemaError, match=r"carried_files\.b"):
        parse_quantization_config(block)


def counted(modules: int, assignment: str, projections: tuple[str, ...] = ("up_proj",)) -> dict[str, Any]:
    """A block without constants of sizes; only the number of tensors that it calls for can be wrong."""
    draft = espalier_draft(
        [Module("lm_head", 16, 16, "e2m1@1", (0, 0))],
        [Bank(BANK, dict.fromkeys(projections, (16, 16)), ("e2m1@1",), "0", (0, 0))],
        {},
    )
    block: dict[str, Any] = draft.block
    bank = block["expert_banks"][BANK]
    bank["num_experts"] = len(assignment)
    for projection in bank["projections"].values():
        projection["assignment"] = assignment
    block["modules"] = {f"m{number}": block["modules"]["lm_head"] for number in range(modules)}
    block["ignore"] = []
    return block


@pytest.mark.parametrize(
    ("modules", "assignment", "projections", "tensors"),
    [
        (0, "0" * 666_666 + "--", ("up_proj",), 2_000_000),
        (0, "0" * 666_667, ("up_proj",), 2_000_001),
        (0, "0" * 2**20, ("up_proj",), 3 * 2**20),
        (2, "0" * 10 + "-" * 666_640, ("a", "b", "c"), 6 + 3 * (30 + 666_640)),
        (1, "0" + "-" * 999_994, ("a", "b"), 3 + 2 * (3 + 999_994)),
        (1, "0" + "-" * 999_995, ("a", "b"), 3 + 2 * (3 + 999_995)),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, str) else None,
)
def test_the_tensors_that_a_config_calls_for_are_limited(
    modules: int, assignment: str, projections: tuple[str, ...], tensors: int
) -> None:
    """An expert is one byte here, and hundreds as an object of a plan."""
    block = counted(modules, assignment, projections)
    if tensors <= 2_000_000:
        parse_quantization_config(block)
    else:
        assert f"got {tensors}" in refused(block, LimitError)


def test_contradictions_come_before_the_limit() -> None:
    block = counted(0, "0" * 666_667)
    block["ignore"] = ["b", "a"]
    refused(block, SchemaError)


def test_a_plan_of_a_small_file_stays_small() -> None:
    """A config of a megabyte took 260 MB before it was refused; the refusal needs less than ten."""
    block = counted(0, "0" * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError):
            espalier_format.plan({"quantization_config": block})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
