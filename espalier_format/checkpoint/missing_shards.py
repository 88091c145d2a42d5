"""Whether all shards of an EXL3 or plain checkpoint are there: half a download must not pass as a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from espalier_format.container.index import INDEX_NAME
from espalier_format.errors import MissingFileError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from espalier_format.container.index import Index

_NUMBERED: Final = re.compile(r"(.+)-([0-9]{5,8})-of-([0-9]{5,8})\.safetensors")
_QUESTION: Final = "is the download complete?"


def refuse_missing_peer(names: Iterable[str], index: Index | None, root: Path) -> None:
    """Refuse shards named ``<stem>-00001-of-00002.safetensors`` if one of their numbers is missing (spec/exl3.md §1).

    Raises:
        MissingFileError: one is; the message names the first.
    """
    groups: dict[tuple[str, str], dict[int, int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            groups.setdefault((match[1], match[3]), {})[int(match[2])] = len(match[2])
    for (stem, total), present in groups.items():
        # Some writers count from 0. The numbers are looked at one by one: a name may claim any total.
        numbers = range(int(total)) if 0 in present else range(1, int(total) + 1)
        missing = next((number for number in numbers if number not in present), None)
        if missing is not None:
            width = next(iter(present.values()))
            name = f"{stem}-{missing:0{width}d}-of-{total}.safetensors"
            raise _missing(name, len(present), int(total), index, root)


def refuse_missing_modules(index: Index, shards: Collection[str], tensors: Collection[str], root: Path) -> None:
    """Refuse an index that lists a trellis which none of the ``shards`` holds (spec/exl3.md §1).

    Raises:
        MissingFileError: it does.
    """
    for tensor, shard in index.weight_map.items():
        if tensor.endswith(".trellis") and tensor not in tensors:
            if shard not in shards:
                listed = set(index.weight_map.values())
                raise _missing(shard, len(listed.intersection(shards)), len(listed), index, root)
            raise MissingFileError(f"{INDEX_NAME} lists {tensor}, which no shard holds; {_QUESTION}", path=root)


def _missing(name: str, present: int, total: int, index: Index | None, root: Path) -> MissingFileError:
    named = index is not None and name in index.weight_map.values()
    subject = f"{INDEX_NAME} names {name}, which" if named else name
    return MissingFileError(f"{subject} is not there ({present:,} of {total:,} shards); {_QUESTION}", path=root)
