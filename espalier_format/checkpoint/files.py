"""The files of a checkpoint folder by role: shards, index, config, manifest, and the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from espalier_format.container.index import INDEX_NAME, Index, IndexDifference
from espalier_format.container.json_document import read_json_object
from espalier_format.container.shard import Shard
from espalier_format.errors import IndexMismatchError, MalformedError, MissingFileError, PathError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from espalier_format.container.folder import CheckpointFolder

CONFIG_NAME: Final = "config.json"
MANIFEST_NAME: Final = "espalier_manifest.json"

_SHOWN: Final = 3


def read_config(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return config.json, or None where there is none; errors as ``read_json_object`` and ``resolve``."""
    return read_json_object(folder.resolve(CONFIG_NAME)) if folder.has(CONFIG_NAME) else None


def open_shards(folder: CheckpointFolder) -> tuple[Shard, ...]:
    """Open all ``*.safetensors`` of the top level, in name order; none stays open when one is refused."""
    opened: list[Shard] = []
    try:
        for name in folder.shard_names():
            opened.append(Shard(folder.resolve(name), name=name))  # noqa: PERF401 - those opened must be known on error
    except BaseException:
        for shard in opened:
            shard.close()
        raise
    return tuple(opened)


def other_files(folder: CheckpointFolder, shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return the names of all files that are no shard, index, config.json or manifest, sorted."""
    known = {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, *(shard.name for shard in shards)}
    return tuple(name for name in folder.files() if name not in known)


def check_index(folder: CheckpointFolder, shards: Sequence[Shard]) -> None:
    """Check that an index is there and agrees exactly with the shard headers.

    Raises:
        MissingFileError: there is no index.
        IndexMismatchError: it names other tensors or shards than there are, or another total size.
        PathError, SchemaError, MalformedError, LimitError: the index itself is refused.
    """
    path = folder.root / INDEX_NAME
    index = Index.read(folder)
    if index is None:
        raise MissingFileError("an Espalier checkpoint needs its index", path=path)
    nested = next((name for name in index.weight_map.values() if "/" in name), None)
    if nested is not None:
        raise PathError(f"the shard {nested[:200]!a} is not directly in the checkpoint folder", path=path)
    differences = _differences(index, shards)
    if differences:
        count = len(differences) - 1
        more = f" (and {count} more difference{'s' if count > 1 else ''})" if count else ""
        raise IndexMismatchError(f"{differences[0]}{more}", path=path, tensor=differences[0].tensor)
    stray = {shard.name for shard in shards} - set(index.weight_map.values())
    if stray:
        raise IndexMismatchError(f"the index does not name the shard {min(stray)}", path=path)


def index_warnings(folder: CheckpointFolder, shards: Sequence[Shard]) -> tuple[str, ...]:
    """Compare the index, if there is one, with the shard headers, for formats where the headers win.

    Raises:
        PathError: the index names a file outside the folder.
        LimitError: the index exceeds a limit.
    """
    try:
        index = Index.read(folder)
    except (MalformedError, SchemaError) as error:
        return (f"{error}; the shard headers are used",)
    if index is None:
        return ()
    differences = _differences(index, shards)
    if not differences:
        return ()
    more = f" and {len(differences) - _SHOWN} more differences" if len(differences) > _SHOWN else ""
    shown = "; ".join(str(difference) for difference in differences[:_SHOWN])
    return (f"{shown}{more}; the shard headers are used",)


def _differences(index: Index, shards: Sequence[Shard]) -> list[IndexDifference]:
    right: dict[str, str] = {}
    for shard in shards:
        right.update(dict.fromkeys(shard.header.tensors, shard.name))
    # A header that was accepted leaves no holes in the data section.
    total = sum(shard.header.file_size - shard.header.data_start for shard in shards)
    if index.weight_map == right and index.metadata.get("total_size", total) == total:
        return []  # the usual case, ten times as fast as finding out what differs
    return index.compare({shard.name: shard.header for shard in shards})
