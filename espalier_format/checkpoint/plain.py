"""Open a folder, or a file, of safetensors that are not quantized in a way this library reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from espalier_format.checkpoint.base import Checkpoint
from espalier_format.checkpoint.files import ShardCheck, check_shards, other_files
from espalier_format.checkpoint.quantized_tensors import quantized_tensor
from espalier_format.checkpoint.stated_quantization import stated_quantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.tensors import TensorTable
    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard


def open_plain(
    folder: CheckpointFolder, config: Mapping[str, Any], shards: tuple[Shard, ...], table: TensorTable, *, lone: bool
) -> Checkpoint:
    """Return a checkpoint without quantized modules; all tensors are ``plain``.

    Raises:
        DuplicateTensorError: two shards hold different tensors of one name.
        MissingFileError: a shard is missing, by its numbered peers.
        PathError, LimitError: of the index.
    """
    duplicates = table.check_duplicates()
    listed = ShardCheck(()) if lone else check_shards(folder, shards, table.infos, quantized=False)
    warnings = [*duplicates, *listed.warnings]
    tensors = table.refs()
    stated = stated_quantization(config)
    found = None if stated is not None else quantized_tensor(tensors)
    if stated is not None:
        method = "no quant_method" if stated.method is None else f"quant_method {str(stated.method)[:40]!r}"
        text = f"{stated.place} states {method}, which is not read; the tensors are listed as they are stored"
        warnings.append(text)
    if found is not None:
        text = f"{found.weight} is quantized, to judge by {found.scales}, in a way that is not read"
        warnings.append(f"{text}; the tensors are listed as they are stored")
    return Checkpoint(
        folder=folder,
        format="plain",
        config=config,
        quantization=None,
        shards=shards,
        tensors=tensors,
        modules={},
        expert_banks={},
        plain=tensors,
        other_files=() if lone else other_files(folder, shards),
        warnings=tuple(warnings),
        missing=listed.missing,
    )
