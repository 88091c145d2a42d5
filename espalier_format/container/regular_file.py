"""Opening input files: regular files only, and no name is ever waited on."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

from espalier_format.errors import LimitError, MalformedError, MissingFileError, PathError, SourceError, TruncatedError

_PIECES_AHEAD: Final = 2  # in memory
_DISK_PIECES_AHEAD: Final = 8  # asked of the disk


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """Open a regular file for reading, unbuffered, and return it with its size in bytes.

    A FIFO, socket, device or folder is refused without blocking. Links are followed: which links may
    be followed is decided by `CheckpointFolder.resolve`.

    Raises:
        MissingFileError: nothing is there.
        MalformedError: what is there is no regular file.
        PathError: the name holds a NUL, or links go round in a circle.
        SourceError: the operating system refuses to open it.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever otherwise.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise refusal(error, path) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedError("is not a regular file", path=path)  # noqa: TRY301 - the handler closes it
        return open(descriptor, "rb", buffering=0), status.st_size  # noqa: PTH123 - it is no path
    except BaseException:
        os.close(descriptor)
        raise


def is_regular(path: Path) -> bool:
    """Tell whether a path leads to a regular file; False where nothing is there.

    Raises:
        PathError, SourceError: as `open_regular`.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        refused = refusal(error, path)
        if isinstance(refused, MissingFileError):
            return False
        raise refused from error


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; the size is checked before reading.

    Raises:
        LimitError: the file is larger than `limit`.
        TruncatedError: the file shrank while it was read.
        MissingFileError, MalformedError, PathError, SourceError: as `open_regular`.
    """
    file, size = open_regular(path)
    with file:
        if size > limit:
            raise LimitError("file is too large", path=path, expected=f"at most {limit} bytes", got=size)
        return read_exactly(file, size, path)


def read_exactly(file: BinaryIO, size: int, path: str | Path) -> bytes:
    """Read `size` bytes from the current position.

    Raises:
        TruncatedError: the file ends before.
        SourceError: the operating system fails to read it.
    """
    parts: list[bytes] = []
    missing = size
    while missing:
        try:
            part = file.read(missing)
        except OSError as error:
            raise refusal(error, path) from error
        if not part:
            raise TruncatedError("file ends early", path=path, expected=f"{size} bytes", got=size - missing)
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_pieces(descriptor: int, start: int, stop: int, size: int, path: str | Path) -> Iterator[bytes]:
    """Read bytes [`start`, `stop`) of an open file in pieces of at most `size` bytes; the file position is not used.

    Long ranges are read ahead by a thread, so that the disk works while the caller does: two pieces more in memory.

    Raises:
        TruncatedError: the file ends before `stop`.
        SourceError: the operating system fails to read it.
    """
    # What fits in a piece or two is not worth a thread.
    pool = ThreadPoolExecutor(1, "espalier-read") if stop - start > 2 * size else None
    ahead: deque[Future[bytes]] = deque()
    asked = start
    try:
        for position in range(start, stop, size):
            if pool is None:
                piece = _read_at(descriptor, min(size, stop - position), position)
            else:
                while asked < stop and len(ahead) < _PIECES_AHEAD:
                    _start_reading(descriptor, asked + _DISK_PIECES_AHEAD * size, size)
                    ahead.append(pool.submit(_read_at, descriptor, min(size, stop - asked), asked))
                    asked += size
                piece = ahead.popleft().result()
            if len(piece) < min(size, stop - position):
                raise TruncatedError(
                    "file has become shorter", path=path, expected=f"{stop} bytes", got=position + len(piece)
                )
            yield piece
    except OSError as error:
        raise refusal(error, path) from error
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _read_at(descriptor: int, size: int, position: int) -> bytes:
    """Read `size` bytes, fewer only where the file ends."""
    piece = os.pread(descriptor, size, position)
    while 0 < len(piece) < size:
        more = os.pread(descriptor, size - len(piece), position + len(piece))
        if not more:
            break
        piece += more
    return piece


def _start_reading(descriptor: int, start: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice only
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)


def refusal(
    error: OSError | ValueError, path: str | Path
) -> MissingFileError | MalformedError | PathError | SourceError:
    """Return the error of this library that a failed open or read of an input file amounts to."""
    if not isinstance(error, OSError):
        return PathError("is not a usable file name", path=str(path).replace("\0", "\\0"))
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return MissingFileError("does not exist", path=path)
    if error.errno == errno.ELOOP:
        return PathError("links go round in a circle", path=path)
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
        return MalformedError("is not a regular file", path=path)
    return SourceError(f"cannot be read: {error.strerror or error}", path=path)
