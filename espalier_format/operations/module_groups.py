"""Quantized modules summed by what ``inspect`` tells apart: component and codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier_format.checkpoint.components import component_of
from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from espalier_format.checkpoint.components import Component
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.codec.codebook import Codebook
    from espalier_format.schema.config import ModuleSpec, QuantizationConfig
    from espalier_format.schema.expert_bank import Projection


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Some quantized modules of one component and codebook; sizes in bytes, without biases."""

    component: Component
    codebook: Codebook
    modules: int
    tensors: int
    weights: int
    trellis_bytes: int
    scale_bytes: int
    marker_bytes: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """All counts, in the order of the fields: what is added up."""
        return (
            self.modules,
            self.tensors,
            self.weights,
            self.trellis_bytes,
            self.scale_bytes,
            self.marker_bytes,
        )


def groups_of_modules(modules: Iterable[QuantizedModule]) -> Iterator[ModuleGroup]:
    """Yield a group for each module, from its tensors."""
    for module in modules:
        marker = module.marker
        yield ModuleGroup(
            component=module.component,
            codebook=module.codebook,
            modules=1,
            tensors=3 if marker is None else 4,
            weights=module.weights,
            trellis_bytes=module.trellis_bytes,
            scale_bytes=module.scale_bytes,
            marker_bytes=0 if marker is None else marker.nbytes,
        )


def groups_of_config(quantization: QuantizationConfig) -> Iterator[ModuleGroup]:
    """Yield the groups of an Espalier checkpoint from its config, without looking at a tensor.

    Opening has checked that every tensor has exactly the shape that follows from the config, so the sums are those
    of ``groups_of_modules``; with 30,000 experts this is what keeps ``inspect`` fast.
    """
    for name, module in quantization.modules.items():
        yield _group(component_of(name), module, module.codebook, 1)
    for bank_name, bank in quantization.expert_banks.items():
        for projection_name, projection in bank.projections.items():
            # The number of an expert does not change its component, so expert 0 stands for all.
            component = component_of(f"{bank_name}.0.{projection_name}")
            for codebook, experts in projection.experts_per_codebook().items():
                yield _group(component, projection, codebook, experts)


def _group(component: Component, sizes: ModuleSpec | Projection, codebook_name: str, modules: int) -> ModuleGroup:
    codebook = get_codebook(codebook_name)
    rows = padded(sizes.in_features, sizes.rotation.in_)
    columns = padded(sizes.out_features, sizes.rotation.out)
    return ModuleGroup(
        component=component,
        codebook=codebook,
        modules=modules,
        tensors=3 * modules,
        weights=modules * sizes.in_features * sizes.out_features,
        trellis_bytes=modules * rows * columns * codebook.half_steps // 16,
        scale_bytes=modules * 2 * (rows + columns),
        marker_bytes=0,
    )
