"""Planning of Hugging Face tensors from stored names and shapes alone.

Whether transformers accepts the planned names is not checked here but in test_to_hf_families.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from espalier_format.checkpoint.text_sections import TEXT_PARTS
from espalier_format.converters.espalier_block import is_embedding_name
from espalier_format.converters.hf_layout import plan_hf_layout, refuse_inexpressible
from espalier_format.converters.hf_tensors import HfLayout, HfTensor, Stored, StoredModule
from espalier_format.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK = "model.visual.blocks.0.attn"


def plan(
    config: Mapping[str, object],
    modules: dict[str, StoredModule],
    plain: Mapping[str, tuple[int, ...]] | None = None,
) -> HfLayout:
    return plan_hf_layout(config, modules, plain or {})


def by_name(layout: HfLayout) -> dict[str, HfTensor]:
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    assert len(tensors) == len(layout.tensors)
    return tensors


def parts(tensor: HfTensor) -> list[list[list[str]]]:
    return [[[source.name for source in row] for row in page] for page in tensor.pages]


def qkv(bias: str = "qkv") -> dict[str, StoredModule]:
    return {
        f"{BLOCK}.{p}_proj": StoredModule(72, 72, f"{BLOCK}.{p}_proj.bias" if p in bias else None)
        for p in ("k", "q", "v")
    }


def test_vision_qkv_is_joined_in_order_and_replaces_the_plain_copy() -> None:
    plain = {f"{BLOCK}.qkv.weight": (216, 72), f"{BLOCK}.qkv.bias": (216,), "model.visual.pos_embed.weight": (4, 72)}
    tensors = by_name(plan({"model_type": "qwen3_5_moe"}, qkv(), plain))
    assert sorted(tensors) == sorted(plain)
    weight, bias = tensors[f"{BLOCK}.qkv.weight"], tensors[f"{BLOCK}.qkv.bias"]
    assert parts(weight) == [[[f"{BLOCK}.q_proj"], [f"{BLOCK}.k_proj"], [f"{BLOCK}.v_proj"]]]
    assert parts(bias) == [[[f"{BLOCK}.q_proj.bias"], [f"{BLOCK}.k_proj.bias"], [f"{BLOCK}.v_proj.bias"]]]
    assert (weight.shape, bias.shape) == ((216, 72), (216,))
    assert all(source.quantized for source in weight.sources())


def test_modules_without_bias_leave_the_plain_bias_of_the_original() -> None:
    plain = {f"{BLOCK}.qkv.bias": (216,)}
    bias = by_name(plan({"model_type": "qwen3_5"}, qkv(bias=""), plain))[f"{BLOCK}.qkv.bias"]
    assert parts(bias) == [[[f"{BLOCK}.qkv.bias"]]]


def test_unquantized_parts_beside_the_original_give_way_to_it() -> None:
    plain = {f"{BLOCK}.{p}_proj.weight": (72, 72) for p in "qkv"} | {f"{BLOCK}.qkv.weight": (216, 72)}
    tensors = by_name(plan({"model_type": "qwen3_vl"}, {}, plain))
    assert list(tensors) == [f"{BLOCK}.qkv.weight"]
    assert parts(tensors[f"{BLOCK}.qkv.weight"]) == [[[f"{BLOCK}.qkv.weight"]]]


def test_a_part_left_plain_is_joined_with_the_quantized_ones() -> None:
    modules = qkv(bias="")
    del modules[f"{BLOCK}.v_proj"]
    weight = by_name(plan({"model_type": "qwen3_5"}, modules, {f"{BLOCK}.v_proj.weight": (72, 72)}))
    assert parts(weight[f"{BLOCK}.qkv.weight"])[0][2] == [f"{BLOCK}.v_proj.weight"]


@pytest.mark.parametrize("drop", ["weight", "bias"])
def test_an_incomplete_group_is_refused(drop: str) -> None:
    modules = qkv(bias="qk" if drop == "bias" else "")
    if drop == "weight":
        del modules[f"{BLOCK}.v_proj"]
    with pytest.raises(SourceError, match=rf"v_proj\.{drop} is missing"):
        plan({"model_type": "qwen3_5"}, modules)


def test_text_projections_of_other_models_stay_apart() -> None:
    modules = {f"model.layers.0.self_attn.{p}_proj": StoredModule(64, 64) for p in "qkv"}
    assert sorted(by_name(plan({"model_type": "qwen3_5"}, modules))) == sorted(f"{name}.weight" for name in modules)


def test_phi3_projections_are_joined() -> None:
    layer = "model.layers.1"
    modules = {
        f"{layer}.self_attn.q_proj": StoredModule(160, 160),
        f"{layer}.self_attn.k_proj": StoredModule(160, 80),
        f"{layer}.self_attn.v_proj": StoredModule(160, 80),
        f"{layer}.mlp.up_proj": StoredModule(160, 200),
        f"{layer}.mlp.gate_proj": StoredModule(160, 200),
    }
    tensors = by_name(plan({"model_type": "phi3"}, modules))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        f"{layer}.self_attn.qkv_proj.weight": (320, 160),
        f"{layer}.mlp.gate_up_proj.weight": (400, 160),
    }
    gate_up = tensors[f"{layer}.mlp.gate_up_proj.weight"]
    assert parts(gate_up) == [[[f"{layer}.mlp.gate_proj"], [f"{layer}.mlp.up_proj"]]]


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_text_part_of_a_multimodal_model_has_its_own_layout(part: str) -> None:
    parts = [f"self_attn.{part}_proj" for part in "qkv"]
    modules = {f"language_model.model.layers.0.{part}": StoredModule(64, 64) for part in parts}
    vision = {f"vision_tower.vision_model.encoder.layers.0.{part}": StoredModule(64, 64) for part in parts}
    layout = plan({"model_type": "llava", part: {"model_type": "phi3"}}, modules | vision)
    joined = "language_model.model.layers.0.self_attn.qkv_proj.weight"
    assert by_name(layout).keys() == {joined, *(f"{name}.weight" for name in vision)}
    assert layout.warnings == ()


def test_slices_are_joined_along_the_side_they_were_cut() -> None:
    mlp = "model.layers.0.mlp"
    modules: dict[str, StoredModule] = {}
    for n, size in enumerate((128, 100)):
        modules[f"{mlp}.gate_proj.slice.{n}"] = StoredModule(64, size, f"{mlp}.gate_proj.slice.{n}.bias")
        modules[f"{mlp}.down_proj.slice.{n}"] = StoredModule(size, 64)
    tensors = by_name(plan({"model_type": "llama"}, modules, {f"{mlp}.gate_proj.weight": (228, 64)}))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        f"{mlp}.gate_proj.weight": (228, 64),
        f"{mlp}.gate_proj.bias": (228,),
        f"{mlp}.down_proj.weight": (64, 228),
    }
    assert parts(tensors[f"{mlp}.gate_proj.weight"]) == [[[f"{mlp}.gate_proj.slice.{n}"] for n in (0, 1)]]
    assert parts(tensors[f"{mlp}.down_proj.weight"]) == [[[f"{mlp}.down_proj.slice.{n}" for n in (0, 1)]]]


def test_unquantized_slices_beside_the_original_give_way_to_it() -> None:
    base = "model.layers.0.mlp.down_proj"
    plain = {f"{base}.weight": (64, 256), f"{base}.slice.0.weight": (64, 128), f"{base}.slice.1.weight": (64, 128)}
    tensors = by_name(plan({"model_type": "llama"}, {}, plain))
    assert parts(tensors[f"{base}.weight"]) == [[[f"{base}.weight"]]]
    assert list(tensors) == [f"{base}.weight"]


def test_more_than_ten_slices_keep_their_order() -> None:
    base = "model.layers.0.mlp.up_proj"
    modules = {f"{base}.slice.{n}": StoredModule(64, 128) for n in reversed(range(12))}
    tensor = by_name(plan({"model_type": "llama"}, modules))[f"{base}.weight"]
    assert [row[0] for row in parts(tensor)[0]] == [f"{base}.slice.{n}" for n in range(12)]


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ({"a.mlp.up_proj.slice.0": StoredModule(64, 128), "a.mlp.up_proj.slice.2": StoredModule(64, 128)}, "gap"),
        ({"a.mlp.fc9.slice.0": StoredModule(64, 128)}, "which side"),
        ({"a.up_proj.slice.0": StoredModule(64, 128), "a.up_proj.slice.1": StoredModule(32, 128)}, "in_features"),
        ({"a.down_proj.slice.0": StoredModule(64, 128), "a.down_proj.slice.1": StoredModule(64, 32)}, "out_features"),
        (
            {f"a.down_proj.slice.{n}": StoredModule(64, 128, f"a.down_proj.slice.{n}.bias") for n in (0, 1)},
            "more than one of its slices has a bias",
        ),
    ],
)
def test_slices_that_do_not_fit_together_are_refused(modules: dict[str, StoredModule], complaint: str) -> None:
    with pytest.raises(SourceError, match=complaint):
        plan({"model_type": "llama"}, modules)


def test_the_one_bias_of_down_slices_is_the_layers_bias() -> None:
    modules = {"a.down_proj.slice.0": StoredModule(128, 64, "a.down_proj.slice.0.bias")}
    modules["a.down_proj.slice.1"] = StoredModule(32, 64)
    bias = by_name(plan({"model_type": "llama"}, modules))["a.down_proj.bias"]
    assert (bias.shape, parts(bias)) == ((64,), [[["a.down_proj.slice.0.bias"]]])


def test_experts_are_fused_and_transposed_where_the_loader_wants_that() -> None:
    bank = "model.language_model.layers.0.mlp.experts"
    modules: dict[str, StoredModule] = {}
    for expert in range(11):
        modules[f"{bank}.{expert}.down_proj"] = StoredModule(72, 160)
        modules[f"{bank}.{expert}.gate_proj"] = StoredModule(160, 72)
        modules[f"{bank}.{expert}.up_proj"] = StoredModule(160, 72)
    tensors = by_name(plan({"model_type": "qwen3_vl_moe"}, modules))
    gate_up, down = tensors[f"{bank}.gate_up_proj"], tensors[f"{bank}.down_proj"]
    assert (gate_up.shape, gate_up.transposed) == ((11, 160, 144), True)
    assert (down.shape, down.transposed) == ((11, 72, 160), True)
    assert parts(gate_up)[10] == [[f"{bank}.10.gate_proj"], [f"{bank}.10.up_proj"]]
    del modules[f"{bank}.3.up_proj"]
    with pytest.raises(SourceError, match=r"experts\.3\.up_proj\.weight is missing"):
        plan({"model_type": "qwen3_vl_moe"}, modules)


@pytest.mark.parametrize(
    ("model_type", "names", "shapes"),
    [
        ("llama", ["down_proj.slice.0", "down_proj.slice.1"], [(3, 4, 5), (3, 4, 5)]),
        ("llama", ["up_proj.slice.0", "up_proj.slice.1"], [(3, 4, 5), (3, 4, 5)]),
        ("llama", ["up_proj.slice.0", "up_proj.slice.1"], [(), ()]),
        ("llama", ["down_proj.slice.0", "down_proj.slice.1"], [(4,), (4,)]),
        ("llama", ["down_proj.slice.0", "down_proj.slice.1"], [(4, 0), (4, 5)]),
        ("qwen3_vl_moe", [f"experts.0.{part}_proj" for part in ("gate", "up", "down")], [(8, 4, 2)] * 3),
        ("qwen3_vl_moe", [f"experts.0.{part}_proj" for part in ("gate", "up", "down")], [(8,), (8,), (8,)]),
        ("qwen3_vl_moe", [f"experts.0.{part}_proj" for part in ("gate", "up", "down")], [(8, 6), (8, 7), (6, 8)]),
    ],
)
def test_parts_that_are_no_matrices_or_differ_are_refused(
    model_type: str, names: list[str], shapes: list[tuple[int, ...]]
) -> None:
    plain = {f"model.layers.0.mlp.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}
    with pytest.raises(SourceError):
        plan({"model_type": model_type}, {}, plain)


@pytest.mark.parametrize("shape", [(), (4, 1), (0,)])
def test_biases_to_join_are_vectors(shape: tuple[int, ...]) -> None:
    plain = {f"a.up_proj.slice.{n}.{kind}": s for n in (0, 1) for kind, s in (("weight", (4, 6)), ("bias", shape))}
    with pytest.raises(SourceError, match="no vector"):
        plan({"model_type": "llama"}, {}, plain)


@pytest.mark.parametrize(
    ("model_type", "whole", "parts"),
    [
        ("llama", "a.up_proj", ["a.up_proj.slice.0", "a.up_proj.slice.1"]),
        ("llama", "a.down_proj", ["a.down_proj.slice.0"]),
        (
            "phi3",
            "model.layers.0.self_attn.qkv_proj",
            [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
        ),
    ],
)
def test_what_is_quantized_as_a_whole_and_in_parts_is_refused(model_type: str, whole: str, parts: list[str]) -> None:
    modules = {name: StoredModule(128, 64) for name in (whole, *parts)}
    with pytest.raises(SourceError, match="in parts as well"):
        plan({"model_type": model_type}, modules)


def test_square_fused_experts_are_refused() -> None:
    modules = {f"a.mlp.experts.0.{name}_proj": StoredModule(144, 72) for name in ("gate", "up", "down")}
    with pytest.raises(SourceError, match="orientation"):
        plan({"model_type": "qwen3_vl_moe"}, modules)


def test_experts_stay_apart_where_the_loader_fuses_them_itself() -> None:
    modules = {f"model.layers.0.mlp.experts.{e}.up_proj": StoredModule(160, 72) for e in range(2)}
    assert sorted(by_name(plan({"model_type": "qwen3_moe"}, modules))) == [f"{name}.weight" for name in modules]


GEMMA3: Mapping[str, object] = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 1152},
    "text_config": {"hidden_size": 2560},
}
PROJECTION = "multi_modal_projector.mm_input_projection"


def test_gemma3_projection_gets_its_own_name_and_orientation() -> None:
    quantized = by_name(plan(GEMMA3, {PROJECTION: StoredModule(1152, 2560)}))[f"{PROJECTION}_weight"]
    as_linear = by_name(plan(GEMMA3, {}, {f"{PROJECTION}.weight": (2560, 1152)}))[f"{PROJECTION}_weight"]
    as_in_model = by_name(plan(GEMMA3, {}, {f"{PROJECTION}.weight": (1152, 2560)}))[f"{PROJECTION}_weight"]
    assert [t.shape for t in (quantized, as_linear, as_in_model)] == [(1152, 2560)] * 3
    assert [t.transposed for t in (quantized, as_linear, as_in_model)] == [True, True, False]
    assert parts(as_linear) == [[[f"{PROJECTION}.weight"]]]


def test_gemma3_projection_of_unknown_orientation_is_refused() -> None:
    square = dict(GEMMA3) | {"text_config": {"hidden_size": 1152}}
    for config, shape in ((square, (1152, 1152)), (GEMMA3, (1152, 2561)), ({"model_type": "gemma3"}, (1152, 2560))):
        with pytest.raises(SourceError, match="orientation"):
            plan(config, {}, {f"{PROJECTION}.weight": shape})


def test_a_plain_copy_under_a_modules_name_is_replaced_by_the_decoded_weight() -> None:
    tensors = by_name(plan({"model_type": "llama"}, {"lm_head": StoredModule(64, 320)}, {"lm_head.weight": (320, 64)}))
    assert list(tensors["lm_head.weight"].sources()) == [Stored("lm_head", (320, 64), quantized=True)]


def test_unknown_architecture_keeps_names_and_says_so() -> None:
    layout = plan({"model_type": "new"}, qkv(), {f"{BLOCK}.qkv.weight": (216, 72)})
    assert f"{BLOCK}.q_proj.weight" in by_name(layout)
    assert f"{BLOCK}.qkv.weight" in by_name(layout)
    assert len(layout.warnings) == 1
    assert "model type new is unknown" in layout.warnings[0]
    assert plan({"model_type": "llama"}, {}).warnings == ()
    nested = plan({"model_type": "llava", "text_config": {"model_type": "newer"}}, {}).warnings
    assert ["newer" in warning for warning in nested] == [True]
    assert "no model type" in plan({}, {}).warnings[0]


BAKED: list[tuple[dict[str, object], str, str]] = [
    ({"model_type": "laguna"}, "model.layers.1.mlp.experts.0.up_proj", "laguna.*1/128"),
    (
        {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
        "m.layers.1.mlp.experts.0.up_proj",
        "1/128",
    ),
    ({"architectures": ["MiMoV2ForCausalLM"]}, "model.layers.47.mlp.experts.9.up_proj", "layer 47"),
    ({"model_type": "mimo_v2_flash", "attention_value_scale": 0.6}, "model.layers.1.self_attn.o_proj", "value_scale"),
    (
        {"model_type": "x", "text_config": {"model_type": "mimo_v2", "attention_value_scale": 0.6}},
        "model.layers.1.self_attn.o_proj",
        "value_scale",
    ),
    (
        {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "attention_value_scale": 0.5},
        "layers.0.self_attn.o_proj",
        "attention_value_scale",
    ),
]


BAKED += [
    ({"model_type": "x", part: nested}, module, complaint)
    for nested, module, complaint in BAKED
    for part in TEXT_PARTS
    if "text_config" not in nested
]
"""The language model of a model of several modalities is described under any of these keys."""


@pytest.mark.parametrize(("config", "module", "complaint"), BAKED)
def test_baked_in_scale_is_refused_by_name(config: dict[str, object], module: str, complaint: str) -> None:
    with pytest.raises(SourceError, match=complaint) as refusal:
        refuse_inexpressible(config, [module], [], from_exl3=True)
    assert refusal.value.tensor == module
    with pytest.raises(SourceError, match=complaint):
        refuse_inexpressible(config, [], [f"{module}.weight"], from_exl3=True)
    # Weights that never went through exllamav3 have nothing baked in.
    refuse_inexpressible(config, [module], [], from_exl3=False)


@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"architectures": ["MiMoV2ForCausalLM"]}, "model.layers.46.mlp.experts.9.up_proj"),
        ({"architectures": ["MiMoV2ForCausalLM"]}, "model.layers.1.self_attn.o_proj"),
        ({"model_type": "mimo_v2_flash", "attention_value_scale": 1.0}, "model.layers.1.self_attn.o_proj"),
        ({"model_type": "laguna"}, "model.layers.1.mlp.shared_expert.up_proj"),
        ({"model_type": "qwen3", "attention_value_scale": 0.5}, "model.layers.0.self_attn.o_proj"),
    ],
)
def test_modules_without_a_baked_in_scale_pass(config: dict[str, object], module: str) -> None:
    refuse_inexpressible(config, [module], [f"{module}.weight"], from_exl3=True)


def test_hostile_names_take_time_in_proportion_to_their_length() -> None:
    """Expressions that look for a part anywhere, up to the end of the line, took the square of it."""
    config = {"model_type": "dflash" * 30_000 + "\n", "attention_value_scale": 2.0}
    modules = ["layers.47." * 30_000 + "\n", "a.experts." * 30_000 + "\n", "a" * 300_000 + "\n.o_proj"]
    start = time.process_time()
    with pytest.raises(SourceError, match="attention_value_scale"):
        refuse_inexpressible(config, modules, (), from_exl3=True)
    refuse_inexpressible({"model_type": "mimo_v2"}, modules[:2], (), from_exl3=True)
    assert [is_embedding_name(name) for name in ("a." * 300_000 + "x\n", "a_" * 300_000, "m.embed_tokens")] == [
        False,
        False,
        True,
    ]
    assert time.process_time() - start < 2


def test_row_table_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match="row table") as refusal:
        refuse_inexpressible({"model_type": "llama"}, [], ["model.embed_tokens.trellis"], from_exl3=False)
    assert refusal.value.tensor == "model.embed_tokens.trellis"
