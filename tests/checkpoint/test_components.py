"""The component rules, on real names, and the averages that rest on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import Bank, Module, bits_of_modules, espalier_draft, read_safetensors

from espalier_format.checkpoint import Component, component_of, open_checkpoint
from espalier_format.checkpoint.bits import average_bits
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.schema import parse_quantization_config

NAMES = {
    # Llama, Qwen, Mistral, Gemma
    "model.layers.0.self_attn.q_proj": Component.ATTENTION,
    "model.layers.0.self_attn.q_norm.weight": Component.OTHER,
    "model.layers.0.mlp.down_proj": Component.MLP,
    "model.layers.0.mlp.down_proj.slice.3": Component.MLP,
    "model.layers.0.input_layernorm.weight": Component.OTHER,
    "model.norm.weight": Component.OTHER,
    "model.embed_tokens.weight": Component.EMBEDDINGS,
    "model.language_model.embed_tokens_per_layer.weight": Component.EMBEDDINGS,
    "lm_head": Component.HEAD,
    "lm_head.weight": Component.HEAD,
    "model.language_model.lm_head.esp_trellis": Component.HEAD,
    "head": Component.HEAD,
    "head.weight": Component.HEAD,
    "model.head.proj": Component.OTHER,
    # Mixtures of experts
    "model.layers.3.mlp.experts.17.gate_proj": Component.EXPERTS,
    "model.layers.3.mlp.experts.gate_up_proj": Component.EXPERTS,
    "model.layers.3.block_sparse_moe.experts.0.w1": Component.EXPERTS,
    "model.layers.3.block_sparse_moe.gate.weight": Component.OTHER,
    "model.layers.3.mlp.gate.weight": Component.OTHER,
    "model.layers.3.mlp.gate.e_score_correction_bias": Component.OTHER,
    "model.layers.3.mlp.gate_proj": Component.MLP,
    "model.layers.3.mlp.shared_expert.up_proj": Component.SHARED_EXPERT,
    "model.layers.3.mlp.shared_experts.up_proj": Component.SHARED_EXPERT,
    "model.layers.3.mlp.shared_expert_gate.weight": Component.OTHER,
    "model.layers.3.router.proj.weight": Component.OTHER,
    # Linear attention
    "model.language_model.layers.0.linear_attn.in_proj_qkv": Component.LINEAR_ATTENTION,
    "model.language_model.layers.0.linear_attn.A_log": Component.LINEAR_ATTENTION,
    "model.language_model.layers.0.linear_attn.norm.weight": Component.OTHER,
    # DeepSeek: only the parts that no decoder layer has give the extra layer away
    "model.layers.61.eh_proj": Component.MTP,
    "model.layers.61.shared_head.head": Component.MTP,
    "model.layers.61.enorm.weight": Component.MTP,
    "model.layers.61.self_attn.kv_a_proj_with_mqa": Component.ATTENTION,
    # MTP and other modalities come before everything else
    "mtp.fc": Component.MTP,
    "mtp.layers.0.mlp.experts.7.up_proj": Component.MTP,
    "mtp.norm.weight": Component.MTP,
    "model.visual.blocks.0.attn.q_proj": Component.VISION,
    "model.visual.merger.linear_fc1": Component.VISION,
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1": Component.VISION,
    "multi_modal_projector.linear_1": Component.VISION,
    "model.audio_tower.conformer.0.attention.attn.q_proj": Component.VISION,
    # Others
    "score": Component.OTHER,
    "": Component.OTHER,
    "3": Component.OTHER,
    "my_experts.0.w1": Component.OTHER,
    "Model.MLP.up": Component.OTHER,
}


@pytest.mark.parametrize(("name", "component"), NAMES.items())
def test_component_of(name: str, component: Component) -> None:
    assert component_of(name) is component


def test_all_names_of_the_fixtures(llama_exl3: Path, qmoe_exl3: Path) -> None:
    """Every name of two real checkpoints, counted; the expected numbers follow from the architectures."""
    counts: dict[Component, int] = {}
    for folder in (llama_exl3, qmoe_exl3):
        for name in read_safetensors(folder / "model.safetensors")[0]:
            counts[component_of(name)] = counts.get(component_of(name), 0) + 1
    qmoe_layers, llama_layers = 4, 2
    assert counts == {
        Component.EXPERTS: qmoe_layers * 8 * 3 * 4,
        Component.SHARED_EXPERT: qmoe_layers * 3 * 4,
        Component.ATTENTION: (llama_layers + 1) * 4 * 4,
        Component.LINEAR_ATTENTION: 3 * (3 * 4 + 5),
        Component.MLP: llama_layers * 3 * 4,
        Component.HEAD: 2 * 4,
        Component.EMBEDDINGS: 2,
        Component.MTP: 4 + 8 * 3 * 4 + 3 * 4 + 4 * 4 + 2 + 4 + 3,
        Component.VISION: 2 * (4 * 5 + 2 * 5 + 2 + 4) + 2 * 5 + 2 + 2 + 1,
        Component.OTHER: llama_layers * 2 + 1 + qmoe_layers * (2 + 2) + 3 + 2 + 1,
    }


def test_a_long_name_costs_little() -> None:
    """A rule that took quadratic time would keep this test busy for hours; nothing else is checked."""
    for part in ("norm1", "experts", "1", "vision_", "a.norm"):
        name = ".".join([part] * (1_000_000 // len(part)))
        component_of(name + "x")


def test_bits_of_a_config_and_of_its_modules(tmp_path: Path) -> None:
    """The builder computes them in decimal arithmetic, module by module."""
    draft = espalier_draft()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.quantization is not None
        stated = (draft.block["bits"], draft.block["head_bits"])
        computed = average_bits(checkpoint.quantization.modules, checkpoint.quantization.expert_banks)
        assert (computed.bits, computed.head_bits) == stated
        assert bits_of_modules(checkpoint.modules.values()) == stated


@pytest.mark.parametrize(("codebook", "bits"), [("e2m1@1.5", 1.023438), ("int5@2.5", 1.039062)])
def test_half_way_cases_go_to_even(codebook: str, bits: float) -> None:
    """131/128 = 1.0234375 and 133/128 = 1.0390625 lie half-way between six decimals."""
    modules = (Module("a", 128, 127, "e2m1@1", (0, 0)), Module("b", 16, 8, codebook, (0, 0)))
    config = parse_quantization_config(espalier_draft(modules, (), {}).block)
    assert average_bits(config.modules, config.expert_banks).bits == bits


def test_nothing_quantized_in_the_decoder() -> None:
    config = parse_quantization_config(espalier_draft((Module("lm_head", 32, 32),), ()).block)
    computed = average_bits(config.modules, config.expert_banks)
    assert computed.bits == 0.0
    assert computed.head_bits == 2 * 128 * 128 / (32 * 32)


def test_plain_experts_do_not_count() -> None:
    with_plain = Bank("a.experts", {"w1": (64, 64)}, ("e2m1@1", "e2m1@2"), "0-1-")
    without = Bank("a.experts", {"w1": (64, 64)}, ("e2m1@1", "e2m1@2"), "01")
    results = []
    for bank in (with_plain, without):
        config = parse_quantization_config(espalier_draft((), (bank,)).block)
        results.append(average_bits(config.modules, config.expert_banks))
    assert results[0] == results[1]
    assert results[0].bits == 1.5


def test_real_checkpoints(llama_exl3: Path, qmoe_exl3: Path) -> None:
    """The rates that exllamav3 was asked for; the sizes of the heads are padded from 320 to 384."""
    for folder, bits in ((llama_exl3, 3.0), (qmoe_exl3, 2.5)):
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["bits"] == bits
        report = inspect_checkpoint(folder)
        assert (report.bits, report.head_bits) == (bits, 6 * 384 / 320)
