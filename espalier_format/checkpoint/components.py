"""Which part of a model a module or tensor belongs to, by its name alone (spec/config.md §8).

The rules decide what ``bits`` averages over, so they are part of the format: an ordered list of regular
expressions, the first one found in the name wins. Names alone cannot tell everything: DeepSeek-style
checkpoints keep their multi-token-prediction layer as one more decoder layer (``model.layers.61`` where
there are 61 layers), and only its ``eh_proj``, ``enorm``, ``hnorm`` and ``shared_head`` are recognised;
the rest of such a layer counts as decoder.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import Final


class Component(Enum):
    """Part of a model; the value is what people and JSON output call it."""

    EXPERTS = "experts"
    SHARED_EXPERT = "shared expert"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear attention"
    MLP = "mlp"
    HEAD = "head"
    MTP = "mtp"
    EMBEDDINGS = "embeddings"
    VISION = "vision"
    OTHER = "other"


NOT_DECODER: Final = frozenset({Component.HEAD, Component.MTP, Component.VISION})
"""Components that ``bits`` leaves out."""


def _part(pattern: str) -> str:
    """Return an expression that finds ``pattern`` as one whole part of a dotted name."""
    return rf"(?:^|\.)(?:{pattern})(?:\.|\Z)"


COMPONENT_RULES: Final[tuple[tuple[Component, str], ...]] = (
    # Encoders of other modalities, and what joins them to the decoder.
    (
        Component.VISION,
        _part(
            "visual|vision|vision_[a-z0-9_]+|audio|audio_[a-z0-9_]+|image_newline"
            "|multi_modal_projector|mm_projector|embed_vision|embed_audio"
        ),
    ),
    (Component.MTP, _part("mtp|mtp_[a-z0-9_]+|nextn|eh_proj|enorm|hnorm|shared_head")),
    (Component.HEAD, _part("lm_head") + r"|^head(?:\.|\Z)"),
    (
        Component.EMBEDDINGS,
        _part("embed_tokens|embed_tokens_per_layer|embeddings?|wte|wpe|tok_embeddings|word_embeddings|ngram_embedding"),
    ),
    # Norms, and what decides which expert works: small, never quantized, wherever they stand.
    (Component.OTHER, _part("[a-z0-9_]*norm[0-9]*|router|shared_expert_gate")),
    (Component.OTHER, _part(r"(?:mlp|feed_forward|ffn|block_sparse_moe|moe)\.gate")),
    (Component.SHARED_EXPERT, _part("shared_experts?|shared_mlp")),
    (Component.EXPERTS, _part("experts")),
    (Component.LINEAR_ATTENTION, _part("linear_attn|linear_attention|delta_net|gated_delta_net|mamba|ssm")),
    (Component.ATTENTION, _part("self_attn|self_attention|attn|attention|cross_attn")),
    (Component.MLP, _part("mlp|feed_forward|ffn|block_sparse_moe|moe")),
)
"""(component, regular expression) in order. The expressions see lower-case ASCII only; nothing is folded."""

_MATCHERS: Final = tuple((component, re.compile(pattern)) for component, pattern in COMPONENT_RULES)
_NUMBER: Final = re.compile(r"\.[0-9]+\.")
_LONGEST_CACHED: Final = 256


def component_of(name: str) -> Component:
    """Return the component of a module or tensor name: the first of ``COMPONENT_RULES`` found in it, else OTHER."""
    # Experts and layers differ in numbers only, which no rule looks at: a few hundred patterns for 90,000 names.
    return _cached(_NUMBER.sub(".N.", name)) if len(name) <= _LONGEST_CACHED else _first_rule(name)


def _first_rule(name: str) -> Component:
    return next((component for component, matcher in _MATCHERS if matcher.search(name)), Component.OTHER)


_cached = lru_cache(maxsize=4096)(_first_rule)
