"""The ``quantization_config`` of a quantized checkpoint (spec/config.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.bits import AverageBits, average_bits
from espalier_format.converters.espalier_block import block_as_json
from espalier_format.quantize.recipe import MAX_CANDIDATES, sorted_codebooks
from espalier_format.schema.config import ModuleSpec, Source
from espalier_format.schema.expert_bank import ASSIGNMENT_ALPHABET, PLAIN_EXPERT, ExpertBank, Projection, Rotation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from espalier_format.quantize.outcome import OutputModule

_EXPERT: Final = re.compile(r"(?P<bank>(?:.+\.)?experts)\.(?P<number>0|[1-9][0-9]{0,8})\.(?P<projection>[^.]+)")

_Experts = dict[int, "OutputModule | None"]


def quantization_block(
    modules: Mapping[str, OutputModule], plain: Mapping[str, tuple[int, ...]], ignore: Iterable[str], source: Source
) -> dict[str, object]:
    """Return the block as JSON; ``parse_quantization_config`` has still to check it.

    ``plain`` maps the names of all other tensors to their shapes. Experts ``<bank>.<e>.<projection>`` make a bank
    where all of them are there, quantized or plain, and have the same sizes and rotation; others are modules.
    """
    banks = _banks(modules, plain)
    banked = {
        f"{bank}.{number}.{projection}"
        for bank, entry in banks.items()
        for projection in entry.projections
        for number in range(entry.num_experts)
    }
    specs = {name: _spec(module) for name, module in modules.items() if name not in banked}
    return block_as_json(specs, banks, ignore, source)


def output_bits(modules: Mapping[str, OutputModule]) -> AverageBits:
    """Return ``bits`` and ``head_bits`` by the definition of spec/config.md §8, for an EXL3 output too."""
    return average_bits({name: _spec(module) for name, module in modules.items()}, {})


def _spec(module: OutputModule) -> ModuleSpec:
    return ModuleSpec(
        codebook=module.codebook.name,
        in_features=module.in_features,
        out_features=module.out_features,
        rotation=Rotation(in_=module.rotation[0], out=module.rotation[1]),  # type: ignore[arg-type]
        size_source=module.size_source,
    )


def _banks(modules: Mapping[str, OutputModule], plain: Mapping[str, tuple[int, ...]]) -> dict[str, ExpertBank]:
    found: dict[str, dict[str, _Experts]] = {}
    for name, module in modules.items():
        if match := _EXPERT.fullmatch(name):
            found.setdefault(match["bank"], {}).setdefault(match["projection"], {})[int(match["number"])] = module
    shapes: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for name, shape in plain.items():
        match = _EXPERT.fullmatch(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if match and match["projection"] in found.get(match["bank"], {}):
            found[match["bank"]][match["projection"]].setdefault(int(match["number"]), None)
            shapes.setdefault((match["bank"], match["projection"]), set()).add(shape)
    banks: dict[str, ExpertBank] = {}
    for bank, projections in found.items():
        count = 1 + max(number for experts in projections.values() for number in experts)
        entries = {
            name: _projection(experts, count)
            for name, experts in projections.items()
            if _is_uniform(experts, count, shapes.get((bank, name), set()))
        }
        if entries:
            banks[bank] = ExpertBank(num_experts=count, projections=entries)
    return banks


def _is_uniform(experts: _Experts, count: int, plain_shapes: set[tuple[int, ...]]) -> bool:
    if len(experts) != count:
        return False
    quantized = [module for module in experts.values() if module is not None]
    forms = {(module.in_features, module.out_features, module.rotation, module.size_source) for module in quantized}
    if len(forms) != 1 or len({module.codebook for module in quantized}) > MAX_CANDIDATES:
        return False
    in_features, out_features, _, _ = forms.pop()
    return plain_shapes <= {(out_features, in_features)}


def _projection(experts: _Experts, count: int) -> Projection:
    quantized = [module for module in experts.values() if module is not None]
    codebooks = sorted_codebooks(module.codebook for module in quantized)
    characters = dict(zip(codebooks, ASSIGNMENT_ALPHABET, strict=False))
    first = quantized[0]
    ordered = [experts[number] for number in range(count)]
    return Projection(
        in_features=first.in_features,
        out_features=first.out_features,
        rotation=Rotation(in_=first.rotation[0], out=first.rotation[1]),  # type: ignore[arg-type]
        size_source=first.size_source,
        codebooks=tuple(codebook.name for codebook in codebooks),
        assignment="".join(PLAIN_EXPERT if module is None else characters[module.codebook] for module in ordered),
    )
