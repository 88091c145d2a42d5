"""Tiny checkpoints for the tests of the vLLM plugin: sizes and rotation blocks that two ranks can share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_models
from builders import Draft, Tensor, bf16
from hf_models import DELTANET, Family
from runtime_models import DECODER, BankRecipe, espalier_model

SMALL: Mapping[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 250, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA = Family("llama", {**SMALL, "attention_bias": True})
QWEN3_MOE = Family("qwen3_moe", {**SMALL, **EXPERTS})
QWEN35_MOE = Family(
    "qwen3_5_moe_text",
    {
        **SMALL, **EXPERTS, **DELTANET, "shared_expert_intermediate_size": 64, "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "mtp_num_hidden_layers": 1,
    },
)  # fmt: skip
"""vLLM's kernel of gated delta nets on the CPU takes heads of 64 and more."""

MIXED = BankRecipe(("e2m1@1.5", "exl3-mul1@2.5", "int8@5"), "02-1", (32, 32))
"""Three widths, and one plain expert."""

FITTING = ((32, 32), (64, 32), (0, 32), (32, 0))
WHOLE = ((128, 128), (256, 64), (128, 32))


def checkpoint(
    family: Family,
    folder: Path,
    rotations: tuple[tuple[int, int], ...] = FITTING,
    *,
    bank: BankRecipe = MIXED,
    quantized: str = DECODER,
) -> Draft:
    """Make a checkpoint with these rotation blocks in turn; every merged layer gets parts of different codebooks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_models, "ROTATIONS", rotations)
        patch.setattr(runtime_models, "save_model", _save_with_mtp)
        draft = espalier_model(family, folder, quantized=f"{quantized}|mtp\\.fc", bank=bank)
    if family is LLAMA:  # transformers begins with biases of zero
        for number, name in enumerate(sorted(name for name in draft.names() if name.endswith(".bias"))):
            draft[name] = bf16(np.random.default_rng(number).standard_normal(draft[name].shape) / 4)
    return draft


def with_plain_bank(draft: Draft, bank: str) -> Draft:
    """Return a copy in which all experts of a bank are plain, with random weights."""
    changed = copy.deepcopy(draft)
    stated = changed.block["expert_banks"].pop(bank)
    for name in [name for name in changed.names() if name.startswith(f"{bank}.")]:
        del changed[name]
    random = np.random.default_rng(0)
    for expert in range(stated["num_experts"]):
        for projection, each in stated["projections"].items():
            shape = each["out_features"], each["in_features"]
            changed[f"{bank}.{expert}.{projection}.weight"] = bf16(random.standard_normal(shape) * shape[1] ** -0.5)
    used = {module["codebook"] for module in changed.block["modules"].values()}
    for other in changed.block["expert_banks"].values():
        used.update(*(each["codebooks"] for each in other["projections"].values()))
    changed.block["codebooks"] = {name: each for name, each in changed.block["codebooks"].items() if name in used}
    return changed


def without(draft: Draft, *names: str) -> Draft:
    """Return a copy without these tensors, which its index does not name either."""
    spoiled = copy.deepcopy(draft)
    for name in names:
        del spoiled[name]
    return spoiled


def _save_with_mtp(family: Family, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `hf_models.save_model`, but with an MTP layer, which transformers has not: other weights in the last layer."""
    from hf_models import save_model

    config, tensors = save_model(family, folder)
    if config.get("mtp_num_hidden_layers"):
        last = f".layers.{config['num_hidden_layers'] - 1}."
        for name in [name for name in tensors if last in name]:
            old = tensors[name]
            values = old.array().reshape(old.shape)
            part = name.partition(last)[2]
            tensors[f"mtp.layers.0.{part}"] = Tensor.of(np.flip(values, -1) if values.ndim > 1 else values, old.dtype)
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            tensors[f"mtp.{norm}.weight"] = tensors["model.norm.weight"]
        size = config["hidden_size"]
        tensors["mtp.fc.weight"] = bf16(np.random.default_rng(0).standard_normal((size, 2 * size)) * size**-0.5)
    return config, tensors
