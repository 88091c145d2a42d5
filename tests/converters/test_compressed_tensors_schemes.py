"""Which scheme a module has, by the config alone: precedence, spellings, and what a config may not say."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from espalier_format.converters import compressed_tensors_patterns
from espalier_format.converters.compressed_tensors_patterns import CLASS_RANK, Names, spell
from espalier_format.converters.compressed_tensors_schemes import Schemes, read_schemes
from espalier_format.errors import EspalierError, LimitError, SchemaError, SourceError

PATH = Path("config.json")
LAYER = "model.language_model.layers.3"


def _weights(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, **more}


def _schemes(*groups: tuple[list[str], dict[str, Any] | None], **block: Any) -> Schemes:
    stated = {f"group_{n}": {"targets": targets, "weights": weights} for n, (targets, weights) in enumerate(groups)}
    config = {"quant_method": "compressed-tensors", "config_groups": stated, **block}
    return read_schemes({"quantization_config": config}, PATH)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_most_specific_target_decides_whatever_the_order(swapped: bool) -> None:
    groups = [
        (["Linear"], _weights(4)),
        (["re:.*lm_head$", "re:.*experts.*"], _weights(8)),
        ([f"{LAYER}.mlp.experts.0.up_proj"], _weights(2)),
    ]
    schemes = _schemes(*(reversed(groups) if swapped else groups))
    found = {
        name: schemes.resolve(name).bits  # type: ignore[union-attr]
        for name in ("lm_head", f"{LAYER}.mlp.experts.0.up_proj", f"{LAYER}.mlp.experts.1.up_proj", "x")
    }
    assert list(found.values()) == [8, 2, 8, 4]


def test_expressions_are_anchored_at_the_start_only() -> None:
    schemes = _schemes((["re:model.visual", "re:.*experts", "re:layers"], _weights()))
    assert schemes.resolve("model.visual.blocks.0") is not None
    assert schemes.resolve("a.experts.0.up_proj") is not None
    assert schemes.resolve("model.layers.0") is None


@pytest.mark.parametrize("target", ["model.layers.3.mlp.up_proj", "re:^model\\.layers\\.3\\.", "re:^language_model\\."])
def test_names_of_the_model_in_memory_are_taken_for_those_of_the_checkpoint(target: str) -> None:
    schemes = _schemes(([target], _weights()))
    assert schemes.resolve(f"{LAYER}.mlp.up_proj") is not None
    assert schemes.resolve("model.visual.mlp.up_proj") is None


def test_a_container_does_not_name_what_is_in_it_and_a_class_no_module() -> None:
    names = Names.parse(["mlp", "Linear"], "ignore", PATH)
    assert names.rank("mlp.up_proj") == CLASS_RANK
    assert not names.named("mlp.up_proj")
    assert names.named("mlp")
    assert list(Names.parse(["mlp", "re:mlp$", "re:mlp", "Linear"], "ignore", PATH).idle(spell(["mlp.up_proj"]))) == [
        "mlp",
        "re:mlp$",
    ]


def test_two_groups_that_claim_a_module_alike_must_agree() -> None:
    alike = _schemes((["re:.*up_proj"], _weights(4)), (["re:.*proj"], _weights(4, observer="mse")))
    assert alike.resolve("a.up_proj") is not None
    differing = _schemes((["re:.*up_proj"], _weights(4)), (["re:.*proj"], _weights(8)))
    assert differing.resolve("a.down_proj") is not None
    with pytest.raises(SourceError, match="claim it alike, and differ") as caught:
        differing.resolve("a.up_proj")
    assert caught.value.tensor == "a.up_proj"


@pytest.mark.parametrize(
    ("changes", "strategy"), [({"group_size": 64}, "group"), ({"group_size": -1}, "channel"), ({}, "tensor")]
)
def test_a_strategy_that_is_not_stated_follows_from_the_group_size(changes: dict[str, Any], strategy: str) -> None:
    scheme = _schemes((["Linear"], {"num_bits": 4, **changes})).groups[0].scheme
    assert scheme is not None
    assert (scheme.strategy, scheme.symmetric) == (strategy, True)


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ({"format": "float-quantized"}, SourceError, "'float-quantized'"),
        ({"format": "pack-quantized-v2"}, SourceError, "'pack-quantized-v2'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, SourceError, "sparsity_config"),
        ({"sparsity_config": {"targets": ["Linear"]}}, SourceError, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": 1}}}, SourceError, "transform_config"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": [{}]}}}}, SourceError, "transform"),
        ({"transform_config": {"config_groups": {}, "u": 1}}, SourceError, "transform_config"),
        ({"config_groups": {}}, SchemaError, "must be an object with a group"),
        ({"config_groups": {"group_0": ["Linear"]}}, SchemaError, "group_0 must be an object, or a list of targets"),
        ({"config_groups": {"W5A4": ["Linear"]}}, SchemaError, "W5A4 must be an object"),
        ({"config_groups": {"W4A16": "Linear"}}, SchemaError, "W4A16 must be an object"),
        ({"config_groups": {"W4A16": [4]}}, SchemaError, "list of strings"),
        ({"config_groups": {"w8a16": ["Linear"]}}, SourceError, "up to release 0.13"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": [4]}}}, SchemaError, "weights must be an object"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}, "format": "nvfp4-pack-quantized"}}},
         SourceError, "nvfp4-pack-quantized"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, SchemaError, "list of strings"),
        ({"config_groups": {"a": {"targets": [], "codec": 1}}}, SourceError, "'codec' is not known"),
        ({"ignore": ["re:(("]}, SchemaError, "no valid expression"),
        ({"ignore": ["re:" + "(" * 900 + ")" * 900]}, SchemaError, "no valid expression"),
        ({"ignore": [r"re:(a)\1"]}, SourceError, "not supported"),
        ({"ignore": [7]}, SchemaError, "list of strings"),
        ({"ignore": ["re:" + "a" * 3000]}, LimitError, "too long"),
        ({"ignore": [f"re:{n}" for n in range(5000)]}, LimitError, "too many expressions"),
    ],
)  # fmt: skip
def test_what_a_config_may_not_say(block: dict[str, Any], error: type[EspalierError], message: str) -> None:
    with pytest.raises(error, match=message):
        _schemes((["Linear"], _weights()), **block)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "((a*)x?)*b", "(?:a+)+b", "(.|b){1,99}c", ".*" * 7 + "x", ".?" * 60 + "y"]
)
def test_an_expression_that_may_never_end_is_refused(pattern: str) -> None:
    with pytest.raises(SourceError, match="too long to match"):
        Names.parse([f"re:{pattern}"], "ignore", PATH)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*lm_head$", r".*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"model\.layers\.(0|1|39)\..*", r"^mtp.*",
        r".*\.[qkvo]_proj", r"(?!.*visual).*proj", r".*layers\.[0-9]+\.linear_attn\.in_proj_(a|b)", r"[(+*]+\(\+x",
    ],
)  # fmt: skip
def test_expressions_that_people_write_are_taken(pattern: str) -> None:
    started = time.monotonic()
    assert not Names.parse([f"re:{pattern}"], "ignore", PATH).named("a" * 500)
    assert time.monotonic() - started < 1


def test_a_list_that_takes_too_long_altogether_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names.parse(["re:.*a.*a.*b"], "ignore", PATH)
    assert not names.named("a" * 300)  # too long to be looked at
    monkeypatch.setattr(compressed_tensors_patterns, "_MAX_SECONDS", 0.1)
    several = [f"{'a' * 200}{number}" for number in range(1000)]
    started = time.monotonic()
    with pytest.raises(LimitError, match="takes too long to match"):
        names.prepare(spell(several))
    assert time.monotonic() - started < 30  # the clock is read before all are done


def test_an_expression_that_takes_too_long_on_a_long_name_is_refused_there() -> None:
    names = Names.parse(["re:.*a.*a.*a.*b"], "ignore", PATH)
    assert names.named("a" * 60 + "b")
    assert not names.named("x" * 250)  # has no "a", so that nothing is tried
    with pytest.raises(SourceError, match="may take too long on a long name"):
        names.named("a" * 250)


@pytest.mark.parametrize("junk", [[], {}, [[]], 7, 1.5, "x", True, [1], {"a": {}}, [None]])
@pytest.mark.parametrize(
    "key",
    [
        "config_groups", "ignore", "format", "version", "sparsity_config", "transform_config", "kv_cache_scheme",
        "targets", "weights", "input_activations", "num_bits", "type", "symmetric", "strategy", "group_size",
        "actorder", "dynamic", "group format",
    ],
)  # fmt: skip
def test_junk_is_refused_or_harmless(key: str, junk: object) -> None:
    """Whatever stands in a config, nothing but an error of ours comes of it."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": _weights()}
    block: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    if key in group or key in ("input_activations", "group format"):
        group[key.removeprefix("group ")] = junk
    elif key in group["weights"] or key in ("actorder", "dynamic"):
        group["weights"][key] = junk
    else:
        block[key] = junk
    try:
        schemes = read_schemes({"quantization_config": block}, PATH)
    except EspalierError:
        return
    schemes.resolve("a.b")
    assert set(schemes.ignore.idle(spell(["a.b"]))) <= set(schemes.ignore.entries)


def test_groups_without_weights_and_warnings() -> None:
    schemes = _schemes((["Linear"], None), (["re:x"], _weights()), kv_cache_scheme={"num_bits": 8})
    assert schemes.resolve("a") is None
    assert "key/value cache" in schemes.warnings[0]


@pytest.mark.parametrize(
    "block",
    [
        {"sparsity_config": {"format": "dense", "global_sparsity": 19.1, "sparsity_structure": "unstructured"}},
        {"transform_config": {"config_groups": {}}},
        {"transform_config": {"config_groups": None}},
        {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}}},
    ],
)
def test_what_changes_no_weight_is_no_reason_to_refuse(block: dict[str, Any]) -> None:
    assert _schemes((["Linear"], _weights()), **block).resolve("a") is not None


@pytest.mark.parametrize("key", ["sparsity_config", "transform_config", "config_groups", "ignore"])
def test_messages_name_the_place_that_counts(key: str) -> None:
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["x"]}}, key: "junk"}
    for config, place in (
        ({"compression_config": block}, "compression_config"),
        ({"text_config": {"quantization_config": block}}, "text_config.quantization_config"),
    ):
        with pytest.raises(EspalierError, match=rf": {re.escape(place)}\.{key}"):
            read_schemes(config, PATH)
