"""The complete tiny checkpoints of the kit: what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from espalier_format.conformance.module_case import ModuleCase


@dataclass(frozen=True, slots=True)
class KitModule:
    """A module of a checkpoint; ``bias`` is the dtype of its bias, or None."""

    case: ModuleCase
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class KitBank:
    """An expert bank: projections with (in_features, out_features), and which codebook each expert has."""

    name: str
    projections: tuple[tuple[str, int, int], ...]
    rotation: tuple[int, int]
    codebooks: tuple[str, ...]
    """Sorted by width, then name; every projection uses all of them."""
    assignment: tuple[str, ...]
    """One string per projection (spec/config.md §5)."""

    def modules(self, checkpoint: str) -> dict[str, ModuleCase]:
        """Return the quantized experts by their full names."""
        found = {}
        for (projection, inputs, outputs), assignment in zip(self.projections, self.assignment, strict=True):
            for expert, character in enumerate(assignment):
                if character != "-":
                    name, book = f"{self.name}.{expert}.{projection}", self.codebooks[int(character)]
                    label = f"{checkpoint}/{name}"
                    found[name] = ModuleCase(label, book, *self.rotation, inputs, outputs, "small")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class KitCheckpoint:
    """A checkpoint: everything follows from these fields."""

    name: str
    config: Mapping[str, object]
    """config.json without ``quantization_config``."""
    modules: Mapping[str, KitModule]
    banks: tuple[KitBank, ...]
    plain: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name of a plain tensor to its dtype and shape, in the order of the file."""
    shards: int = 1
    manifest: bool = False
    """Whether it has a manifest with decode digests."""

    def all_modules(self) -> dict[str, ModuleCase]:
        """Return every quantized module, experts included, by name."""
        found = {name: module.case for name, module in self.modules.items()}
        for bank in self.banks:
            found.update(bank.modules(self.name))
        return found


@lru_cache(maxsize=1)
def kit_checkpoints() -> tuple[KitCheckpoint, ...]:
    """Return the checkpoints: a dense model, one with experts of mixed width, and more banks, and modules of EXL3."""
    return (_dense(), _mixed_experts(), _expert_banks(), _exl3_codebooks())


def _module(checkpoint: str, name: str, codebook: str, rotation: tuple[int, int], sizes: tuple[int, int]) -> ModuleCase:
    return ModuleCase(f"{checkpoint}/{name}", codebook, *rotation, *sizes, "small")


def _dense() -> KitCheckpoint:
    layer, name = "model.layers.0", "dense"
    modules = {
        f"{layer}.self_attn.q_proj": (("int6@4", (32, 64), (96, 96)), "BF16"),
        f"{layer}.self_attn.k_proj": (("e2m1@2", (64, 32), (96, 32)), "BF16"),
        f"{layer}.self_attn.v_proj": (("int5@3", (0, 32), (96, 32)), "F16"),
        f"{layer}.self_attn.o_proj": (("int8@5", (32, 0), (96, 96)), "F32"),
        f"{layer}.mlp.gate_proj": (("e2m1@1.5", (32, 32), (96, 150)), None),
        f"{layer}.mlp.up_proj": (("e2m1@1", (128, 32), (96, 150)), None),
        f"{layer}.mlp.down_proj": (("int5@2.5", (256, 32), (150, 96)), None),
        "lm_head": (("int8@6", (32, 128), (96, 90)), None),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "hidden_size": 96,
        "intermediate_size": 150,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": 90,
    }
    plain: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (90, 96)),
        f"{layer}.input_layernorm.weight": ("F32", (96,)),
        f"{layer}.post_attention_layernorm.weight": ("F16", (96,)),
        "model.norm.weight": ("BF16", (96,)),
    }
    held = {key: KitModule(_module(name, key, *value), bias) for key, (value, bias) in modules.items()}
    return KitCheckpoint(name, config, held, (), plain)


def _mixed_experts() -> KitCheckpoint:
    layer, name = "model.layers.0", "mixed-experts"
    modules = {
        f"{layer}.self_attn.q_proj": ("int6@4", (64, 64), (64, 64)),
        f"{layer}.self_attn.k_proj": ("int6@3.5", (64, 32), (64, 32)),
        f"{layer}.self_attn.o_proj": ("int6@4", (64, 64), (64, 64)),
    }
    plain: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (50, 64)),
        f"{layer}.input_layernorm.weight": ("BF16", (64,)),
        f"{layer}.self_attn.q_norm.weight": ("BF16", (32,)),
        f"{layer}.self_attn.k_norm.weight": ("BF16", (32,)),
        f"{layer}.self_attn.v_proj.weight": ("BF16", (32, 64)),
        f"{layer}.post_attention_layernorm.weight": ("BF16", (64,)),
        f"{layer}.mlp.gate.weight": ("F32", (7, 64)),
        f"{layer}.mlp.experts.4.gate_proj.weight": ("BF16", (45, 64)),
        f"{layer}.mlp.experts.4.up_proj.weight": ("BF16", (45, 64)),
        "model.norm.weight": ("BF16", (64,)),
        "lm_head.weight": ("BF16", (50, 64)),
    }
    bank = KitBank(
        f"{layer}.mlp.experts",
        (("gate_proj", 64, 45), ("up_proj", 64, 45), ("down_proj", 45, 64)),
        (32, 32),
        ("e2m1@1", "e2m1@2", "int5@3"),
        ("0120-21", "0121-00", "2100102"),
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "hidden_size": 64,
        "max_position_embeddings": 64,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 45,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "vocab_size": 50,
    }
    held = {key: KitModule(_module(name, key, *value)) for key, value in modules.items()}
    return KitCheckpoint(name, config, held, (bank,), plain, shards=3, manifest=True)


def _expert_banks() -> KitCheckpoint:
    def bank(
        layer: int, hidden: int, inner: int, block: int, codebooks: tuple[str, ...], assignment: tuple[str, ...]
    ) -> KitBank:
        projections = (("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden))
        return KitBank(f"layers.{layer}.mlp.experts", projections, (block, block), codebooks, assignment)

    banks = (
        bank(0, 96, 70, 32, ("e2m1@1.5", "int5@2.5", "int6@4"), ("0121", "2010", "1102")),
        bank(1, 128, 100, 128, ("exl3-mcg@2", "exl3-mul1@2.5", "exl3-3inst@4"), ("0122", "1200", "2012")),
        bank(2, 128, 64, 64, ("e2m1@2", "int8@6"), ("01101", "10010", "01111")),
    )
    plain: dict[str, tuple[str, tuple[int, ...]]] = {
        f"layers.{layer}.mlp.gate.weight": ("BF16", (len(held.assignment[0]), held.projections[0][1]))
        for layer, held in enumerate(banks)
    }
    return KitCheckpoint("expert-banks", {"architectures": ["Example"]}, {}, banks, plain, shards=2)


def _exl3_codebooks() -> KitCheckpoint:
    name = "exl3-codebooks"
    modules = {
        "layers.0.a_proj": ("exl3-3inst@2", (128, 128), (100, 128)),
        "layers.0.b_proj": ("exl3-mcg@3", (128, 128), (128, 90)),
        "layers.0.c_proj": ("exl3-mul1@2.5", (128, 128), (128, 128)),
        "layers.0.d_proj": ("exl3-mul1@8", (0, 0), (20, 30)),
    }
    held = {key: KitModule(_module(name, key, *value)) for key, value in modules.items()}
    # Nothing is wrong with it, but in float16 it must be refused.
    large = "layers.0.e_proj"
    held[large] = KitModule(ModuleCase(f"{name}/{large}", "exl3-mul1@4", 0, 0, 20, 30, "overflow"))
    return KitCheckpoint(name, {"architectures": ["Example"]}, held, (), {"norm.weight": ("F32", (128,))})
