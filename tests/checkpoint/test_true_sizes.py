"""True sizes of EXL3 modules.

The table of architectures is compared with the models that transformers builds from the same config, on the
meta device, with sizes that are no multiples of 128. Not checked against a running model: MTP layers, which
transformers drops, and the slices of MLPs wider than 55,296, which only exllamav3 makes; their shapes are
stated in the tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from espalier_format.checkpoint.text_sections import TEXT_PARTS
from espalier_format.checkpoint.true_sizes import TrueSize, resolve_true_sizes, size_warnings
from espalier_format.checkpoint.true_sizes.layouts import SYMBOLS
from espalier_format.checkpoint.true_sizes.model_types import TEXT_MODELS, VISION_MODELS, WRAPPED_TEXT

Shape = tuple[int, int]

# Sizes that are different from each other, not multiples of 128, and even where rotary embeddings want it.
TEXT = {
    "hidden_size": 204,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 52,
    "intermediate_size": 360,
    "vocab_size": 1001,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_HEAD_DIM = {key: value for key, value in TEXT.items() if key != "head_dim"}
EXPERTS = {"moe_intermediate_size": 72, "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 88}
DELTANET = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 24,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 40,
    "layer_types": ["linear_attention", "full_attention"],
}
VISION = {"hidden_size": 60, "intermediate_size": 130, "num_heads": 2, "depth": 1, "out_hidden_size": 204}
PLAIN_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


def ceil128(size: int) -> int:
    return -(-size // 128) * 128


def stored(shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {name: (ceil128(inputs), ceil128(outputs)) for name, (inputs, outputs) in shapes.items()}


def linear_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """(in, out) of each linear of the model that transformers builds, under the names EXL3 gives them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    cls = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = cls.from_config(AutoConfig.for_model(**config))
    text = config.get("text_config", config)
    heads, kv_heads, head_dim = (text.get(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    head_dim = head_dim or text["hidden_size"] // heads
    shapes: dict[str, Shape] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(PLAIN_ROUTERS):
            inputs, outputs = module.in_features, module.out_features
            parent, _, leaf = name.rpartition(".")
            if leaf == "qkv_proj":
                sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
            elif leaf == "qkv":
                sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), outputs // 3)
            elif leaf == "gate_up_proj":
                sizes = dict.fromkeys(("gate_proj", "up_proj"), outputs // 2)
            else:
                sizes = {leaf: outputs}
            assert sum(sizes.values()) == outputs
            shapes.update({f"{parent}.{leaf}".lstrip("."): (inputs, size) for leaf, size in sizes.items()})
        elif isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):  # fused experts: (expert, out, in)
            experts, double, inputs = module.gate_up_proj.shape
            for expert in range(experts):
                shapes[f"{name}.{expert}.gate_proj"] = shapes[f"{name}.{expert}.up_proj"] = (inputs, double // 2)
                shapes[f"{name}.{expert}.down_proj"] = (double // 2, inputs)
    return shapes


DENSE = [
    "arcee",
    "cwm",
    "ernie4_5",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "qwen3",
    "seed_oss",
    "smollm3",
    "vaultgemma",
]
DENSE_WITHOUT_HEAD_DIM = [
    "cohere",
    "cohere2",
    "exaone4",
    "granite",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
]
TEXT_CASES: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **TEXT} for name in DENSE},
    **{f"{name}-hidden/heads": {"model_type": name, **NO_HEAD_DIM} for name in DENSE_WITHOUT_HEAD_DIM},
    "llama-head_dim null": {"model_type": "llama", **NO_HEAD_DIM, "head_dim": None},
    "mixtral": {"model_type": "mixtral", **TEXT, **EXPERTS},
    "olmoe": {"model_type": "olmoe", **NO_HEAD_DIM, **EXPERTS},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **NO_HEAD_DIM,
        **EXPERTS,
        **SHARED,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **TEXT, **EXPERTS, "mlp_only_layers": [0]},
    "qwen3_next": {"model_type": "qwen3_next", **TEXT, **EXPERTS, **SHARED, **DELTANET, "mlp_only_layers": [0]},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **TEXT, **DELTANET},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **TEXT, **EXPERTS, **SHARED, **DELTANET},
}
NESTED_CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**TEXT, **DELTANET}, "vision_config": VISION},
    "qwen3_5_moe": {"text_config": {**TEXT, **EXPERTS, **SHARED, **DELTANET}, "vision_config": VISION},
    "qwen3_vl": {"text_config": TEXT, "vision_config": {**VISION, "deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {"text_config": {**TEXT, **EXPERTS}, "vision_config": {**VISION, "deepstack_visual_indexes": [0]}},
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **TEXT},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 60,
            "intermediate_size": 130,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "vision_use_head": False,
        },
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 130,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
    },
}
CASES = {**TEXT_CASES, **{name: {"model_type": name, **config} for name, config in NESTED_CASES.items()}}


@pytest.mark.parametrize("case", CASES)
def test_table_equals_the_models_of_transformers(case: str) -> None:
    config = CASES[case]
    shapes = linear_shapes(config)
    if case == "mistral3":  # its vision tower is not in the table
        shapes = {name: shape for name, shape in shapes.items() if "language_model" in name or name == "lm_head"}
    sizes = resolve_true_sizes(config, stored(shapes), {})
    got = {name: (size.in_features, size.out_features) for name, size in sizes.items()}
    assert got == shapes
    assert {size.source for size in sizes.values()} == {"exact"}
    assert len(shapes) >= 13  # head, and two layers of attention and MLP


def test_every_model_type_of_the_table_is_compared() -> None:
    compared = {case.split("-")[0] for case in CASES}
    covered_by_a_wrapper = {WRAPPED_TEXT[name] for name in NESTED_CASES}
    flat_layout_only = {"qwen2_vl_text", "qwen2_5_vl_text"}  # the text of these is Qwen2's, tested below
    assert compared | covered_by_a_wrapper | flat_layout_only >= set(TEXT_MODELS)
    assert set(VISION_MODELS) <= compared


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_defaults_equal_the_config_classes(model_type: str) -> None:
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    nested = {"qwen2_vl_text": Qwen2VLTextConfig, "qwen2_5_vl_text": Qwen2_5_VLTextConfig}
    default = nested[model_type]() if model_type in nested else CONFIG_MAPPING[model_type]()
    for symbol, value in TEXT_MODELS[model_type].defaults.items():
        assert getattr(default, SYMBOLS[symbol]) == value, symbol
    # What the table leaves out must follow from the two common rules.
    for symbol, derived in (
        ("kv_heads", default.num_attention_heads),
        ("head_dim", default.hidden_size // default.num_attention_heads),
    ):
        if symbol not in TEXT_MODELS[model_type].defaults:
            assert getattr(default, SYMBOLS[symbol], None) in {None, derived}, symbol


@pytest.mark.parametrize(("model_type", "text_type"), WRAPPED_TEXT.items())
def test_wrappers_name_the_text_type_that_transformers_defaults_to(model_type: str, text_type: str) -> None:
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    assert CONFIG_MAPPING[model_type]().text_config.model_type == text_type


@pytest.mark.parametrize("model_type", VISION_MODELS)
def test_vision_defaults_equal_the_config_classes(model_type: str) -> None:
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]().vision_config
    for symbol, value in VISION_MODELS[model_type].defaults.items():
        assert getattr(default, SYMBOLS[symbol]) == value, symbol


LLAMA = {"model_type": "llama", **TEXT}
MODULE = "layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    "prefix",
    [
        "model.",
        "model.language_model.",
        "language_model.model.",
        "model.language_model.model.",
        "language_model.",
        "model.text_model.",
        "",
    ],
)
def test_prefix_spellings(prefix: str) -> None:
    sizes = resolve_true_sizes(LLAMA, {prefix + MODULE: (256, 384)}, {})
    assert sizes[prefix + MODULE] == TrueSize(204, 360, "exact", "config.json of model_type llama: hidden -> ffn")


@pytest.mark.parametrize("part", TEXT_PARTS)
@pytest.mark.parametrize("head", ["lm_head", "language_model.lm_head", "model.language_model.lm_head"])
def test_head_spellings_and_vocabulary_of_the_text_config(head: str, part: str) -> None:
    config = {"model_type": "gemma3", "vocab_size": 77, part: {"hidden_size": 204, "vocab_size": 1001}}
    size = resolve_true_sizes(config, {head: (256, 1024)}, {})[head]
    assert (size.in_features, size.out_features, size.source) == (204, 1001, "exact")


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_mtp_has_the_shapes_of_full_attention_layers(prefix: str) -> None:
    config = {"model_type": "qwen3_5_moe", "text_config": {**TEXT, **EXPERTS, **SHARED, **DELTANET}}
    shapes = {
        f"{prefix}fc": (408, 204),
        f"{prefix}layers.0.self_attn.q_proj": (204, 2 * 6 * 52),
        f"{prefix}layers.0.self_attn.o_proj": (6 * 52, 204),
        f"{prefix}layers.0.mlp.experts.2.down_proj": (72, 204),
        f"{prefix}layers.0.mlp.shared_expert.up_proj": (204, 88),
    }
    sizes = resolve_true_sizes(config, stored(shapes), {})
    assert {name: (size.in_features, size.out_features) for name, size in sizes.items()} == shapes


def test_published_names_of_mixtral_experts() -> None:
    config = {"model_type": "mixtral", **TEXT}
    shapes = {f"model.layers.0.block_sparse_moe.experts.7.{leaf}": (204, 360) for leaf in ("w1", "w3")}
    shapes["model.layers.0.block_sparse_moe.experts.7.w2"] = (360, 204)
    sizes = resolve_true_sizes(config, stored(shapes), {})
    assert {name: (size.in_features, size.out_features) for name, size in sizes.items()} == shapes


def test_attention_without_output_gate() -> None:
    name = "model.layers.0.self_attn.q_proj"
    config = {"model_type": "qwen3_5_text", **TEXT, "attn_output_gate": False}
    assert resolve_true_sizes(config, {name: (256, 384)}, {})[name].out_features == 6 * 52


@pytest.mark.parametrize(("module", "side"), [("gate_proj", 1), ("up_proj", 1), ("down_proj", 0)])
def test_slices_of_a_wide_mlp_share_its_width(module: str, side: int) -> None:
    width = 2 * 28160 + 8100  # not a multiple of 128
    config = {**LLAMA, "intermediate_size": width}
    base = f"model.layers.0.mlp.{module}.slice"
    parts = [28160, 28160, 8100]
    shapes = {f"{base}.{n}": (204, part) if side == 1 else (part, 204) for n, part in enumerate(parts)}
    sizes = resolve_true_sizes(config, stored(shapes), {})
    assert {name: (size.in_features, size.out_features) for name, size in sizes.items()} == shapes


def test_slices_with_a_gap_keep_their_padded_size() -> None:
    base = "model.layers.0.mlp.up_proj.slice"
    sizes = resolve_true_sizes(
        {**LLAMA, "intermediate_size": 300}, {f"{base}.0": (256, 128), f"{base}.2": (256, 128)}, {}
    )
    assert sizes[f"{base}.2"].source == "padded"


def test_plain_weight_wins_over_config() -> None:
    name = "model.layers.1.mlp.gate_proj"
    sizes = resolve_true_sizes(LLAMA, {name: (256, 384)}, {f"{name}.weight": (300, 190)})
    assert sizes[name] == TrueSize(190, 300, "exact", "the plain weight of the same name")


@pytest.mark.parametrize(
    ("config", "plain", "reason"),
    [
        ({}, {}, "without config.json the true sizes are unknown"),
        ({"hidden_size": 200}, {}, "model_type None is not in the table of architectures"),
        ({"model_type": "never-heard-of"}, {}, "model_type never-heard-of is not in the table of architectures"),
        ({**LLAMA, "intermediate_size": None}, {}, "config.json does not give intermediate_size"),
        ({**LLAMA, "intermediate_size": [360, 360]}, {}, "intermediate_size in config.json is not one positive number"),
        ({**LLAMA, "intermediate_size": True}, {}, "intermediate_size in config.json is not one positive number"),
        ({**LLAMA, "intermediate_size": 10**400}, {}, "intermediate_size in config.json is not one positive number"),
        ({**LLAMA, "intermediate_size": 385}, {}, "does not round up to 256 x 384"),
        (LLAMA, {f"model.{MODULE}.weight": (385, 204)}, "does not round up to 256 x 384"),
    ],
)
def test_what_is_not_known_keeps_the_padded_size(config: Any, plain: Any, reason: str) -> None:
    size = resolve_true_sizes(config, {f"model.{MODULE}": (256, 384)}, plain)[f"model.{MODULE}"]
    assert (size.in_features, size.out_features, size.source) == (256, 384, "padded")
    assert reason in size.how


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
@pytest.mark.parametrize(
    ("tensor", "shape", "module", "reason"),
    [
        ("norm", (206,), MODULE, "hidden_size is 204, but {tensor} has 206"),
        ("layers.3.input_layernorm", (205,), MODULE, "hidden_size is 204, but {tensor} has 205"),
        ("embed_tokens", (1001, 200), MODULE, "hidden_size is 204, but {tensor} has 200"),
        ("embed_tokens", (1002, 204), "lm_head", "vocab_size is 1001, but {tensor} has 1002"),
        ("embed_tokens", (1002, 204), MODULE, ""),
        ("embed_tokens", (1001, 204), "lm_head", ""),
        ("layers.1.self_attn.q_norm", (52,), MODULE, ""),
        ("norm", (204, 1), MODULE, ""),
    ],
)
def test_plain_tensors_contradict_a_wrong_config(
    prefix: str, tensor: str, shape: tuple[int, ...], module: str, reason: str
) -> None:
    """Both 204 and 206 round up to the stored 256: nothing else shows that config.json is wrong."""
    name = prefix + module
    plain = {f"{prefix}{tensor}.weight": shape}
    size = resolve_true_sizes(LLAMA, {name: (256, 1024 if module == "lm_head" else 384)}, plain)[name]
    assert size.source == ("padded" if reason else "exact")
    assert reason.format(tensor=f"{prefix}{tensor}.weight") in size.how


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "model.layers.1.mlp.gate_proj.slice.x",
        "model..layers.1.mlp.gate_proj",
        "x.slice." + "9" * 5000,
        "layers.1.",
    ],
)
def test_strange_names_keep_the_padded_size(name: str) -> None:
    assert resolve_true_sizes(LLAMA, {name: (256, 384)}, {})[name].source == "padded"


def test_strange_nesting_of_config() -> None:
    config = {"model_type": ["x"], "text_config": [1], "vision_config": 3}
    names = ("model.layers.0.mlp.up_proj", "model.visual.blocks.0.attn.proj")
    sizes = resolve_true_sizes(config, dict.fromkeys(names, (128, 128)), {})
    assert {size.source for size in sizes.values()} == {"padded"}


def test_warnings_are_one_line_per_reason() -> None:
    modules = {f"model.layers.{n}.mlp.up_proj": (256, 384) for n in range(3)} | {"a.b": (128, 128)}
    lines = size_warnings(resolve_true_sizes({"model_type": "x"}, modules, {}))
    kept = "true size unknown, padded size kept"
    assert lines == (
        f"{kept}: model.layers.0.mlp.up_proj and 2 more: model_type x is not in the table of architectures",
        f"{kept}: a.b: no rule for modules of this name",
    )
    assert size_warnings(resolve_true_sizes(LLAMA, {f"model.{MODULE}": (256, 384)}, {})) == ()
