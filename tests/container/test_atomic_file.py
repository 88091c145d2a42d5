"""replace_file: the old content or the new. That it survives a power cut cannot be tested here."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from espalier_format.container.atomic_file import replace_file
from espalier_format.errors import WriteError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_file_gets_the_mode_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the mask of the process is not touched, which other threads create files with."""
    (tmp_path / "other").write_bytes(b"")

    def refuse(mask: int) -> int:
        raise AssertionError(mask)

    monkeypatch.setattr(os, "umask", refuse)
    replace_file(tmp_path / "new", b"x")
    assert (tmp_path / "new").read_bytes() == b"x"
    assert mode(tmp_path / "new") == mode(tmp_path / "other")


@pytest.mark.parametrize("permissions", [0o600, 0o644, 0o666])
def test_an_old_file_keeps_its_mode(tmp_path: Path, permissions: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(permissions)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode(path) == permissions
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_write_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(WriteError, match="No space left") as caught:
        replace_file(path, b"new")
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_error_where_the_folder_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the new one by then, and the message must not say that it is the old one."""
    path = tmp_path / "old"
    path.write_bytes(b"old")
    real = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    code = errno.EIO
    with pytest.raises(WriteError, match=r"perhaps not for good.*Input/output error"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    code = errno.EINVAL  # a file system that cannot sync folders at all
    replace_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_write_error_where_the_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WriteError):
        replace_file(tmp_path / "nowhere" / "file", b"x")


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
def test_write_error_leaves_what_is_no_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = tmp_path / "special"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "FIFO":
            os.mkfifo(path)
        else:
            server.bind(path.name)
        before = path.lstat()
        with pytest.raises(WriteError, match="no regular file"):
            replace_file(path, b"x")
        after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """A file of a checkpoint may be a link into a cache, where others read what it leads to."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"shared")
    link.symlink_to(target)
    replace_file(link, b"own")
    assert not link.is_symlink()
    assert (link.read_bytes(), target.read_bytes()) == (b"own", b"shared")
