"""Small plain checkpoints, and an encoder that takes no time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from builders import Draft, Tensor, bf16, read_safetensors

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.rotation import padded
from espalier_format.encoder.module import SampledErrors
from espalier_format.encoder.options import EncodedModule, ModuleStats


def values(name: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """Normal numbers that follow from the name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)


def matrix(name: str, outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
    return bf16(values(name, (outputs, inputs), scale))


def widened(tensor: Tensor) -> np.ndarray:
    """BF16 as float32."""
    return (tensor.array().astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def dense_draft(*, hidden: int = 64, tied: bool = False, config: dict[str, Any] | None = None) -> Draft:
    """A Llama of one layer with biases on q, in two shards."""
    layer = "model.layers.0"
    sizes = {
        f"{layer}.self_attn.q_proj": (hidden, hidden),
        f"{layer}.self_attn.k_proj": (32, hidden),
        f"{layer}.self_attn.v_proj": (32, hidden),
        f"{layer}.self_attn.o_proj": (hidden, hidden),
        f"{layer}.mlp.gate_proj": (96, hidden),
        f"{layer}.mlp.up_proj": (96, hidden),
        f"{layer}.mlp.down_proj": (hidden, 96),
    }
    first = {"model.embed_tokens.weight": matrix("embedding", 50, hidden)}
    for number, (name, (outputs, inputs)) in enumerate(sizes.items()):
        first[f"{name}.weight"] = matrix(name, outputs, inputs, 0.5 + number)
    first[f"{layer}.self_attn.q_proj.bias"] = bf16(values("bias", (hidden,)))
    first[f"{layer}.input_layernorm.weight"] = bf16(values("norm", (hidden,)))
    second = {"model.norm.weight": bf16(values("norm", (hidden,)))}
    if not tied:
        second["lm_head.weight"] = matrix("head", 50, hidden)
    return Draft(
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "tie_word_embeddings": tied,
            **(config or {}),
        },
        shards={"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second},
        metadata={"model-00001-of-00002.safetensors": {"format": "pt"}},
        files={"tokenizer.json": b"{}\n"},
    )


def moe_tensors(*, experts: int = 4, hidden: int = 64, width: int = 32, transposed: bool = False) -> dict[str, Tensor]:
    """A layer with fused experts, router, shared expert, linear attention, vision and MTP."""
    bank = "model.language_model.layers.0.mlp.experts"
    parts = {name: values(name, (experts, width, hidden)) for name in ("gate", "up")}
    gate_up = np.concatenate([parts["gate"], parts["up"]], axis=1)
    down = values("down", (experts, hidden, width))
    for expert in range(experts):  # experts that matter differently
        gate_up[expert] *= 4.0**expert
        down[expert] *= 4.0**expert
    layer = "model.language_model.layers.0"
    return {
        "model.language_model.embed_tokens.weight": matrix("embedding", 40, hidden),
        f"{bank}.gate_up_proj": bf16(gate_up.transpose(0, 2, 1) if transposed else gate_up),
        f"{bank}.down_proj": bf16(down.transpose(0, 2, 1) if transposed else down),
        f"{layer}.mlp.gate.weight": matrix("router", experts, hidden),
        f"{layer}.mlp.shared_expert_gate.weight": matrix("gate", 1, hidden),
        f"{layer}.mlp.shared_expert.up_proj.weight": matrix("shared", 32, hidden),
        f"{layer}.linear_attn.in_proj_qkv.weight": matrix("qkv", 96, hidden),
        f"{layer}.linear_attn.in_proj_a.weight": matrix("a", 4, hidden),
        f"{layer}.linear_attn.conv1d.weight": bf16(values("conv", (96, 1, 4))),
        f"{layer}.linear_attn.A_log": Tensor.of(values("A", (4,)), "F32"),
        "model.visual.blocks.0.mlp.linear_fc1.weight": matrix("vision", 48, 32),
        "mtp.fc.weight": matrix("fc", hidden, 2 * hidden),
        "mtp.layers.0.self_attn.q_proj.weight": matrix("mtp q", 64, hidden),
        "mtp.layers.0.mlp.experts.gate_up_proj": bf16(values("mtp", (2, 2 * width, hidden))),
        "mtp.layers.0.mlp.experts.down_proj": bf16(values("mtp down", (2, hidden, width))),
        "lm_head.weight": matrix("head", 40, hidden),
    }


def moe_draft(**sizes: Any) -> Draft:
    return Draft(
        config={
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text", "hidden_size": 64, "tie_word_embeddings": False},
        },
        shards={"model.safetensors": moe_tensors(**sizes)},
        index=None,
    )


def fake_encode_module(
    weight: Any, codebook: Codebook, rotation: tuple[int, int], *, seed: int, name: str, **options: Any
) -> EncodedModule:
    """Random codes of the right shape that follow from everything they may depend on; reads the weight."""
    outputs, inputs = weight.shape
    content = weight.rows(0, outputs)
    key = f"{name} {seed} {codebook.name} {rotation} {options['options'].effort}".encode() + content.tobytes()
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:8], "little"))
    padded_in, padded_out = padded(inputs, rotation[0]), padded(outputs, rotation[1])
    shape = (padded_in // 16, padded_out // 16, codebook.halfwords_per_tile)
    suh, svh = np.zeros(padded_in, np.float16), np.zeros(padded_out, np.float16)
    suh[:inputs], svh[:outputs] = 1, 1
    if options.get("advance") is not None:
        options["advance"](inputs * outputs)
    stats = ModuleStats(4.0**-codebook.bits, None, energy(content), 1.0, None, 0, 0, 0.0)
    trellis = rng.integers(-(2**15), 2**15, shape, dtype=np.int16)
    return EncodedModule(codebook, inputs, outputs, rotation, trellis, suh, svh, stats)


def fake_sample_errors(
    weight: Any, codebooks: Sequence[Codebook], rotation: tuple[int, int], **options: Any
) -> SampledErrors:
    return SampledErrors(tuple(4.0**-codebook.bits for codebook in codebooks), energy(weight.rows(0, weight.shape[0])))


def energy(content: np.ndarray) -> float:
    return float(np.square(content, dtype=np.float64).sum())


def write_recipe(folder: Path, *rules: str, bits: float | None = None) -> Path:
    """Write a recipe of the rules, each the lines of one."""
    path = folder / "recipe.toml"
    head = "" if bits is None else f"bits = {bits}\n"
    path.write_text(head + "".join(f"[[rule]]\n{rule}\n" for rule in rules), encoding="utf-8")
    return path


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all shards."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(read_safetensors(path)[0])
    return found


def stored_block(folder: Path) -> dict[str, Any]:
    block: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return block
