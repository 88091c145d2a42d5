"""Tiny Hugging Face models of many architectures, and EXL3 checkpoints as exllamav3 would make them.

The tensor names that transformers itself saves are the truth about what a loader expects. How exllamav3
renames and splits them is restated here from the description of EXL3, not taken from the package.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from builders import Draft, Exl3Module, Tensor, exl3_draft, read_safetensors

from espalier_format.codec.codebook import get_codebook
from espalier_format.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TEXT: Mapping[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""No size is a multiple of 128, so every module is cropped on both sides."""

MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 72}
SHARED = {"shared_expert_intermediate_size": 72}
DELTANET = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
VISION = {
    "depth": 1,
    "hidden_size": 80,
    "intermediate_size": 88,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 160,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}

OLD_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 160,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 8, 8]}}
VISION_AUTO = "AutoModelForImageTextToText"


@dataclass(frozen=True)
class Family:
    """One architecture at tiny sizes. With ``text`` the sizes go to ``text_config``.

    ``plain_vision``: the vision tower stays unquantized, as older versions of exllamav3 leave all of them.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] | None = None
    auto: str = "AutoModelForCausalLM"
    plain_vision: bool = False


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("mixtral", {"num_local_experts": 2}),
        Family("qwen2"),
        Family("qwen2_moe", MOE | SHARED),
        Family("qwen3"),
        Family("qwen3_moe", MOE),
        Family("qwen3_next", MOE | SHARED | DELTANET),
        Family("gemma"),
        Family("gemma2"),
        Family("gemma3_text"),
        Family("phi3"),
        Family("smollm3"),
        Family("glm"),
        Family("glm4"),
        Family("arcee"),
        Family("cohere"),
        Family("cohere2"),
        Family("cwm"),
        Family("ernie4_5"),
        Family("exaone4"),
        Family("granite"),
        Family("hunyuan_v1_dense"),
        Family("ministral"),
        Family("ministral3"),
        Family("olmo"),
        Family("olmo2"),
        Family("olmo3"),
        Family("olmoe", {"num_experts": 2, "num_experts_per_tok": 1}),
        Family("seed_oss"),
        Family("vaultgemma"),
        Family("qwen2_vl", {"vision_config": OLD_VISION | {"hidden_size": 160}}, MROPE, VISION_AUTO, plain_vision=True),
        Family("qwen2_5_vl", {"vision_config": OLD_VISION}, MROPE, VISION_AUTO, plain_vision=True),
        Family("qwen3_5_text", DELTANET),
        Family("qwen3_5", {"vision_config": VISION}, DELTANET, VISION_AUTO),
        Family("qwen3_5_moe", {"vision_config": VISION}, DELTANET | MOE | SHARED, VISION_AUTO),
        Family("qwen3_vl", {"vision_config": {**VISION, "deepstack_visual_indexes": [0]}}, {}, VISION_AUTO),
        Family("qwen3_vl_moe", {"vision_config": VISION}, MOE, VISION_AUTO),
        Family(
            "gemma3",
            {
                "vision_config": {
                    "hidden_size": 72,
                    "intermediate_size": 88,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                },
                "mm_tokens_per_image": 4,
            },
            {},
            VISION_AUTO,
        ),
        Family("mistral3", {"vision_config": {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 1,
            "num_attention_heads": 2, "head_dim": 32, "image_size": 32, "patch_size": 8}}, {"model_type": "mistral"},
            VISION_AUTO),
    )
}  # fmt: skip


def save_model(family: Family, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make the model with random weights, let transformers save it; return (config.json, tensors)."""
    import torch
    import transformers

    sizes = {"text_config": {**TEXT, **family.text}} if family.text is not None else TEXT
    config = transformers.AutoConfig.for_model(family.model_type, **{**sizes, **family.config})
    torch.manual_seed(0)
    auto = getattr(transformers, family.auto)
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), read_safetensors(folder / "model.safetensors")[0]


_QUANTIZED = re.compile(
    r"(?!.*vision_tower).*(lm_head|[qkvo]_proj|(gate|up|down)_proj|\.w[123]|in_proj_(qkv|z|qkvz)|out_proj|attn\.proj"
    r"|linear_fc[12]|mtp\.fc)\.weight"
)
_HALF = re.compile(r".*(\.gate|shared_expert_gate|in_proj_(a|b|ba)|norm1|patch_embed\.proj)\.(weight|bias)")
"""What exllamav3 loads as a linear layer or a norm of its vision towers and leaves unquantized: stored as F16."""
_RATES: tuple[tuple[str | None, float], ...] = (("mul1", 2.5), ("mcg", 3), (None, 2), ("mul1", 1), ("mcg", 4))


class Exl3Maker:
    """Turns the tensors of a Hugging Face checkpoint into an EXL3 checkpoint and the weights expected back.

    Weights are random codes, not approximations: what must come back is what the codes say.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, plain_vision: bool = False) -> None:
        self.config = config
        self._plain_vision = plain_vision
        self.expected: dict[str, Tensor] = {}
        self._modules: list[Exl3Module] = []
        self._plain: dict[str, Tensor] = {}
        self._parts: list[tuple[str, list[str], str]] = []
        for name, tensor in tensors.items():
            self._add(name, tensor, tensors)
        if not any(name.endswith("lm_head.weight") for name in tensors):
            embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
            head = "language_model.lm_head" if embedding.startswith("language_model.") else "lm_head"
            self._module(head, *tensors[embedding].shape)
        self.draft: Draft = exl3_draft(self._modules, self._plain, config=config, num_shards=2)
        self._expect()

    def _add(self, name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> None:
        module = name.removesuffix(".weight")
        bias = f"{module}.bias" in tensors
        text = self.config.get("text_config", self.config)
        kv = text["num_key_value_heads"] * (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        if self._plain_vision and "visual." in name:
            self._keep(name, tensor)
        elif name.endswith(".self_attn.qkv_proj.weight"):
            self._split(module, tensor, {"q_proj": tensor.shape[0] - 2 * kv, "k_proj": kv, "v_proj": kv})
        elif name.endswith(".gate_up_proj.weight"):
            self._split(module, tensor, dict.fromkeys(("gate_proj", "up_proj"), tensor.shape[0] // 2))
        elif name.endswith(".attn.qkv.weight"):
            self._split(module, tensor, dict.fromkeys(("q_proj", "k_proj", "v_proj"), tensor.shape[0] // 3), bias=bias)
            self._plain[name] = tensor
        elif name.endswith(".attn.qkv.bias"):
            self._plain[name] = tensor
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            self._fused_experts(name, tensor)
        elif name.endswith(".mm_input_projection_weight"):
            self._plain[name.removesuffix("_weight") + ".weight"] = tensor
            self._parts.append((name, [name.removesuffix("_weight") + ".weight"], "plain"))
        elif _QUANTIZED.fullmatch(name) and len(tensor.shape) == 2:
            self._module(module, *tensor.shape, bias=bias)
        elif not (name.endswith(".bias") and _QUANTIZED.fullmatch(name.removesuffix(".bias") + ".weight")):
            half = _HALF.fullmatch(name) and tensor.dtype == "BF16"
            wide = (tensor.array().astype(np.uint32) << 16).view(np.float32) if half else None
            self._keep(name, tensor if wide is None else Tensor.of(wide.astype(np.float16), "F16"))

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._plain[name] = tensor
        self._parts.append((name, [name], "plain"))

    def _quantize(self, module: str, out_features: int, in_features: int, *, bias: bool = False) -> str:
        marker, bits = _RATES[len(self._modules) % len(_RATES)]
        self._modules.append(Exl3Module(module, in_features, out_features, bits, marker, "F16" if bias else None))
        return module

    def _module(self, module: str, out_features: int, in_features: int, *, bias: bool = False) -> None:
        self._quantize(module, out_features, in_features, bias=bias)
        self._parts.append((f"{module}.weight", [module], "rows"))
        if bias:
            self._parts.append((f"{module}.bias", [f"{module}.bias"], "bias"))

    def _split(self, fused: str, tensor: Tensor, parts: Mapping[str, int], *, bias: bool = False) -> None:
        parent = fused.rpartition(".")[0]
        names = [self._quantize(f"{parent}.{part}", rows, tensor.shape[1], bias=bias) for part, rows in parts.items()]
        self._parts.append((f"{fused}.weight", names, "rows"))
        if bias:
            self._parts.append((f"{fused}.bias", [f"{name}.bias" for name in names], "bias"))

    def _fused_experts(self, name: str, tensor: Tensor) -> None:
        """Split per expert. transformers saves (experts, out, in); published checkpoints hold (experts, in, out)."""
        bank, _, fused = name.rpartition(".")
        experts, outputs, inputs = tensor.shape
        parts = (
            dict.fromkeys(("gate_proj", "up_proj"), outputs // 2) if fused == "gate_up_proj" else {"down_proj": outputs}
        )
        numbered = [(expert, part, rows) for expert in range(experts) for part, rows in parts.items()]
        names = [self._quantize(f"{bank}.{expert}.{part}", rows, inputs) for expert, part, rows in numbered]
        self._parts.append((name, names, f"experts {experts}"))

    def _expect(self) -> None:
        modules = {module.name: module for module in self._modules}
        for name, sources, kind in self._parts:
            if kind == "plain":
                self.expected[name] = cast(self.draft[sources[0]], "BF16")
            elif kind == "bias":
                rows = [modules[source.removesuffix(".bias")].out_features for source in sources]
                biases = [cast(self.draft[s], "BF16").array()[:n] for s, n in zip(sources, rows, strict=True)]
                self.expected[name] = Tensor.of(np.concatenate(biases), "BF16")
            else:
                weights = [reference_weight(self.draft, modules[source]) for source in sources]
                if kind == "rows":
                    whole = np.concatenate(weights)
                else:
                    each = len(weights) // int(kind.split()[1])
                    pages = [np.concatenate(weights[n : n + each]).T for n in range(0, len(weights), each)]
                    whole = np.stack(pages)
                self.expected[name] = rounded(whole, "BF16")


def reference_weight(draft: Draft, module: Exl3Module) -> np.ndarray:
    """The exact weight (out, in) at its true size, to float64 accuracy."""
    width = f"{module.bits:g}"
    codebook = get_codebook(f"exl3-{module.marker or '3inst'}@{width}")
    parts = (draft[f"{module.name}.{kind}"].array() for kind in ("trellis", "suh", "svh"))
    weight = reference.decode_weight(*parts, codebook, 128, 128)
    return weight[: module.in_features, : module.out_features].T


def rounded(values: np.ndarray, dtype: str) -> Tensor:
    """Round float64 once, to nearest even; right unless a value is within 2^-52 of a midpoint without being one."""
    values = values + 0.0  # an exact zero is positive
    if dtype != "BF16":
        return Tensor.of(values, dtype)
    mantissa, exponent = np.frexp(values)
    nearest = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8).astype(np.float32)
    return Tensor.of(nearest.view(np.uint32) >> 16, "BF16")


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Torch's cast of a plain F16 or BF16 tensor; other dtypes stay."""
    import torch

    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    if tensor.dtype not in ("F16", "BF16"):
        return tensor
    if not tensor.data:
        return Tensor(dtype, tensor.shape, b"")
    raw = torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.dtype]).to(kinds[dtype])
    bits = raw.view(torch.int32 if dtype == "F32" else torch.int16).numpy()
    return Tensor(dtype, tensor.shape, bits.tobytes())
