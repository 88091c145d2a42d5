"""Tiny models as Espalier checkpoints, for the tests of runtimes: random codes, scaled so that the model computes.

The model comes from transformers with its own random weights; chosen linear layers and experts are replaced by random
codes of many codebooks and rotation blocks (`builders`), so that no encoder is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from builders import Bank, Draft, Module, Tensor, bf16, espalier_draft
from hf_models import DELTANET, MOE, SHARED, VISION, VISION_AUTO, Family, save_model

from espalier_format.codec.codebook import get_codebook

if TYPE_CHECKING:
    import torch

SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 70, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {**MOE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LLAMA = Family("llama", SMALL)
QWEN2 = Family("qwen2", SMALL)
QWEN3_MOE = Family("qwen3_moe", {**SMALL, **EXPERTS})
QWEN35_MOE = Family(
    "qwen3_5_moe",
    {
        "vision_config": {**VISION, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64},
        "tie_word_embeddings": False,
    },
    {**SMALL, **DELTANET, **EXPERTS, **SHARED, "shared_expert_intermediate_size": 48, "linear_num_value_heads": 2,
     "linear_num_key_heads": 2},
    VISION_AUTO,
)  # fmt: skip

DECODER = r".*(\.self_attn\.[qkvo]_proj|\.(gate|up|down)_proj|\.in_proj_qkv|\.in_proj_z|\.out_proj|lm_head)"
EXPERT = re.compile(r"(?P<bank>.+\.mlp\.experts)\.")
CODEBOOKS = ("int6@4", "e2m1@2", "exl3-mul1@2.5", "int5@3", "exl3-3inst@3", "int8@6", "exl3-mcg@4", "e2m1@1.5")
ROTATIONS = ((32, 32), (64, 32), (0, 64), (32, 0), (128, 128), (256, 64))


@dataclass(frozen=True)
class BankRecipe:
    """How all banks of a model are stored: all projections, or those of ``projections`` only.

    ``fused`` stores the plain rest as published checkpoints do: one tensor of three dimensions for all experts,
    (experts, out, in), or with "transposed" (experts, in, out).
    """

    codebooks: Sequence[str] = ("e2m1@1", "e2m1@2", "exl3-mul1@2.5", "int5@3")
    assignment: str = "0312"
    rotation: tuple[int, int] = (32, 32)
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool | Literal["transposed"] = False


def espalier_model(
    family: Family,
    folder: Path,
    *,
    quantized: str = DECODER,
    bank: BankRecipe | None = None,
    num_shards: int = 1,
    seed: int = 0,
) -> Draft:
    """Make a checkpoint of ``family``; modules whose names match ``quantized`` are. ``folder`` is for the source."""
    config, tensors = save_model(family, folder)
    bank = BankRecipe() if bank is None else bank
    modules: list[Module] = []
    banks: list[Bank] = []
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if match := EXPERT.match(name):
            if not banks or banks[-1].name != match["bank"]:
                banks.append(_take_bank(match["bank"], tensors, bank))
        elif name.endswith(".weight") and len(tensor.shape) == 2 and re.fullmatch(quantized, module):
            outputs, inputs = tensors.pop(name).shape
            has_bias = tensors.pop(f"{module}.bias", None) is not None
            number = len(modules) + seed
            modules.append(
                Module(
                    module, inputs, outputs, CODEBOOKS[number % len(CODEBOOKS)], ROTATIONS[number % len(ROTATIONS)],
                    bias="BF16" if has_bias else None,
                )
            )  # fmt: skip
    draft = espalier_draft(modules, banks, tensors, num_shards=num_shards, config=config, seed=seed)
    _scale(draft, {module.name: (module.codebook, module.in_features) for module in modules})
    for each in banks:
        stored: dict[str, tuple[str, int]] = {}
        for expert, character in enumerate(each.assignment):
            for projection, (inputs, _) in each.projections.items():
                name = f"{each.name}.{expert}.{projection}"
                if character == "-":
                    weight = _values(draft[f"{name}.weight"])
                    draft[f"{name}.weight"] = bf16(weight * inputs**-0.5)
                else:
                    stored[name] = (each.codebooks[int(character, 36)], inputs)
        _scale(draft, stored)
    return draft


def _take_bank(name: str, tensors: dict[str, Tensor], recipe: BankRecipe) -> Bank:
    """Take the experts out of ``tensors``: joined, or one by one, whichever way transformers saves them."""
    fused = tensors.get(f"{name}.gate_up_proj")
    if fused is not None:
        _, doubled, hidden = fused.shape
    else:
        width, hidden = tensors[f"{name}.0.gate_proj.weight"].shape
        doubled = 2 * width
    sizes = {
        "gate_proj": (hidden, doubled // 2),
        "up_proj": (hidden, doubled // 2),
        "down_proj": (doubled // 2, hidden),
    }
    for tensor in [other for other in tensors if other.startswith(f"{name}.")]:
        part = "gate_proj" if tensor.endswith("gate_up_proj") else tensor.removesuffix(".weight").rpartition(".")[2]
        if part in recipe.projections:
            del tensors[tensor]
    if recipe.fused:
        _fuse(name, tensors, len(recipe.assignment), transposed=recipe.fused == "transposed")
    taken = {projection: sizes[projection] for projection in recipe.projections}
    used = sorted({int(character) for character in recipe.assignment if character != "-"})
    renumbered = "".join("-" if c == "-" else str(used.index(int(c))) for c in recipe.assignment)
    return Bank(name, taken, [recipe.codebooks[number] for number in used], renumbered, recipe.rotation)


def _fuse(name: str, tensors: dict[str, Tensor], experts: int, *, transposed: bool) -> None:
    """Join the experts that are stored one by one."""
    for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        if f"{name}.0.{parts[0]}.weight" in tensors:
            pages = [
                np.concatenate([tensors.pop(f"{name}.{expert}.{part}.weight").array() for part in parts])
                for expert in range(experts)
            ]
            tensors[f"{name}.{fused}"] = Tensor.of([page.T if transposed else page for page in pages], "BF16")


def _scale(draft: Draft, modules: Mapping[str, tuple[str, int]]) -> None:
    """Give the weights of modules the size that keeps activations as large as they are."""
    for name, (codebook_name, inputs) in modules.items():
        codebook = get_codebook(codebook_name)
        rms = np.sqrt(np.mean((codebook.codes.astype(np.float64) * codebook.value_scale) ** 2))
        svh = draft[f"{name}.esp_svh"].array().astype(np.float64)
        draft[f"{name}.esp_svh"] = Tensor.of(svh * inputs**-0.5 / rms, "F16")


def _values(tensor: Tensor) -> np.ndarray:
    return (tensor.array().astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def routed(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and for each router the experts of each token, in the order of their numbers."""
    import torch

    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: found.append(output[2].sort(-1).values.cpu()))
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    with torch.no_grad():
        logits = model(ids).logits.double().cpu()
    for hook in hooks:
        hook.remove()
    return logits, [experts.view(*ids.shape, -1) for experts in found]


def alike(reference: list[torch.Tensor], others: list[list[torch.Tensor]]) -> int:
    """Return how many positions, from the first on, all models give to the same experts."""
    differ = [(a != b).any(-1).any(0) for other in others for a, b in zip(reference, other, strict=True)]
    return next((n for n in range(len(differ[0])) if any(d[n] for d in differ)), len(differ[0])) if differ else 10**6
