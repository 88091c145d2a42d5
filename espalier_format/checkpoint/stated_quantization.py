"""Where config.json says how the weights are quantized: several places, of which the first that says it counts.

transformers reads the top level alone; vLLM and compressed-tensors itself look on in the part that describes the
language model, and then under the name that compressed-tensors wrote up to release 0.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from espalier_format.checkpoint.text_sections import TEXT_PARTS, text_sections

BLOCK: Final = "quantization_config"
OLD_BLOCK: Final = "compression_config"
"""The key under which compressed-tensors up to 0.6 wrote what is called ``quantization_config`` since."""


class StatedQuantization(NamedTuple):
    """What config.json says: ``place`` is the dotted key, for messages."""

    place: str
    block: Mapping[str, Any]

    @property
    def method(self) -> object:
        """``quant_method``, whatever stands there; None where it is not stated."""
        return self.block.get("quant_method")


def stated_quantization(config: Mapping[str, Any] | None) -> StatedQuantization | None:
    """Return the object that counts, in the order in which loaders look; None where there is none.

    What is stored in one of the places and is no object is passed over.

    >>> stated_quantization({"text_config": {"quantization_config": {"bits": 4}}}).place
    'text_config.quantization_config'
    """
    if config is None:
        return None
    for place, owner, key in _places(config):
        block = owner.get(key)
        if isinstance(block, Mapping):
            return StatedQuantization(place, block)
    return None


def drop_stated_quantization(config: dict[str, Any], *, keep_top: bool = False) -> None:
    """Remove all of them in place, also those that do not count: they are about weights that are not there any more.

    With ``keep_top`` the ``quantization_config`` at the top level stays: that of the weights that are there instead.
    """
    for section in text_sections(config):
        if isinstance(section, dict):
            if not (keep_top and section is config):
                section.pop(BLOCK, None)
            section.pop(OLD_BLOCK, None)


def _places(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str]]:
    parts = ((part, config.get(part)) for part in TEXT_PARTS)
    nested = [(f"{part}.{BLOCK}", owner, BLOCK) for part, owner in parts if isinstance(owner, Mapping)]
    return [(BLOCK, config, BLOCK), *nested, (OLD_BLOCK, config, OLD_BLOCK)]
