"""Open a compressed-tensors checkpoint: a source to read, no part of the format (README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from espalier_format.checkpoint.base import Checkpoint
from espalier_format.checkpoint.derived_banks import BankMember, derive_banks
from espalier_format.checkpoint.files import check_shards, other_files
from espalier_format.container.names import CONFIG_NAME
from espalier_format.converters.compressed_tensors_modules import find_modules, plain_names
from espalier_format.converters.compressed_tensors_schemes import is_compressed_tensors, read_schemes
from espalier_format.errors import MissingFileError, SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.tensors import TensorTable
    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard


def open_compressed_tensors(
    folder: CheckpointFolder, config: Mapping[str, Any], shards: tuple[Shard, ...], table: TensorTable
) -> Checkpoint:
    """Check the config and the tensors of each module, and return the checkpoint; its modules are ``packed``.

    Nothing is read but headers and, of modules with one scale per row, their ``weight_shape``; values are checked when
    they are decoded.

    Raises:
        SchemaError, SourceError, LimitError: the config is not what compressed-tensors writes, or says something that
            is not read, which is named.
        SourceError, MissingTensorError, UnexpectedTensorError, DtypeError, ShapeError: the tensors of a module do not
            fit together or to the config, or could be decoded in two ways.
        DuplicateTensorError: two shards hold different tensors of one name.
        MissingFileError: a shard is missing, by its numbered peers, or there is no config.json.
    """
    path = folder.root / CONFIG_NAME
    if not is_compressed_tensors(config):
        message = 'packed weights, but no quantization_config of quant_method "compressed-tensors" to read them by'
        raise SourceError(message, path=path) if config else MissingFileError(message, path=path)
    duplicates = table.check_duplicates()
    listed = check_shards(folder, shards, table.infos, quantized=False)
    schemes = read_schemes(config, path)
    modules = find_modules(table, schemes)
    plain = tuple(plain_names(table, modules))
    banks = derive_banks(
        {
            name: BankMember(module.scheme, module.in_features, module.out_features, module.size_source)
            for name, module in modules.items()
        },
        {name: table.infos[name].shape for name in plain},
    )
    return Checkpoint(
        folder=folder,
        format="compressed-tensors",
        config=config,
        quantization=None,
        shards=shards,
        tensors=table.refs(),
        modules={},
        expert_banks=banks,
        plain=table.refs(plain),
        other_files=other_files(folder, shards),
        warnings=(*duplicates, *listed.warnings, *schemes.warnings),
        packed=modules,
        missing=listed.missing,
    )
