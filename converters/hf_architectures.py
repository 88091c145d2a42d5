"""What EXL3's converter changed per architecture, as tables: what to join, to rename, or to refuse.

EXL3 files name one module per linear layer of exllamav3's own model, which is mostly the name of the
source checkpoint. The differences are few and are listed here; `hf_layout` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from espalier_format.checkpoint.text_sections import text_sections


@dataclass(frozen=True, slots=True)
class Join:
    """Projections that the architecture's own loader expects as one matrix, stacked along ``out``.

    ``parent`` is matched against the whole name of the module that holds them, without a dot at its end.
    """

    parent: re.Pattern[str]
    fused: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one model type's loader expects other than what EXL3 stores.

    ``fused_experts`` is for loaders that take no tensors per expert: ``<bank>.gate_up_proj`` of shape
    (experts, hidden, 2 x intermediate) and ``<bank>.down_proj`` of shape (experts, intermediate, hidden).
    Loaders that convert tensors per expert themselves get those.
    """

    joins: tuple[Join, ...] = ()
    fused_experts: bool = False


@dataclass(frozen=True, slots=True)
class BakedScale:
    """A factor that exllamav3 multiplies into source weights before it quantizes, recorded nowhere in the file.

    Applies where ``identity`` is found in a model type or an architecture class of the config, and ``module`` says so
    of the name of a stored linear module; both take time in proportion to the name. ``config_key`` names the setting
    that holds the factor, if there is one: absent or 1 means that nothing was multiplied in.
    """

    identity: re.Pattern[str]
    module: Callable[[str], bool]
    scale: str
    config_key: str | None = None

    def applies(self, config: Mapping[str, object]) -> bool:
        """Tell whether the config, or a text part, sets a factor other than 1; true where none can be set."""
        if self.config_key is None:
            return True
        return any(section.get(self.config_key) not in (None, 1) for section in text_sections(config))


SLICE = re.compile(r"(?P<base>.+)\.slice\.(?P<index>0|[1-9][0-9]{0,5})")
"""A wide MLP is cut: ``<base>.slice.<n>``."""

SLICED_ALONG_OUT = frozenset({"gate_proj", "up_proj"})
SLICED_ALONG_IN = frozenset({"down_proj"})

_VISION_QKV = Join(re.compile(r"(model\.)?visual\.blocks\.\d+\.attn"), "qkv", ("q_proj", "k_proj", "v_proj"))
_TEXT_LAYER = r"((model|language_model)\.)*layers\.\d+"
_TEXT_QKV = Join(re.compile(_TEXT_LAYER + r"\.self_attn"), "qkv_proj", ("q_proj", "k_proj", "v_proj"))
_TEXT_GATE_UP = Join(re.compile(_TEXT_LAYER + r"\.mlp"), "gate_up_proj", ("gate_proj", "up_proj"))

_AS_STORED = (
    "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "granite",
    "hunyuan_v1_dense", "llama", "llava", "llava_next", "ministral", "ministral3", "mistral", "mistral3", "mixtral",
    "olmo", "olmo2", "olmo3", "olmoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3",
    "vaultgemma",
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(_AS_STORED, Architecture()),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"), Architecture((_VISION_QKV,))),
    **dict.fromkeys(("glm", "glm4"), Architecture((_TEXT_GATE_UP,))),
    "phi3": Architecture((_TEXT_QKV, _TEXT_GATE_UP)),
    "qwen3_vl_moe": Architecture((_VISION_QKV,), fused_experts=True),
    "qwen3_vl_moe_text": Architecture(fused_experts=True),
}
"""Model type of config.json, or of its text part, to what its loader expects; one that is missing is unknown."""

FUSED_EXPERTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Name of a fused 3-D tensor to the projections of each expert in it, stacked along ``out``."""

EXPERT = re.compile(r"(?P<bank>.+\.experts)\.(?P<index>0|[1-9][0-9]{0,5})\.(?P<projection>gate_proj|up_proj|down_proj)")


def _is_expert_up(module: str) -> bool:
    parts = module.rsplit(".", 3)
    return len(parts) == 4 and parts[1::2] == ["experts", "up_proj"] and parts[2].isdecimal()


def _is_expert_up_of_layer_47(module: str) -> bool:
    return _is_expert_up(module) and ".layers.47." in f".{module}"


def _is_output_projection(module: str) -> bool:
    return module.endswith(".o_proj")


BAKED_SCALES: tuple[BakedScale, ...] = (
    BakedScale(re.compile(r"\Alaguna|\Amistral4", re.IGNORECASE), _is_expert_up, "1/128 on routed up_proj"),
    BakedScale(
        re.compile(r"\Amimo_?v2", re.IGNORECASE),
        _is_expert_up_of_layer_47,
        "1/128 on routed up_proj of layer 47",
    ),
    BakedScale(
        re.compile(r"\Amimo_?v2|dflash", re.IGNORECASE),
        _is_output_projection,
        "attention_value_scale on o_proj",
        config_key="attention_value_scale",
    ),
)

GEMMA3_PROJECTION = re.compile(r"(?P<parent>(.+\.)?multi_modal_projector)\.mm_input_projection")
"""exllamav3 reads ``mm_input_projection_weight``, an (in, out) parameter, as a linear module of this name."""

GEMMA3_PARAMETER = "mm_input_projection_weight"


def model_types(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the model types that a config states: its own, and those of its text parts."""
    stated = (section.get("model_type") for section in text_sections(config))
    return tuple(name for name in stated if isinstance(name, str))


def identities(config: Mapping[str, object]) -> tuple[str, ...]:
    """Names by which a config says what model it is: model types, the nested text model's too, and classes."""
    found: list[str] = []
    for section in text_sections(config):
        if isinstance(model_type := section.get("model_type"), str):
            found.append(model_type)
        if isinstance(classes := section.get("architectures"), list):
            found += [name for name in classes if isinstance(name, str)]
    return tuple(found)


def find_baked_scale(config: Mapping[str, object], modules: Iterable[str]) -> tuple[BakedScale, str, str] | None:
    """Return the first scale that exllamav3 multiplies into one of these modules: the scale, the model's name, it."""
    names = identities(config)
    stored = tuple(modules)
    for baked in BAKED_SCALES:
        identity = next((name for name in names if baked.identity.search(name)), None)
        if identity is not None and baked.applies(config):
            module = next((module for module in stored if baked.module(module)), None)
            if module is not None:
                return baked, identity, module
    return None
