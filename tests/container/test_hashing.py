from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from espalier_format.container.hashing import GIT_BLOB_MAX_BYTES, FileHasher, hash_file
from espalier_format.errors import MalformedError, MissingFileError, TruncatedError


@pytest.mark.parametrize("size", [0, 1, 100, 4 * 1024 * 1024, 4 * 1024 * 1024 + 1])
def test_hash_file(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "x"
    path.write_bytes(data)
    seen: list[int] = []
    record = hash_file(path, seen.append)
    assert record.size == size == sum(seen)
    assert record.sha256 == hashlib.sha256(data).hexdigest()
    assert record.git_blob_sha1 == hashlib.sha1(b"blob %d\0" % size + data).hexdigest()


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git itself")
def test_git_agrees(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\r\nb\0" * 1000)
    result = subprocess.run(["git", "hash-object", "--no-filters", str(path)], capture_output=True, check=True)
    assert hash_file(path).git_blob_sha1 == result.stdout.decode().strip()


def test_git_hash_up_to_10_mib_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for size in (GIT_BLOB_MAX_BYTES, GIT_BLOB_MAX_BYTES + 1):
        with path.open("wb") as file:
            file.truncate(size)
        record = hash_file(path)
        assert (record.git_blob_sha1 is not None) == (size == GIT_BLOB_MAX_BYTES)


def test_hasher_takes_any_buffer_in_pieces() -> None:
    data = bytes(range(256))
    hasher = FileHasher(256)
    hasher.update(data[:10])
    hasher.update(bytearray(data[10:20]))
    hasher.update(memoryview(data[20:28]).cast("d"))
    hasher.update(memoryview(data)[28:])
    assert hasher.record().sha256 == hashlib.sha256(data).hexdigest()


def test_truncated_error_for_another_size() -> None:
    hasher = FileHasher(3)
    hasher.update(b"ab")
    with pytest.raises(TruncatedError):
        hasher.record()


def test_missing_and_malformed_errors(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        hash_file(tmp_path / "x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(MalformedError):
        hash_file(tmp_path / "fifo")
