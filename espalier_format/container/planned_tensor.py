"""What a shard to write consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from espalier_format.container.hashing import Buffer
from espalier_format.container.pieces import piece_bytes
from espalier_format.errors import ShapeError


class PlannedTensor(NamedTuple):
    """A tensor to write: `chunks` gives its little-endian bytes in order, in pieces of any size.

    A piece is written and hashed later than it was taken, so its content must not change any more.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    chunks: Callable[[], Iterable[Buffer]]


def shard_bytes(header: bytes, tensors: Sequence[PlannedTensor], sizes: Sequence[int]) -> Iterator[Buffer]:
    """Yield the bytes of a shard: its header, then its tensors, of which `sizes` gives the number of bytes.

    Raises:
        ShapeError: a tensor gives another number of bytes.
    """
    yield header
    for tensor, size in zip(tensors, sizes, strict=True):
        missing = size
        for chunk in tensor.chunks():
            missing -= piece_bytes(chunk)
            if missing < 0:
                break
            yield chunk
        if missing:
            raise ShapeError(
                "data is of another size than the shape",
                tensor=tensor.name,
                expected=f"{size} bytes",
                got=size - missing,
            )
