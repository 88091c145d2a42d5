"""Names of modules: as the checkpoint has them, and as vLLM's model has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

_TENSOR: Final = ".esp_trellis"
_EXPERT_TENSOR: Final = ".0.esp_trellis"


class NameMapper(Protocol):
    """The part of vLLM's WeightsMapper that is used: it renames the keys of a dict and may leave keys out."""

    def apply_dict(self, values: dict[str, str]) -> Mapping[str, str]:
        """Return the values under the new names."""


class LayerNames:
    """Finds the module of the checkpoint that a layer of vLLM's model is made of.

    ``modules`` and ``banks`` are the names in the checkpoint. A model's mappers rename tensors and are applied with
    `rename`, one after the other, as vLLM builds a model within a model.
    """

    def __init__(self, modules: Iterable[str], banks: Iterable[str]) -> None:
        self._modules = {name: name for name in modules}
        self._banks = {name: name for name in banks}

    def rename(self, mapper: NameMapper) -> None:
        """Apply a mapper to all names. It sees names of tensors, since it may look at what stands after the module."""
        self._modules = _renamed(self._modules, mapper, _TENSOR)
        self._banks = _renamed(self._banks, mapper, _EXPERT_TENSOR)

    def module(self, layer: str) -> str | None:
        """Return the quantized module of that name in vLLM's model, by its name in the checkpoint."""
        return self._modules.get(layer)

    def bank(self, layer: str) -> str | None:
        """Return the expert bank of that name in vLLM's model, by its name in the checkpoint."""
        return self._banks.get(layer) or self._banks.get(layer.removesuffix(".routed_experts"))

    def within(self, layer: str) -> str | None:
        """Return a quantized module whose name begins with that of the layer, or None."""
        return next((name for key, name in self._modules.items() if key.startswith(f"{layer}.")), None)


def constituents(layer: str, packed: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the names of the layers that vLLM has merged into one, in order; the layer itself if it is not merged.

    ``packed`` is a model's ``packed_modules_mapping``, such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    parent, dot, last = layer.rpartition(".")
    return tuple(f"{parent}{dot}{part}" for part in packed.get(last, (last,)))


def _renamed(names: Mapping[str, str], mapper: NameMapper, tensor: str) -> dict[str, str]:
    renamed = mapper.apply_dict({f"{name}{tensor}": original for name, original in names.items()})
    return {name.removesuffix(tensor): original for name, original in renamed.items()}
