"""The ``quantization_config`` block as an object of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from espalier_format.schema.config import QUANT_METHOD, QuantizationConfig, parse_quantization_config


class EspalierConfig(QuantizationConfigMixin):
    """The block of config.json, checked when it is made, so that nothing of a wrong one is ever loaded.

    ``block`` is the JSON object as it stands in config.json, ``parsed`` the same as a value object. Raises what
    `parse_quantization_config` raises: FormatVersionError, FeatureError, SchemaError, CodebookError, PathError.
    """

    # transformers compares it with its own names and formats it; it never needs to be one of them.
    quant_method: Any = QUANT_METHOD

    def __init__(self, **block: Any) -> None:
        block.setdefault("quant_method", QUANT_METHOD)
        self.block: dict[str, Any] = block
        self.parsed: QuantizationConfig = parse_quantization_config(block)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the object of a block; other arguments of a caller are not for it and are given back."""
        config = cls(**copy.deepcopy(dict(config_dict)))
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return the block, as a copy."""
        return copy.deepcopy(self.block)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Change nothing: a checkpoint is what it is. Returns ``kwargs``, all of them unused."""
        return kwargs
