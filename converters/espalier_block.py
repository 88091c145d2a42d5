"""Build the ``quantization_config`` of an Espalier checkpoint from the modules of an EXL3 one (spec/exl3.md §5)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.bits import average_bits
from espalier_format.codec.codebook import get_codebook
from espalier_format.converters.output import this_producer
from espalier_format.schema.base import DOTTED_NAME
from espalier_format.schema.config import FORMAT_VERSION, QUANT_METHOD, CodebookConstants, ModuleSpec, Source
from espalier_format.schema.expert_bank import ASSIGNMENT_ALPHABET, PLAIN_EXPERT, ExpertBank, Projection, Rotation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from espalier_format.checkpoint.base import Checkpoint, ExpertBankView
    from espalier_format.codec.codebook import Codebook
    from espalier_format.converters.exl3_modules import ImportedModule

_ROTATION: Final = Rotation(in_=128, out=128)

_NAMED: Final = re.compile(DOTTED_NAME.replace("$", r"\Z"))
_EMBEDDING: Final = re.compile(r"(?:[a-z0-9]+_)*embed(?:ding)?s?(?:_tokens(?:_.*)?)?|wte|wpe")
"""Last part of the name of a module with a matrix that is looked up, not multiplied with."""


def espalier_block(
    modules: Mapping[str, ImportedModule],
    banks: Mapping[str, ExpertBankView],
    ignore: Sequence[str],
    source: Source,
) -> dict[str, object]:
    """Return the block as JSON; ``parse_quantization_config`` has still to check it.

    ``banks`` are the candidates: a projection whose experts have got different sizes is left out, and its
    experts are listed as modules.
    """
    expert_banks: dict[str, ExpertBank] = {}
    banked: set[str] = set()
    for bank in banks.values():
        projections: dict[str, Projection] = {}
        for name, experts in bank.projections.items():
            projection = _projection(experts, modules)
            if projection is not None:
                projections[name] = projection
                banked.update(expert for expert in experts if expert is not None)
        if projections:
            expert_banks[bank.name] = ExpertBank(num_experts=bank.num_experts, projections=projections)
    specs = {
        name: ModuleSpec(
            codebook=imported.module.codebook.name,
            in_features=imported.in_features,
            out_features=imported.out_features,
            rotation=_ROTATION,
            size_source=imported.size_source,
        )
        for name, imported in modules.items()
        if name not in banked
    }
    return block_as_json(specs, expert_banks, ignore, source)


def block_as_json(
    specs: Mapping[str, ModuleSpec], expert_banks: Mapping[str, ExpertBank], ignore: Iterable[str], source: Source
) -> dict[str, object]:
    """Return the block of these modules and banks, with their average widths and the constants of their codebooks."""
    average = average_bits(specs, expert_banks)
    names = {spec.codebook for spec in specs.values()}
    for bank in expert_banks.values():
        for projection in bank.projections.values():
            names.update(projection.codebooks)
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "required_features": [],
        "producer": this_producer().to_json(),
        "bits": average.bits,
        "head_bits": average.head_bits,
        "codebooks": {codebook.name: _constants(codebook).to_json() for codebook in _sorted(map(get_codebook, names))},
        "modules": {name: spec.to_json() for name, spec in specs.items()},
        "expert_banks": {name: bank.to_json() for name, bank in expert_banks.items()},
        "ignore": sorted(ignore),
        "source": source.to_json(),
    }


def plain_linear_modules(checkpoint: Checkpoint) -> list[str]:
    """Return the sorted names of modules that are plain matrices: rank-2 ``.weight`` tensors, without embeddings."""
    found = []
    for tensor in checkpoint.plain:
        name, _, kind = tensor.rpartition(".")
        is_matrix = kind == "weight" and len(checkpoint.tensors[tensor].shape) == 2
        if is_matrix and _NAMED.match(name) and name not in checkpoint.modules and not is_embedding_name(name):
            found.append(name)
    return sorted(found)


def is_embedding_name(module: str) -> bool:
    """Tell by the last part of its name whether a module's matrix is looked up, not multiplied with."""
    return _EMBEDDING.fullmatch(module.rpartition(".")[2]) is not None


def _projection(experts: Sequence[str | None], modules: Mapping[str, ImportedModule]) -> Projection | None:
    quantized = [modules[name] for name in experts if name is not None]
    sizes = {(module.in_features, module.out_features, module.size_source) for module in quantized}
    if len(sizes) != 1:
        return None
    in_features, out_features, size_source = sizes.pop()
    # A plain expert has the sizes that the quantized ones had before a bias made them keep their padding.
    before = quantized[0].module
    if None in experts and (in_features, out_features) != (before.in_features, before.out_features):
        return None
    names = [codebook.name for codebook in _sorted({module.module.codebook for module in quantized})]
    assignment = "".join(
        PLAIN_EXPERT if name is None else ASSIGNMENT_ALPHABET[names.index(modules[name].module.codebook.name)]
        for name in experts
    )
    return Projection(
        in_features=in_features,
        out_features=out_features,
        rotation=_ROTATION,
        size_source=size_source,
        codebooks=tuple(names),
        assignment=assignment,
    )


def _sorted(codebooks: Iterable[Codebook]) -> list[Codebook]:
    return sorted(codebooks, key=lambda codebook: (codebook.half_steps, codebook.name))


def _constants(codebook: Codebook) -> CodebookConstants:
    return CodebookConstants(
        multiplier=codebook.multiplier_hex,
        addend=f"0x{codebook.addend:08X}" if codebook.addend else None,
        sha256=codebook.sha256,
    )
