"""Which tensors an EXL3 checkpoint holds and where: to tell whether what describes it still fits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

NGRAM_SHARD: Final = "ngram_embedding.safetensors"
"""Row tables of n-grams; the index that exllamav3 writes leaves them out."""


def tensor_list_sha256(tensors: Iterable[tuple[str, str, str, tuple[int, ...]]]) -> str:
    r"""Return the SHA-256, in hexadecimal, of a list of tensors (spec/exl3.md §6).

    Each entry is (shard, name, dtype, shape); it makes one line ``shard TAB name TAB dtype TAB shape LF``, the
    shape as decimal numbers joined by commas. Lines are sorted by their UTF-8 bytes, so the order of entries
    does not matter. A backslash, tab or line feed of a name is written as ``\\``, ``\t``, ``\n``: otherwise one
    name could make up a second line.
    """
    digest = hashlib.sha256()
    lines = (
        f"{_escaped(shard)}\t{_escaped(name)}\t{dtype}\t{','.join(map(str, shape))}\n"
        for shard, name, dtype, shape in tensors
    )
    for line in sorted(line.encode("utf-8") for line in lines):
        digest.update(line)
    return digest.hexdigest()


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")


def index_describes(weight_map: object, shard_of: Mapping[str, str]) -> bool:
    """Tell whether the ``weight_map`` of an index says where all tensors are, those of n-gram tables or not."""
    if not isinstance(weight_map, dict):
        return False
    expected = {name: shard for name, shard in shard_of.items() if shard != NGRAM_SHARD or name in weight_map}
    return weight_map == expected
