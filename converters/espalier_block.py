"""Build the ``quantization_config`` of an Espalier checkpoint from its modules (spec/config.md, spec/exl3.md §5)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from espalier_format.checkpoint.bits import AverageBits, average_bits
from espalier_format.checkpoint.derived_banks import BankMember, derive_banks
from espalier_format.codec.codebook import get_codebook
from espalier_format.converters.output import this_producer
from espalier_format.errors import SchemaError
from espalier_format.schema.base import is_dotted_name
from espalier_format.schema.config import (
    FORMAT_VERSION,
    QUANT_METHOD,
    CodebookConstants,
    ModuleSpec,
    Source,
    parse_quantization_config,
)
from espalier_format.schema.expert_bank import ASSIGNMENT_ALPHABET, PLAIN_EXPERT, ExpertBank, Projection, Rotation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.codec.codebook import Codebook

_EMBEDDING: Final = re.compile(r"(?:[a-z0-9]+_)*embed(?:ding)?s?(?:_tokens(?:_.*)?)?|wte|wpe")
"""Last part of the name of a module with a matrix that is looked up, not multiplied with."""


@dataclass(frozen=True, slots=True)
class OutputModule:
    """What config.json says about a quantized module of the output."""

    name: str
    codebook: Codebook
    in_features: int
    out_features: int
    rotation: tuple[int, int]
    size_source: Literal["exact", "padded"] = "exact"


def espalier_block(
    modules: Mapping[str, OutputModule],
    plain_shapes: Mapping[str, tuple[int, ...]],
    ignore: Iterable[str],
    source: Source,
) -> dict[str, object]:
    """Return the block as JSON; `check_block` has still to check it.

    ``plain_shapes`` maps the names of the tensors that belong to no module to their shapes. Experts that
    `derive_banks` puts into a bank are listed there, all others as modules.
    """
    members = {
        name: BankMember(
            module.codebook, module.in_features, module.out_features, (module.rotation, module.size_source)
        )
        for name, module in modules.items()
    }
    banks = {
        bank.name: ExpertBank(
            num_experts=bank.num_experts,
            projections={name: _projection(experts, modules) for name, experts in bank.projections.items()},
        )
        for bank in derive_banks(members, plain_shapes).values()
    }
    banked = {
        f"{name}.{expert}.{projection}"
        for name, bank in banks.items()
        for projection in bank.projections
        for expert in range(bank.num_experts)
    }
    specs = {name: _spec(module) for name, module in modules.items() if name not in banked}
    return _block_as_json(specs, banks, ignore, source)


def check_block(block: Mapping[str, object]) -> None:
    """Check a block that this program made, as a reader will; RuntimeError for one that is wrong by our own fault.

    Raises:
        LimitError: it calls for more tensors than a checkpoint may have.
    """
    try:
        parse_quantization_config(block)
    except SchemaError as error:
        raise RuntimeError(error.message) from error


def check_module_names(modules: Iterable[str], source: Checkpoint) -> None:
    """Raise SchemaError for a quantized module of the source that a config cannot name (spec/config.md §2)."""
    for name in modules:
        if not is_dotted_name(name):
            stored = source.modules.get(name)
            path = source.folder.root if stored is None else stored.trellis.shard.path
            raise SchemaError("a config cannot hold the name of this module", path=path, tensor=name)


def output_bits(modules: Mapping[str, OutputModule]) -> AverageBits:
    """Return ``bits`` and ``head_bits`` by the definition of spec/config.md §8, for an EXL3 output too."""
    return average_bits({name: _spec(module) for name, module in modules.items()}, {})


def _spec(module: OutputModule) -> ModuleSpec:
    return ModuleSpec(
        codebook=module.codebook.name,
        in_features=module.in_features,
        out_features=module.out_features,
        rotation=Rotation.of(*module.rotation),
        size_source=module.size_source,
    )


def _block_as_json(
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
        if is_matrix and is_dotted_name(name) and name not in checkpoint.modules and not is_embedding_name(name):
            found.append(name)
    return sorted(found)


def is_embedding_name(module: str) -> bool:
    """Tell by the last part of its name whether a module's matrix is looked up, not multiplied with."""
    return _EMBEDDING.fullmatch(module.rpartition(".")[2]) is not None


def _projection(experts: Sequence[str | None], modules: Mapping[str, OutputModule]) -> Projection:
    quantized = [modules[name] for name in experts if name is not None]
    names = [codebook.name for codebook in _sorted({module.codebook for module in quantized})]
    assignment = "".join(
        PLAIN_EXPERT if name is None else ASSIGNMENT_ALPHABET[names.index(modules[name].codebook.name)]
        for name in experts
    )
    first = quantized[0]
    return Projection(
        in_features=first.in_features,
        out_features=first.out_features,
        rotation=Rotation.of(*first.rotation),
        size_source=first.size_source,
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
