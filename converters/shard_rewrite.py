"""Rewrite a shard: most tensors keep their bytes and get another name, few are made anew.

What lies side by side in the source is read in large blocks across tensor borders: a shard with tens of
thousands of small tensors is read as fast as one big tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from espalier_format.container.planned_tensor import PlannedTensor

if TYPE_CHECKING:
    from espalier_format.container.hashing import Buffer
    from espalier_format.container.header import TensorInfo
    from espalier_format.container.shard import Shard

_LONGEST_SKIP: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor of the source shard with its dtype, shape and bytes, under ``name``."""

    name: str
    info: TensorInfo

    @property
    def dtype(self) -> str:
        """Dtype as safetensors spells it."""
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.info.shape


@dataclass(frozen=True, slots=True)
class Made:
    """A small tensor whose bytes ``make`` gives, when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], bytes]


Item = Kept | Made


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to write, in tensor order. With ``copied`` it is the source shard byte for byte."""

    shard: Shard
    items: tuple[Item, ...]
    metadata: Mapping[str, str] | None
    copied: bool

    @property
    def name(self) -> str:
        """File name of the shard, the same as in the source."""
        return self.shard.name


def in_file_order(shard: Shard) -> list[TensorInfo]:
    """Return the tensors of a shard in the order of their bytes, which headers need not have."""
    return sorted(shard.header.tensors.values(), key=lambda info: (info.start, info.end))


def planned_tensors(plan: ShardPlan) -> list[PlannedTensor]:
    """Return the tensors of a plan as the writer takes them. Memory: one block of the reader."""
    reader = ItemReader()
    return [reader.planned(plan.shard, item) for item in plan.items]


class ItemReader:
    """Makes tensors for the writer out of items, of any number of shards. Memory: one block.

    Those of a shard that are written in the order of their bytes cost one pass over it, in large blocks.
    """

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._position = 0
        self._blocks: Iterator[bytes] = iter(())
        self._rest = memoryview(b"")

    def planned(self, shard: Shard, item: Item) -> PlannedTensor:
        """Return the tensor of an item of ``shard``; nothing is read before its bytes are asked for."""
        return PlannedTensor(item.name, item.dtype, item.shape, self._chunks(shard, item))

    def _chunks(self, shard: Shard, item: Item) -> Callable[[], Iterable[Buffer]]:
        if isinstance(item, Made):
            return lambda: (item.make(),)
        return lambda: self._read(shard, item.info.start, item.info.end)

    def _read(self, shard: Shard, start: int, end: int) -> Iterator[memoryview]:
        """Yield bytes [start, end) of the data section of a shard."""
        skip = start - self._position
        if self._shard is not shard or not 0 <= skip <= _LONGEST_SKIP:
            size = shard.header.file_size - shard.header.data_start
            self._blocks, self._rest = shard.chunks(start, size), memoryview(b"")
            self._shard, self._position = shard, start
        else:
            # A marker of four bytes that is left out: reading on is cheaper than seeking.
            for _ in self._take(skip):
                pass
        yield from self._take(end - start)

    def _take(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            if not self._rest:
                self._rest = memoryview(next(self._blocks))
            piece, self._rest = self._rest[:size], self._rest[size:]
            self._position += len(piece)
            size -= len(piece)
            yield piece
