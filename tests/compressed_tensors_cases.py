"""Checkpoints of compressed-tensors, packed by the real library, of a tiny Qwen3.5-MoE that transformers made.

Expected weights are what the library's own decompressor gives for each module alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from builders import Draft, Tensor, split_shards
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hf_models import Family, save_model

LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention")
_TEXT: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": len(LAYERS),
    "layer_types": list(LAYERS),
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 96,
    "mtp_num_hidden_layers": 1,
}
_VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}
FAMILY = Family("qwen3_5_moe", {"vision_config": _VISION}, _TEXT, "AutoModelForImageTextToText")
FILES = {"tokenizer.json": b'{"version": "1.0"}', "chat_template.jinja": b"{{ messages }}\n", "README.md": b"# x\n"}

LANGUAGE_LINEAR = re.compile(
    r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)"
    r"|mlp\.(experts\.\d+|shared_expert)\.(gate|up|down)_proj|mlp\.shared_expert_gate)"
)
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
TORCH |= {"I8": torch.int8}
_NAMES = {dtype: name for name, dtype in TORCH.items()}


def to_torch(tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=TORCH[tensor.dtype]).reshape(tensor.shape)


def from_torch(tensor: torch.Tensor) -> Tensor:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), raw)


@dataclass(frozen=True)
class Layout:
    """What is packed, and how the config puts it: ``scheme`` gives the group of a module, None where it stays plain."""

    groups: Mapping[str, tuple[Sequence[str], QuantizationArgs, str]]
    scheme: Callable[[str], str | None]
    ignore: Sequence[str]
    version: str
    top: str = "pack-quantized"


@dataclass(frozen=True)
class Packed:
    """A packed checkpoint, and the weight that each packed module must decode to."""

    draft: Draft
    expected: dict[str, Tensor] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)


def args(bits: int, group: int | None = 128, *, symmetric: bool = True, **more: Any) -> QuantizationArgs:
    strategy = "channel" if group is None else "group"
    return QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group, **more)


def compress(weight: torch.Tensor, arguments: QuantizationArgs, label: str) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a matrix with min/max scales, pack it and decode it again, all by the library."""
    groups = weight.reshape(weight.shape[0], -1, arguments.group_size or weight.shape[1])
    if arguments.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = calculate_qparams(low, high, arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(label)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
    if not arguments.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    packed = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(packed), scheme)["weight"]
    return {name: from_torch(tensor) for name, tensor in packed.items()}, from_torch(decoded)


def group_config(layout: Layout) -> dict[str, Any]:
    """Return ``quantization_config`` as the library writes it."""
    groups = {
        name: QuantizationScheme(targets=list(targets), weights=arguments, format=label)
        for name, (targets, arguments, label) in layout.groups.items()
    }
    config = QuantizationConfig(
        config_groups=groups, ignore=list(layout.ignore), format=layout.top, quantization_status="compressed"
    )
    return {**json.loads(config.model_dump_json()), "version": layout.version}


@cache
def _model(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = save_model(FAMILY, Path(folder))
    hidden, width = _TEXT["hidden_size"], 128
    sizes = {"fc": (hidden, 2 * hidden), "layers.0.mlp.experts.0.gate_proj": (width, hidden)}
    sizes |= {f"layers.0.self_attn.{name}_proj": (128, hidden) for name in "qkvo"} | {"norm": (hidden,)}
    for number, (name, shape) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(number)
        tensors[f"mtp.{name}.weight"] = from_torch(torch.randn(shape, generator=generator).to(torch.bfloat16))
    return config, tensors


def model(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of the unquantized model, MTP tensors included; made once."""
    config, tensors = _model(str(folder))
    return json.loads(json.dumps(config)), dict(tensors)


def build(folder: Path, layout: Layout) -> Packed:
    """Pack the model as ``layout`` says."""
    config, tensors = model(folder)
    packed = Packed(Draft(config={**config, "quantization_config": group_config(layout)}, shards={}))
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        group = layout.scheme(module) if name.endswith(".weight") and len(tensor.shape) == 2 else None
        if group is None:
            stored[name] = tensor
            continue
        _, arguments, label = layout.groups[group]
        parts, packed.expected[module] = compress(to_torch(tensor), arguments, label)
        stored.update({f"{module}.{kind}": part for kind, part in parts.items()})
        packed.groups[module] = group
    packed.draft.shards.update(split_shards(stored, 2))
    packed.draft.files.update(FILES)
    return packed


def _language(module: str) -> bool:
    return LANGUAGE_LINEAR.fullmatch(module) is not None and not module.endswith("shared_expert_gate")


MTP_LINEAR = (
    "mtp.fc",
    *(f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"),
    "mtp.layers.0.mlp.experts.0.gate_proj",
)
DEAD = tuple(
    f"model.language_model.layers.{number // 2}.mlp.{'act_fn' if number % 2 else 'experts.act_fn'}"
    for number in range(60)
)


def gptq(*, swapped: bool = False) -> Layout:
    """(a) GPTQ, ordered by activation within groups; an int8 head in a second group; 60 dead ignore entries."""
    groups = {
        "group_0": (("Linear",), args(4, actorder="weight"), "pack-quantized"),
        "group_1": (("re:.*lm_head$",), args(8), "pack-quantized"),
    }

    def scheme(module: str) -> str | None:
        small = module.endswith(("in_proj_a", "in_proj_b"))
        return "group_1" if module == "lm_head" else "group_0" if _language(module) and not small else None

    keep = ("re:.*linear_attn\\.in_proj_[ab]$", "re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$", "re:model.visual.*")
    ordered = dict(reversed(groups.items())) if swapped else groups
    return Layout(ordered, scheme, (*keep, *MTP_LINEAR, *DEAD), "0.18.0")


def awq() -> Layout:
    """(b) AWQ, every language linear with in_proj_a and in_proj_b, and shared_expert_gate as well."""
    groups = {"group_0": (("Linear",), args(4), "pack-quantized")}
    keep = ("lm_head", "re:.*mlp.gate$", "re:^model.visual.*", "re:^mtp.*")
    return Layout(groups, lambda m: "group_0" if LANGUAGE_LINEAR.fullmatch(m) else None, keep, "0.17.1")


def autoround() -> Layout:
    """(c) AutoRound with a keep-list."""
    groups = {"group_0": (("Linear",), args(4), "pack-quantized")}

    def scheme(module: str) -> str | None:
        return "group_0" if _language(module) and not module.endswith(("in_proj_a", "in_proj_b")) else None

    keep = (
        "lm_head",
        *(f"model.language_model.layers.{n}.mlp.{gate}" for n in range(5) for gate in ("gate", "shared_expert_gate")),
        *(f"model.language_model.layers.{n}.linear_attn.in_proj_{x}" for n in (0, 1, 2, 4) for x in "ab"),
        "re:.*visual.*",
        "re:.*mtp.*",
    )
    return Layout(groups, scheme, keep, "0.15.0.1")


SUPER = ("model.language_model.layers.2.mlp.experts.1", "model.language_model.layers.3.mlp.experts.3")


def mixed() -> Layout:
    """(d) Int4 experts in groups of 32, int8 attention and a few int8 experts, the rest plain."""
    supers = tuple(f"{expert}.{projection}_proj" for expert in SUPER for projection in ("gate", "up", "down"))
    groups = {
        "experts": (("re:.*mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$",), args(4, 32), "pack-quantized"),
        "attention": (("re:.*self_attn\\.(q|k|v|o)_proj$",), args(8, None), "int-quantized"),
        "super": (supers, args(8, 128), "pack-quantized"),
    }

    def scheme(module: str) -> str | None:
        if re.match(r"model\.language_model\.layers\.[014]\.", module) or not module.startswith(
            "model.language_model."
        ):
            return None
        if module in supers:
            return "super"
        if ".mlp.experts." in module:
            return "experts"
        return "attention" if re.fullmatch(r".*self_attn\.[qkvo]_proj", module) else None

    keep = ("re:.*layers\\.(0|1|4)\\..*", "re:.*shared_expert.*", "re:.*linear_attn.*", "lm_head", "re:^mtp.*")
    return Layout(groups, scheme, keep, "0.18.0", "mixed-precision")


LAYOUTS: Mapping[str, Callable[[], Layout]] = {"gptq": gptq, "awq": awq, "autoround": autoround, "mixed": mixed}


def one_module(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Any],
    *,
    version: str | None = "0.20.1",
    label: str = "pack-quantized",
) -> Draft:
    """Return a checkpoint of one module, ``m``; ``tensors`` are named without it."""
    block = {
        "quant_method": "compressed-tensors",
        "format": label,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights), "format": label}},
        "ignore": [],
        "version": version,
    }
    shard = {f"m.{name}": tensor for name, tensor in tensors.items()}
    return Draft(config={"quantization_config": block}, shards={"model.safetensors": shard})
