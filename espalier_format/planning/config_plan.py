"""``plan``: from config.json to what a runtime allocates, without a tensor or a header read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from espalier_format.codec.codebook import get_codebook
from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.names import CONFIG_NAME
from espalier_format.errors import SchemaError, UsageError
from espalier_format.planning.bank import PlannedBank, PlannedProjection
from espalier_format.planning.module import PlannedModule, TensorSpec
from espalier_format.planning.rank import Parallelism, RankPlan, plan_rank, usual_parallelism
from espalier_format.read_only import ReadOnlyDict
from espalier_format.schema.config import QuantizationConfig, parse_quantization_config
from espalier_format.schema.expert_bank import Projection

_BLOCK: Final = "quantization_config"


@dataclass(frozen=True, slots=True)
class Plan:
    """All quantized modules of a checkpoint.

    ``modules`` has them by name: first those that stand alone, then the experts, bank by bank. ``banks`` has the
    experts once more, by layer and projection. ``ignore`` names modules that are plain though one might expect them
    quantized.

    Plain tensors, biases and the weights of plain experts are not in a config, and not in ``nbytes``: their dtypes
    and sizes stand in the headers of the shards, which `open_checkpoint` reads.
    """

    modules: Mapping[str, PlannedModule]
    banks: Mapping[str, PlannedBank]
    ignore: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized modules."""
        return sum(module.nbytes for module in self.modules.values())

    @property
    def weights(self) -> int:
        """Number of quantized weights, without padding."""
        return sum(module.weights for module in self.modules.values())

    @property
    def codebooks(self) -> tuple[str, ...]:
        """Names of the codebooks that occur, sorted: the decoders that a runtime needs."""
        return tuple(sorted({module.codebook.name for module in self.modules.values()}))

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of all quantized modules."""
        for module in self.modules.values():
            yield from module.tensors

    def rank(self, rank: int, world: int, parallelism: Callable[[str], Parallelism] = usual_parallelism) -> RankPlan:
        """Return what one of ``world`` ranks holds under tensor parallelism.

        ``parallelism`` tells of each module name whether its outputs ("column") or its inputs ("row") are split, or
        neither ("replicated").

        Raises:
            UsageError: there is no such rank, ``parallelism`` returns something else, or a module cannot be split so:
            it is named, with the reason.
        """
        return plan_rank(self.modules, rank, world, parallelism)


def plan(config: str | Path | Mapping[str, Any] | QuantizationConfig) -> Plan:
    """Plan what to allocate for an Espalier checkpoint; nothing but config.json is read.

    ``config`` is the folder of a checkpoint, its parsed config.json, the ``quantization_config`` of it, or that as
    `parse_quantization_config` returns it. Sizes are those that the headers must have: a checkpoint that differs is
    refused by `open_checkpoint`.

    Raises:
        UsageError: ``config`` is none of these.
        SourceError: the config is not that of an Espalier checkpoint.
        MissingFileError: the folder has no config.json.
        FormatVersionError, FeatureError, SchemaError, CodebookError, PathError, MalformedError, LimitError: the config
            is refused.

    >>> codebook = get_codebook("int5@3")
    >>> sizes = {"in_features": 2048, "out_features": 500, "rotation": {"in": 128, "out": 32}, "size_source": "exact"}
    >>> block = {
    ...     "quant_method": "espalier", "format_version": 1, "required_features": [],
    ...     "producer": {"name": "example", "version": "1"}, "bits": 0, "head_bits": 3.072,
    ...     "codebooks": {"int5@3": {"multiplier": codebook.multiplier_hex, "sha256": codebook.sha256}},
    ...     "modules": {"lm_head": {"codebook": "int5@3", **sizes}}, "expert_banks": {}, "ignore": [],
    ... }
    >>> made = plan({"model_type": "llama", "quantization_config": block})
    >>> made.modules["lm_head"].trellis
    TensorSpec(name='lm_head.esp_trellis', dtype='I16', shape=(128, 32, 48))
    >>> made.nbytes
    398336
    """
    checked = _checked(config)
    modules = {
        name: PlannedModule(
            name,
            get_codebook(spec.codebook),
            in_features=spec.in_features,
            out_features=spec.out_features,
            rotation_in=spec.rotation.in_,
            rotation_out=spec.rotation.out,
            size_source=spec.size_source,
        )
        for name, spec in checked.modules.items()
    }
    banks: dict[str, PlannedBank] = {}
    for name, bank in checked.expert_banks.items():
        projections = {projection: _projection(name, projection, spec) for projection, spec in bank.projections.items()}
        banks[name] = PlannedBank(name, bank.num_experts, ReadOnlyDict(projections))
        for planned in projections.values():
            modules.update((expert.name, expert) for expert in planned.experts if expert is not None)
    return Plan(ReadOnlyDict(modules), ReadOnlyDict(banks), checked.ignore)


def _projection(bank: str, name: str, spec: Projection) -> PlannedProjection:
    codebooks = {codebook: get_codebook(codebook) for codebook in spec.codebooks}
    sizes = {
        "in_features": spec.in_features,
        "out_features": spec.out_features,
        "rotation_in": spec.rotation.in_,
        "rotation_out": spec.rotation.out,
    }
    experts = tuple(
        None
        if codebook is None
        else PlannedModule(f"{bank}.{number}.{name}", codebooks[codebook], **sizes, size_source=spec.size_source)
        for number, codebook in enumerate(spec.expert_codebooks())
    )
    return PlannedProjection(name, **sizes, experts=experts)


def _check_path(config: object) -> None:
    if not isinstance(config, str | os.PathLike) or isinstance(os.fspath(config), bytes):
        text = "plan takes the folder of a checkpoint, or a config as an object"
        raise UsageError(text, expected="str, Path or a mapping", got=type(config).__name__)


def _checked(config: str | Path | Mapping[str, Any] | QuantizationConfig) -> QuantizationConfig:
    if isinstance(config, QuantizationConfig):
        return config
    path: Path | None = None
    if not isinstance(config, Mapping):
        _check_path(config)
        folder = CheckpointFolder(Path(config))
        path = folder.root / CONFIG_NAME
        config = folder.read_json_object(CONFIG_NAME)
    block = config if "quant_method" in config else config.get(_BLOCK)
    if block is None:
        raise SchemaError(f"there is no {_BLOCK}", path=path)
    return parse_quantization_config(block, path)
