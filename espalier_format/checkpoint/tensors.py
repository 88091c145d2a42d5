"""All tensors of a checkpoint by name, whichever shard holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from espalier_format.errors import DuplicateTensorError, LimitError
from espalier_format.limits import MAX_TENSORS

if TYPE_CHECKING:
    import numpy as np

    from espalier_format.container.header import TensorInfo
    from espalier_format.container.shard import Shard

FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that a bias, or a weight to be decoded, may have."""

_COMPARE_BYTES: Final = 8 * 1024 * 1024

T = TypeVar("T")


class TensorRef(NamedTuple):
    """One stored tensor: where it lies. Nothing is read until ``data`` or ``array`` is called."""

    # A NamedTuple, for 90,000 of them are made in a third of the time of frozen dataclasses.
    shard: Shard
    info: TensorInfo

    @property
    def name(self) -> str:
        """Full name of the tensor."""
        return self.info.name

    @property
    def dtype(self) -> str:
        """Dtype as safetensors spells it, e.g. "I16"."""
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored shape."""
        return self.info.shape

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.info.end - self.info.start

    def data(self) -> memoryview:
        """Return the stored bytes, memory-mapped and read-only."""
        return self.shard.bytes_of(self.info)

    def array(self) -> np.ndarray:
        """Return the stored values as a read-only numpy array; BF16 as the uint16 bit patterns."""
        return self.shard.array(self.info)

    def view(self) -> np.ndarray:
        """Return what ``array`` does without ever copying: the array may not be aligned."""
        return self.shard.view(self.info)


class LazyMapping(Mapping[str, T], Generic[T]):
    """A read-only mapping in a fixed order whose values are made on first use and kept."""

    def __init__(self, names: Sequence[str], make: Callable[[str], T]) -> None:
        self._made: dict[str, T | None] = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> T:
        value = self._made[name]
        if value is None:
            value = self._made[name] = self._make(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class TensorTable:
    """Names of all tensors → header entry and shard, in shard order and, within a shard, header order.

    ``infos`` and ``shards`` have the same keys. ``duplicates`` lists names that a later shard repeats,
    with that shard; the first shard's tensor is the one in the table.
    """

    __slots__ = ("duplicates", "infos", "shards")

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self.shards: dict[str, Shard] = {}
        self.duplicates: list[TensorRef] = []
        count = 0
        for shard in shards:
            tensors = shard.header.tensors
            count += len(tensors)
            if count > MAX_TENSORS:
                raise LimitError("more tensors than a checkpoint may have", path=shard.path, expected=MAX_TENSORS)
            if self.infos.keys().isdisjoint(tensors):
                self.infos.update(tensors)
                self.shards.update(dict.fromkeys(tensors, shard))
                continue
            for name, info in tensors.items():
                if name in self.infos:
                    self.duplicates.append(TensorRef(shard, info))
                else:
                    self.infos[name] = info
                    self.shards[name] = shard

    def ref(self, name: str) -> TensorRef:
        """Return one tensor; KeyError for a name that is not in the table."""
        return TensorRef(self.shards[name], self.infos[name])

    def refs(self, names: Sequence[str] | None = None) -> LazyMapping[TensorRef]:
        """Return these tensors, all of them by default, as a mapping in this order."""
        return LazyMapping(tuple(self.infos) if names is None else names, self.ref)

    def refuse_duplicates(self) -> None:
        """Raise ``DuplicateTensorError`` when two shards hold tensors of one name, equal or not."""
        for repeated in self.duplicates[:1]:
            raise DuplicateTensorError(
                f"{self.shards[repeated.name].name} and {repeated.shard.name} both hold a tensor of this name",
                path=repeated.shard.path,
                tensor=repeated.name,
            )

    def check_duplicates(self) -> tuple[str, ...]:
        """Compare repeated tensors byte for byte, in bounded memory, and return a warning about equal ones.

        Where the bytes cannot be read, of a remote checkpoint, the warning says that they have not been compared.

        Raises:
            DuplicateTensorError: two tensors of one name differ in dtype, shape or bytes.
        """
        for repeated in self.duplicates:
            first = self.ref(repeated.name)
            same = (first.dtype, first.shape) == (repeated.dtype, repeated.shape) and (
                not repeated.shard.has_data or _same_bytes(first, repeated)
            )
            if not same:
                raise DuplicateTensorError(
                    f"{first.shard.name} and {repeated.shard.name} hold different tensors of this name",
                    path=repeated.shard.path,
                    tensor=repeated.name,
                )
        if not self.duplicates:
            return ()
        count, shown = len(self.duplicates), self.duplicates[0]
        equal = "with equal bytes" if shown.shard.has_data else "(their bytes have not been compared)"
        what = "1 tensor is" if count == 1 else f"{count:,} tensors are"
        return (f"{what} stored twice {equal}, e.g. {shown.name} in {shown.shard.name}",)


def _same_bytes(left: TensorRef, right: TensorRef) -> bool:
    one, other = left.data(), right.data()
    return len(one) == len(other) and all(
        one[start : start + _COMPARE_BYTES] == other[start : start + _COMPARE_BYTES]
        for start in range(0, len(one), _COMPARE_BYTES)
    )
