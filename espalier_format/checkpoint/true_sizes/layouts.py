"""Shapes of the linear layers of each architecture family, as data.

A layout maps the part of a module name behind its layer to ``(inputs, outputs)``. An index in a name is
written ``*``. Sizes are sums of products of whole numbers and of the symbols of ``SYMBOLS``, each of which
is one key of the part of ``config.json`` that describes the tower: ``text_config`` (or the top level of
configs without one) for the decoder, MTP and the head, ``vision_config`` for the vision tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Layout = Mapping[str, tuple[str, str]]

SYMBOLS: Final[Mapping[str, str]] = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "vocab": "vocab_size",
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_heads": "linear_num_value_heads",
    "value_dim": "linear_value_head_dim",
    "out_hidden": "out_hidden_size",
    "merge": "spatial_merge_size",
}
"""Symbol to key of config.json. One more symbol, ``gate``, is 2 unless ``attn_output_gate`` is false."""


def _gated(prefix: str, inputs: str, inner: str) -> Layout:
    """A gated MLP below ``prefix``: gate and up, then down."""
    return {
        f"{prefix}gate_proj": (inputs, inner),
        f"{prefix}up_proj": (inputs, inner),
        f"{prefix}down_proj": (inner, inputs),
    }


_ATTENTION: Final[Layout] = {
    "self_attn.q_proj": ("hidden", "heads*head_dim"),
    "self_attn.k_proj": ("hidden", "kv_heads*head_dim"),
    "self_attn.v_proj": ("hidden", "kv_heads*head_dim"),
    "self_attn.o_proj": ("heads*head_dim", "hidden"),
}

_HEAD: Final[Layout] = {"lm_head": ("hidden", "vocab")}

_MLP: Final[Layout] = _gated("mlp.", "hidden", "ffn")

LLAMA: Final[Layout] = {**_HEAD, **_ATTENTION, **_MLP}
"""Llama and everything that has its layer: Mistral, Qwen2, Qwen3, Gemma, SmolLM3, Phi-3 once split, ..."""

# Both spellings of Mixtral's experts: the published checkpoints', and the one of newer exports.
MIXTRAL: Final[Layout] = {
    **_HEAD,
    **_ATTENTION,
    "block_sparse_moe.experts.*.w1": ("hidden", "ffn"),
    "block_sparse_moe.experts.*.w3": ("hidden", "ffn"),
    "block_sparse_moe.experts.*.w2": ("ffn", "hidden"),
    **_gated("mlp.experts.*.", "hidden", "ffn"),
}

OLMOE: Final[Layout] = {**_HEAD, **_ATTENTION, **_gated("mlp.experts.*.", "hidden", "ffn")}

QWEN_MOE: Final[Layout] = {
    **LLAMA,
    **_gated("mlp.experts.*.", "hidden", "expert_ffn"),
    **_gated("mlp.shared_expert.", "hidden", "shared_ffn"),
}
"""Qwen2-MoE and Qwen3-MoE; layers without experts have the dense MLP."""

_GATED_ATTENTION: Final[Layout] = {**_ATTENTION, "self_attn.q_proj": ("hidden", "gate*heads*head_dim")}

_DELTANET: Final[Layout] = {
    "linear_attn.in_proj_qkvz": ("hidden", "2*key_heads*key_dim + 2*value_heads*value_dim"),
    "linear_attn.in_proj_qkv": ("hidden", "2*key_heads*key_dim + value_heads*value_dim"),
    "linear_attn.in_proj_z": ("hidden", "value_heads*value_dim"),
    "linear_attn.out_proj": ("value_heads*value_dim", "hidden"),
}

# MTP layers are the text model's full-attention layers; the resolver looks their names up there too.
_MTP: Final[Layout] = {"mtp.fc": ("2*hidden", "hidden")}

QWEN_NEXT: Final[Layout] = {**_HEAD, **_GATED_ATTENTION, **_DELTANET, **_MLP, **_MTP}
"""Qwen3.5 dense: Gated DeltaNet and gated full attention."""

QWEN_NEXT_MOE: Final[Layout] = {**QWEN_MOE, **_GATED_ATTENTION, **_DELTANET, **_MTP}
"""Qwen3-Next and Qwen3.5-MoE."""

# exllamav3 splits attn.qkv into three modules.
QWEN3_VISION: Final[Layout] = {
    "blocks.*.attn.q_proj": ("hidden", "hidden"),
    "blocks.*.attn.k_proj": ("hidden", "hidden"),
    "blocks.*.attn.v_proj": ("hidden", "hidden"),
    "blocks.*.attn.proj": ("hidden", "hidden"),
    "blocks.*.mlp.linear_fc1": ("hidden", "ffn"),
    "blocks.*.mlp.linear_fc2": ("ffn", "hidden"),
    "merger.linear_fc1": ("merge*merge*hidden", "merge*merge*hidden"),
    "merger.linear_fc2": ("merge*merge*hidden", "out_hidden"),
    "deepstack_merger_list.*.linear_fc1": ("merge*merge*hidden", "merge*merge*hidden"),
    "deepstack_merger_list.*.linear_fc2": ("merge*merge*hidden", "out_hidden"),
}
"""Vision tower of Qwen3-VL and Qwen3.5."""


SIGLIP: Final[Layout] = {
    "self_attn.q_proj": ("hidden", "hidden"),
    "self_attn.k_proj": ("hidden", "hidden"),
    "self_attn.v_proj": ("hidden", "hidden"),
    "self_attn.out_proj": ("hidden", "hidden"),
    "mlp.fc1": ("hidden", "ffn"),
    "mlp.fc2": ("ffn", "hidden"),
}
"""Vision tower of Gemma 3."""
