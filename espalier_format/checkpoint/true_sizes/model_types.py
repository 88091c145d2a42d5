"""Which layout each ``model_type`` has, and what its keys mean where ``config.json`` leaves them out.

Configs are often written without the values that equal the defaults of their class (Gemma 3 omits its
head counts, for one). The defaults here are those of transformers 5.24; a test compares them. A key without
a default that is missing makes the size unknown, with two exceptions that all these classes share: without
``head_dim`` it is ``hidden_size // num_attention_heads``, and without ``num_key_value_heads`` every
attention head has its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from espalier_format.checkpoint.true_sizes.layouts import (
    LLAMA,
    MIXTRAL,
    OLMOE,
    QWEN3_VISION,
    QWEN_MOE,
    QWEN_NEXT,
    QWEN_NEXT_MOE,
    SIGLIP,
    Layout,
)


@dataclass(frozen=True, slots=True)
class ModelType:
    """The layout of one ``model_type``; ``defaults`` maps symbols of the layouts to values."""

    layout: Layout
    defaults: Mapping[str, int] = field(default_factory=dict)


_DELTANET: Final = {"key_heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}
_GEMMA: Final = {"heads": 8, "kv_heads": 4, "head_dim": 256}
_QWEN3_VISION: Final = ModelType(QWEN3_VISION, {"hidden": 1152, "ffn": 4304, "out_hidden": 3584, "merge": 2})

TEXT_MODELS: Final[Mapping[str, ModelType]] = {
    "arcee": ModelType(LLAMA),
    "cohere": ModelType(LLAMA),
    "cohere2": ModelType(LLAMA),
    "cwm": ModelType(LLAMA, {"kv_heads": 8, "head_dim": 128}),
    "ernie4_5": ModelType(LLAMA, {"kv_heads": 2, "head_dim": 128}),
    "exaone4": ModelType(LLAMA, {"kv_heads": 32}),
    "gemma": ModelType(LLAMA, {"kv_heads": 16, "head_dim": 256}),
    "gemma2": ModelType(LLAMA, _GEMMA),
    "gemma3_text": ModelType(LLAMA, {**_GEMMA, "hidden": 2304, "ffn": 9216, "vocab": 262208}),
    "glm": ModelType(LLAMA, {"kv_heads": 2, "head_dim": 128}),
    "glm4": ModelType(LLAMA, {"kv_heads": 2, "head_dim": 128}),
    "granite": ModelType(LLAMA),
    "hunyuan_v1_dense": ModelType(LLAMA),
    "llama": ModelType(LLAMA),
    "ministral": ModelType(LLAMA, {"kv_heads": 8}),
    "ministral3": ModelType(LLAMA, {"kv_heads": 8, "head_dim": 128}),
    "mistral": ModelType(LLAMA, {"kv_heads": 8}),
    "mixtral": ModelType(MIXTRAL, {"kv_heads": 8}),
    "olmo": ModelType(LLAMA),
    "olmo2": ModelType(LLAMA),
    "olmo3": ModelType(LLAMA),
    "olmoe": ModelType(OLMOE),
    "phi3": ModelType(LLAMA),
    "qwen2": ModelType(LLAMA, {"kv_heads": 32}),
    "qwen2_5_vl_text": ModelType(LLAMA, {"kv_heads": 8}),
    "qwen2_moe": ModelType(QWEN_MOE, {"kv_heads": 16, "expert_ffn": 1408, "shared_ffn": 5632}),
    "qwen2_vl_text": ModelType(LLAMA, {"kv_heads": 8}),
    "qwen3": ModelType(LLAMA, {"kv_heads": 32, "head_dim": 128}),
    "qwen3_5_moe_text": ModelType(
        QWEN_NEXT_MOE, {**_DELTANET, "kv_heads": 2, "head_dim": 256, "expert_ffn": 512, "shared_ffn": 512}
    ),
    "qwen3_5_text": ModelType(QWEN_NEXT, {**_DELTANET, "kv_heads": 4, "head_dim": 256}),
    "qwen3_moe": ModelType(QWEN_MOE, {"kv_heads": 4, "expert_ffn": 768}),
    "qwen3_next": ModelType(
        QWEN_NEXT_MOE, {**_DELTANET, "kv_heads": 2, "head_dim": 256, "expert_ffn": 512, "shared_ffn": 512}
    ),
    "qwen3_vl_moe_text": ModelType(QWEN_MOE, {"kv_heads": 16, "expert_ffn": 1408}),
    "qwen3_vl_text": ModelType(LLAMA, {"kv_heads": 32, "head_dim": 128}),
    "seed_oss": ModelType(LLAMA, {"kv_heads": 8, "head_dim": 128}),
    "smollm3": ModelType(LLAMA, {"kv_heads": 4}),
    "vaultgemma": ModelType(LLAMA, _GEMMA),
}
"""``model_type`` of the text config to its layout."""

WRAPPED_TEXT: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""``model_type`` of a multimodal config to the one of its text part, where that part does not say it."""

VISION_MODELS: Final[Mapping[str, ModelType]] = {
    "gemma3": ModelType(SIGLIP, {"hidden": 768, "ffn": 3072}),
    "qwen3_5": _QWEN3_VISION,
    "qwen3_5_moe": _QWEN3_VISION,
    "qwen3_vl": _QWEN3_VISION,
    "qwen3_vl_moe": _QWEN3_VISION,
}
"""``model_type`` of the whole config to the layout of its vision tower."""
