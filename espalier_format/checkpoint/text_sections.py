"""Where config.json describes the language model: at its top level, or in a part of it (spec/espalier-v1.md §10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TEXT_PARTS: Final = ("text_config", "language_config", "llm_config")
"""Keys under which a model of several modalities keeps the config of its language model."""


def text_sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return every object that may describe the language model: the config itself, then its text parts.

    What is stored under such a key and is no object is left out.

    >>> text_sections({"model_type": "x", "llm_config": {"model_type": "y"}, "text_config": None})[1:]
    ({'model_type': 'y'},)
    """
    nested = (config.get(part) for part in TEXT_PARTS)
    return (config, *(section for section in nested if isinstance(section, Mapping)))


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that describes the language model: the first text part, the config itself if it has none.

    >>> text_section({"hidden_size": 8}), text_section({"language_config": {"hidden_size": 4}})
    ({'hidden_size': 8}, {'hidden_size': 4})
    """
    sections = text_sections(config)
    return sections[min(1, len(sections) - 1)]
