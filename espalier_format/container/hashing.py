"""SHA-256 and git blob SHA-1 of files, computed while they are streamed (spec/manifest.md)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from espalier_format.container.regular_file import open_regular, refusal
from espalier_format.errors import TruncatedError

GIT_BLOB_MAX_BYTES: Final = 10 * 1024 * 1024
"""Largest file that gets a git blob SHA-1: what the Hub stores in git itself and not in LFS."""

_READ_BYTES: Final = 4 * 1024 * 1024

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and hashes, in lower-case hexadecimal, of one file."""

    size: int
    sha256: str
    git_blob_sha1: str | None


class FileHasher:
    """Hash a file of `size` bytes that comes in pieces, in order."""

    __slots__ = ("_git", "_seen", "_sha256", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._seen = 0
        self._sha256 = hashlib.sha256()
        self._git = None
        if size <= GIT_BLOB_MAX_BYTES:
            self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def update(self, data: Buffer) -> None:
        """Add the next bytes of the file."""
        self._seen += len(data) if isinstance(data, (bytes, bytearray)) else data.nbytes
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    def record(self) -> FileRecord:
        """Return the result, after the last byte.

        Raises:
            TruncatedError: not `size` bytes were given, so that the git hash would be wrong.
        """
        if self._seen != self.size:
            raise TruncatedError("hashed another number of bytes than announced", expected=self.size, got=self._seen)
        return FileRecord(self.size, self._sha256.hexdigest(), None if self._git is None else self._git.hexdigest())


def hash_file(path: Path, progress: Callable[[int], object] | None = None) -> FileRecord:
    """Hash a regular file; `progress` is called with the number of bytes of each piece.

    Uses 4 MiB of memory and releases the interpreter lock nearly all the time: several files can be hashed by as
    many threads.

    Raises:
        TruncatedError: the file shrank meanwhile.
        MissingFileError, MalformedError, PathError, SourceError: as `open_regular`.
    """
    file, size = open_regular(path)
    with file:
        hasher = FileHasher(size)
        buffer = memoryview(bytearray(min(size, _READ_BYTES)))
        position = 0
        while position < size:
            try:
                count = os.readv(file.fileno(), [buffer[: size - position]])
            except OSError as error:
                raise refusal(error, path) from error
            if not count:
                raise TruncatedError("file ends early", path=path, expected=f"{size} bytes", got=position)
            hasher.update(buffer[:count])
            position += count
            if progress is not None:
                progress(count)
        return hasher.record()
