"""Modules of a compressed-tensors checkpoint summed by what ``inspect`` tells apart: component, bits and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from espalier_format.checkpoint.components import Component
    from espalier_format.checkpoint.packed_module import PackedModule


def packed_groups(
    modules: Iterable[PackedModule],
) -> Iterator[tuple[Component, str, int, tuple[int, int, int, int, int, int]]]:
    """Yield (component, label, bits, numbers) per module, the numbers in the order of ``ModuleGroup.numbers``.

    The label is "int4 g128" for example. Scales, zero points, orders and shapes count as scales.
    """
    for module in modules:
        beside = (*module.parameters, *module.activations)
        parameters = sum([tensor.info.end - tensor.info.start for tensor in beside])
        numbers = (1, 1 + len(beside), module.weights, module.weight.nbytes, parameters, 0)
        yield module.component, module.scheme.label, module.scheme.bits, numbers
