"""The files of a checkpoint folder by role: shards, index, config, manifest, and the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from espalier_format.checkpoint.missing_shards import refuse_missing_modules, refuse_missing_peer
from espalier_format.container.index import INDEX_NAME, Index, IndexDifference, IndexProblem
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import (
    IndexMismatchError,
    MalformedError,
    MissingFileError,
    PathError,
    SchemaError,
    SourceError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard

_SHOWN: Final = 3


def read_config(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return config.json, or None where there is none; errors as ``CheckpointFolder.read_json_object``."""
    return folder.read_json_object(CONFIG_NAME) if folder.has(CONFIG_NAME) else None


def other_files(folder: CheckpointFolder, shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return the names of all files that are no shard, index, config.json, manifest or its signature, sorted."""
    known = {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, *(shard.name for shard in shards)}
    return tuple(name for name in folder.files() if name not in known)


def read_index(folder: CheckpointFolder) -> Index:
    """Return the index of an Espalier checkpoint, which must be there and of the form of ``spec/espalier-v1.md`` §4.3.

    Raises:
        MissingFileError: there is no index.
        PathError, SchemaError, MalformedError, LimitError: the index itself is refused.
    """
    path = folder.root / INDEX_NAME
    index = Index.read(folder)
    if index is None:
        raise MissingFileError("an Espalier checkpoint needs its index", path=path)
    if type(index.metadata.get("total_size", 0)) is not int:
        raise SchemaError("metadata.total_size must be an integer", path=path)
    nested = next((name for name in index.weight_map.values() if "/" in name), None)
    if nested is not None:
        raise PathError(f"the shard {nested[:200]!a} is not directly in the checkpoint folder", path=path)
    return index


def compare_index(index: Index, folder: CheckpointFolder, shards: Sequence[Shard]) -> None:
    """Check that an index agrees exactly with the shard headers.

    Raises:
        IndexMismatchError: it names other tensors or shards than there are, or another total size.
    """
    path = folder.root / INDEX_NAME
    differences = _differences(index, shards)
    if differences:
        first = differences[0]
        if first.problem is IndexProblem.SHARD_MISSING:
            listed = set(index.weight_map.values())
            present = len(listed.intersection(shard.name for shard in shards))
            detail = f"{first.description} ({present:,} of {len(listed):,} shards); is the download complete?"
            raise IndexMismatchError(detail, path=path)
        count = len(differences) - 1
        more = f" (and {count:,} more difference{'s' if count > 1 else ''})" if count else ""
        raise IndexMismatchError(f"{first.description}{more}", path=path, tensor=first.tensor)
    stray = {shard.name for shard in shards} - set(index.weight_map.values())
    if stray:
        raise IndexMismatchError(f"the index does not name the shard {min(stray)}", path=path)


class ShardCheck(NamedTuple):
    """Warnings about a stale index, and the tensors that it names and no shard holds, in its order."""

    warnings: tuple[str, ...]
    missing: tuple[str, ...] = ()


def check_shards(
    folder: CheckpointFolder, shards: Sequence[Shard], tensors: Collection[str], *, quantized: bool
) -> ShardCheck:
    """Check that no shard is missing, for formats where the headers win.

    ``tensors`` are the names of all tensors of ``shards``. With ``quantized`` every trellis of the index must be
    among them. An index that agrees with the headers shows that they are all, whatever the numbers in their names.

    Raises:
        MissingFileError: a shard is missing, by its numbered peers or by the index.
        PathError: the index names a file outside the folder.
        LimitError: the index exceeds a limit.
    """
    names = {shard.name: None for shard in shards}
    try:
        index = Index.read(folder)
    except (MalformedError, SchemaError) as error:
        refuse_missing_peer(names, None, folder.root)
        return ShardCheck((f"{error}; the shard headers are used",))
    if index is None:
        refuse_missing_peer(names, None, folder.root)
        return ShardCheck(())
    differences = _differences(index, shards)
    if any(not difference.informational for difference in differences):
        refuse_missing_peer(names, index, folder.root)
        if quantized:
            refuse_missing_modules(index, names, tensors, folder.root)
    if not differences:
        return ShardCheck(())
    missing = tuple(name for name in index.weight_map if name not in tensors)
    more = f" and {len(differences) - _SHOWN} more differences" if len(differences) > _SHOWN else ""
    shown = "; ".join(str(difference) for difference in differences[:_SHOWN])
    return ShardCheck((f"{shown}{more}; the shard headers are used",), missing)


def _differences(index: Index, shards: Sequence[Shard]) -> list[IndexDifference]:
    right: dict[str, str] = {}
    for shard in shards:
        right.update(dict.fromkeys(shard.header.tensors, shard.name))
    # A header that was accepted leaves no holes in the data section.
    total = sum(shard.header.file_size - shard.header.data_start for shard in shards)
    if index.weight_map == right and index.metadata.get("total_size", total) == total:
        return []  # the usual case, ten times as fast as finding out what differs
    return index.compare({shard.name: shard.header for shard in shards})


def refuse_single_file(checkpoint: Checkpoint) -> None:
    """Raise SourceError for what was opened as one file of a folder: what is beside it belongs to the checkpoint."""
    # A lone file is opened without the config beside it.
    without_config = not checkpoint.config and bool(read_config(checkpoint.folder))
    if without_config or [shard.name for shard in checkpoint.shards] != checkpoint.folder.shard_names():
        raise SourceError("a single file is no checkpoint; give the folder", path=checkpoint.shards[0].path)


def refuse_missing_tensors(checkpoint: Checkpoint) -> None:
    """Raise IndexMismatchError if the index names a tensor that no shard holds: something would be left out."""
    missing = checkpoint.missing
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        message = f"the index names this tensor{more}, but no shard holds it; is the download complete?"
        message += " An index that is out of date can be deleted"
        raise IndexMismatchError(message, path=checkpoint.folder.root / INDEX_NAME, tensor=missing[0])
