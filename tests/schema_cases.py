"""Faults of ``quantization_config`` for several tests: (path to a value, what replaces it, part of the message)."""

from __future__ import annotations

import math
from typing import Any

BANK = "model.layers.0.mlp.experts"
REMOVE = object()

# Faults of single fields.
SCHEMA_FAULTS: list[tuple[tuple[str | int, ...], object, str]] = [
    (("producer",), REMOVE, "quantization_config.producer is required"),
    (("required_features",), REMOVE, "quantization_config.required_features is required"),
    (("required_features",), "x", "quantization_config.required_features"),
    (("required_features",), {}, "must be a JSON array"),
    (("ignore",), REMOVE, "quantization_config.ignore is required"),
    (("head_bits",), REMOVE, "quantization_config.head_bits is required"),
    (("extra",), 1, "quantization_config.extra is not a key"),
    (("producer", "url"), "x", "quantization_config.producer.url is not a key"),
    (("bits",), math.nan, "quantization_config.bits"),
    (("bits",), math.inf, "quantization_config.bits"),
    (("bits",), -1.0, "quantization_config.bits"),
    (("bits",), True, "quantization_config.bits"),
    (("bits",), "4", "quantization_config.bits"),
    (("head_bits",), math.nan, "quantization_config.head_bits"),
    (("modules",), [], "quantization_config.modules"),
    (("modules", "lm_head", "in_features"), 0, "quantization_config.modules.lm_head.in_features"),
    (("modules", "lm_head", "in_features"), -3, "quantization_config.modules.lm_head.in_features"),
    (("modules", "lm_head", "in_features"), 2**31 + 1, "quantization_config.modules.lm_head.in_features"),
    (("modules", "lm_head", "in_features"), 96.0, "quantization_config.modules.lm_head.in_features"),
    (("modules", "lm_head", "in_features"), True, "quantization_config.modules.lm_head.in_features"),
    (("modules", "lm_head", "in_features"), 10**400, "too large"),
    (("modules", "lm_head", "rotation", "in"), 48, "quantization_config.modules.lm_head.rotation.in"),
    (("modules", "lm_head", "rotation", "in"), False, "quantization_config.modules.lm_head.rotation.in"),
    (("modules", "lm_head", "rotation", "in"), REMOVE, "quantization_config.modules.lm_head.rotation.in is required"),
    (("modules", "lm_head", "rotation", "in_"), 32, "rotation.in_"),
    (("modules", "lm_head", "rotation"), {"in_": 0, "out": 0}, "rotation.in is required (1 more finding)"),
    (("modules", "lm_head", "rotation", "in"), 32.0, "rotation.in: must be one of the integers 0, 32, 64, 128 and 256"),
    (("modules", "lm_head", "rotation", "out"), -0.0, "but is -0.0"),
    (("expert_banks", BANK, "projections", "gate_proj", "rotation", "out"), 0.0, "gate_proj.rotation.out"),
    (("modules", "lm_head", "size_source"), "guess", "quantization_config.modules.lm_head.size_source"),
    (("modules", "lm_head", "size_source"), REMOVE, "size_source is required"),
    (("modules", "lm_head", "bias"), True, "quantization_config.modules.lm_head.bias is not a key"),
    (("modules", ""), {}, "quantization_config.modules"),
    (("modules", "a..b"), {}, 'quantization_config.modules["a..b"]'),
    (("modules", ".a"), {}, 'quantization_config.modules[".a"]'),
    (("modules", "a."), {}, 'quantization_config.modules["a."]'),
    (("codebooks", "e2m1@2", "multiplier"), "0x41e72f89", 'quantization_config.codebooks["e2m1@2"].multiplier'),
    (("codebooks", "e2m1@2", "multiplier"), 1105669001, "multiplier"),
    (("codebooks", "e2m1@2", "sha256"), "4A", "sha256"),
    (("codebooks", "e2m1@2", "gain"), 1, "gain is not a key"),
    (("expert_banks", BANK, "num_experts"), 0, "num_experts"),
    (("expert_banks", BANK, "projections"), {}, "projections"),
    (("expert_banks", BANK, "projections", "gate_proj", "codebooks"), [], "codebooks"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "01A2", "assignment"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "01 2", "assignment"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "", "assignment"),
    (("ignore",), "lm_head", "quantization_config.ignore"),
    (("ignore",), ["a", 1], "quantization_config.ignore[1]"),
    (("ignore",), [""], "quantization_config.ignore[0]"),
    (("source",), None, "quantization_config.source: must be left out"),
    (("codebooks", "e2m1@2", "addend"), None, "addend: must be left out where there is nothing to say, but is null"),
    (("modules", "a\n"), {}, "quantization_config.modules"),
    (("ignore",), ["a\x1f"], "quantization_config.ignore[0]"),
    (("expert_banks", BANK, "projections", "a\nb"), {}, "quantization_config.expert_banks"),
    (("expert_banks", BANK, "num_experts"), 2**20 + 1, "num_experts"),
    (("source",), {}, "quantization_config.source.format is required"),
    (("source",), {"format": ""}, "quantization_config.source.format"),
    (("source",), {"format": "exl3", "note": 1}, "quantization_config.source.note is not a key"),
    (("source",), {"format": "exl3", "index": 1}, "quantization_config.source.index"),
    (("source",), {"format": "exl3", "packed_signs": "x"}, "quantization_config.source.packed_signs"),
]

# Faults of rules between fields, which no JSON Schema states.
SEMANTIC_FAULTS: list[tuple[tuple[str | int, ...], object, str]] = [
    (("expert_banks", BANK, "num_experts"), 5, "one character per expert (5), but has 4"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "01-22", "one character per expert"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "01-3", "'3' is beyond the 3 listed codebooks"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "01-z", "beyond"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "00-2", "no expert is assigned e2m1@2"),
    (("expert_banks", BANK, "projections", "gate_proj", "assignment"), "----", "no expert is assigned"),
    (
        ("expert_banks", BANK, "projections", "gate_proj", "codebooks"),
        ["e2m1@2", "e2m1@1", "int5@3"],
        "sorted by width",
    ),
    (
        ("expert_banks", BANK, "projections", "gate_proj", "codebooks"),
        ["e2m1@1", "e2m1@1", "int5@3"],
        "without repeats",
    ),
    (("ignore",), ["b", "a"], "quantization_config.ignore[1]: names must be sorted"),
    (("ignore",), ["a", "a"], "quantization_config.ignore[1]: names must be sorted and unique"),
    (("ignore",), ["lm_head"], "lm_head is a quantized module"),
    (("ignore",), [f"{BANK}.0.gate_proj"], "is a quantized module"),
    (("modules", "lm_head", "size_source"), "padded", "150 is no multiple of the block"),
]


def changed(block: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    target: Any = block
    for key in path[:-1]:
        target = target[key]
    if value is REMOVE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return block
