"""Moving bytes: pieces of files gathered to batches, and written with few calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from espalier_format.container.hashing import Buffer
from espalier_format.container.shard import CHUNK_BYTES

_BATCH_PIECES: Final = 512  # writev takes 1024


def piece_bytes(piece: Buffer) -> int:
    """Return the size of a piece in bytes."""
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def batches(chunks: Iterator[Buffer]) -> Iterator[tuple[list[Buffer], int]]:
    """Gather pieces to batches of about CHUNK_BYTES: checkpoints have tens of thousands of small tensors."""
    batch: list[Buffer] = []
    count = 0
    for chunk in chunks:
        batch.append(chunk)
        count += piece_bytes(chunk)
        if count >= CHUNK_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch, count
            batch, count = [], 0
    if batch:
        yield batch, count


def write_all(descriptor: int, batch: list[Buffer]) -> None:
    """Write a batch at the current position; OSError passes through."""
    pending = [memoryview(piece).cast("B") for piece in batch if piece_bytes(piece)]
    while pending:
        written = os.writev(descriptor, pending)
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if pending:
            pending[0] = pending[0][written:]


def start_writeback(descriptor: int, start: int, size: int) -> None:
    """Have the bytes just written go to the disk now, so that the final fsync waits for little."""
    if hasattr(os, "posix_fadvise"):
        # Of pages that are not on disk yet, DONTNEED starts the write and keeps them in memory.
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
