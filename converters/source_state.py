"""What is seen of a source without reading its tensors: whether it is still the one that a job was begun with."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME
from espalier_format.converters.output import this_producer

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint


def describe_shards(source: Checkpoint) -> list[list[object]]:
    """Return name, size, time of change and digest of the header of each shard."""
    return [[shard.name, *_stamp(shard.path), digest(repr(shard.header))] for shard in source.shards]


def describe_conversion(source: Checkpoint, target: str, **options: object) -> dict[str, object]:
    """Return the job of a conversion (`take_over`): members are equal where two runs may share their files.

    ``options`` are those that decide about what is in shards; their names are shown to a person.
    """
    names = (CONFIG_NAME, INDEX_NAME, *source.other_files)
    files = [[name, *_stamp(source.folder.path_of(name))] for name in names if source.folder.has(name)]
    return {
        "command": "convert",
        "version": this_producer().version,
        "format": target,
        "source": [*describe_shards(source), *files],
        **{name.replace("_", " "): value for name, value in options.items()},
    }


def digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
