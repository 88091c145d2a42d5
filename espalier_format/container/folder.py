"""A checkpoint folder: which of its files may be read, by names that cannot lead out of it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from espalier_format.container.json_document import read_json_object
from espalier_format.container.names import PROGRESS_NAME, SHARD_SUFFIX
from espalier_format.container.regular_file import refusal
from espalier_format.container.shard import Shard
from espalier_format.errors import LimitError, MissingFileError, PathError, SourceError
from espalier_format.limits import MAX_TENSORS

_DEVICE: Final = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)

MAX_NAME_PART_BYTES: Final = 255
"""Longest part of a file name, in UTF-8 bytes: what file systems hold."""

MAX_NAME_PARTS: Final = 32
"""Most parts of a file name, the folders and the file itself."""


def is_shard_name(name: str) -> bool:
    """Tell whether a file of that relative name is a shard: *.safetensors at the top level, and not hidden."""
    return name.endswith(SHARD_SUFFIX) and "/" not in name and not name.startswith(".")


def check_name(name: str, *, path: str | Path | None = None) -> str:
    """Return `name` if it is a safe relative file name: non-empty parts joined by "/".

    `path` is the file that the name was found in, for the message.

    Raises:
        PathError: absolute, with a "." or ".." or empty part, a backslash, a drive letter, a control character, not
            encodable as UTF-8, more than 255 bytes in one part, or more than 32 parts.
    """
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PathError(f"file name {name[:200]!a} is not valid UTF-8", path=path) from error
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f-\x9f\\]|^[A-Za-z]:", name):
        raise PathError(f"file name {name[:200]!a} is not a plain relative name", path=path)
    if len(parts) > MAX_NAME_PARTS or any(len(part) > MAX_NAME_PART_BYTES for part in encoded.split(b"/")):
        raise PathError(f"file name {name[:200]!a} is too long or too deep", path=path)
    return name


def is_reserved(name: str) -> bool:
    """Tell whether no file may get this name on the word of a checkpoint: hidden, a shard's, or a device of Windows."""
    parts = name.split("/")
    devices = any(_DEVICE.fullmatch(part) for part in parts)
    return devices or any(part.startswith(".") for part in parts) or name.casefold().endswith(SHARD_SUFFIX)


class CheckpointFolder:
    """An existing folder and the files in it that belong to the checkpoint.

    Links are followed only to files within the folder, or, in a Hugging Face cache (`snapshots/<revision>/`), to
    files directly in the `blobs/` folder of the same repository. Hidden sub-folders (.git, .cache) are not looked into.
    """

    __slots__ = ("_blobs", "_real", "root")

    def __init__(self, path: str | Path) -> None:
        """Open the folder at `path`.

        Raises:
            MissingFileError: nothing is there.
            SourceError: it is not a folder, or cannot be read.
        """
        self.root = Path(path)
        try:
            self._real = self.root.resolve(strict=True)
            is_folder = self._real.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise _path_refusal(error, self.root) from error
        if not is_folder:
            raise SourceError("is not a folder", path=self.root)
        cached = self._real.parent.name == "snapshots"
        self._blobs = self._real.parent.parent / "blobs" if cached else None

    @property
    def unfinished(self) -> bool:
        """Whether a writer was killed here, or is at work: what is there may be a part of its output."""
        return os.path.lexists(self._real / PROGRESS_NAME)

    def __repr__(self) -> str:
        return f"<CheckpointFolder {self.root}>"

    @property
    def cached(self) -> bool:
        """Whether this is a snapshot in a Hugging Face cache: links to files that other snapshots may share."""
        return self._blobs is not None

    def files(self) -> list[str]:
        """Return the relative names of all regular files, sorted; sub-folders are searched, hidden ones are not.

        Raises:
            PathError: a link leads out of the folder or to another folder, or a name is unsafe.
            MissingFileError: a link leads nowhere.
            SourceError: a folder cannot be read.
        """
        found: list[str] = []
        pending = [""]
        while pending:
            prefix = pending.pop()
            for entry in self._entries(prefix):
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith("."):
                        pending.append(name + "/")
                elif entry.is_file(follow_symlinks=False):
                    found.append(check_name(name, path=self.root))
                elif entry.is_symlink() and stat.S_ISREG(self._target_mode(name)):
                    found.append(name)
        return sorted(found)

    def shard_names(self) -> list[str]:
        """Return the names of all shards (`is_shard_name`), sorted.

        Opening one that is not a regular file is refused by `Shard`.
        """
        return sorted(entry.name for entry in self._entries("") if is_shard_name(entry.name))

    def has(self, name: str) -> bool:
        """Tell whether there is a file (or link to one) of that name; raises PathError as `resolve`."""
        try:
            self.resolve(name)
        except MissingFileError:
            return False
        return True

    def resolve(self, name: str) -> Path:
        """Return the real path of the file called `name`, which exists and lies within the checkpoint.

        Raises:
            PathError: the name is unsafe, or a link leads out of the folder.
            MissingFileError: there is no such file.
        """
        path = self.root / check_name(name, path=self.root)
        try:
            real = (self._real / name).resolve(strict=False)
            inside = real.is_relative_to(self._real) and real != self._real
            if not inside and (self._blobs is None or real.parent != self._blobs):
                raise PathError("leads out of the checkpoint folder", path=path)
            os.lstat(real)
        except (OSError, RuntimeError) as error:
            raise _path_refusal(error, path) from error
        if real.is_symlink():  # resolve() leaves a circle of links unresolved
            raise PathError("links go round in a circle", path=path)
        return real

    def path_of(self, name: str) -> Path:
        """Return the path of a file in terms of `root`, as messages should show it; checks and errors as `resolve`."""
        self.resolve(name)
        return self.root / name

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; errors as `resolve`."""
        return self.resolve(name).stat().st_size

    def read_json_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; errors as `resolve` and `read_json_object` of json_document."""
        return read_json_object(self.path_of(name))

    def open_shards(self) -> tuple[Shard, ...]:
        """Open all shards, in name order; none stays open when one is refused.

        Raises:
            LimitError: together they have too many tensors; no more of them are opened then.
            RefusedError, InconsistentError: as `resolve` and `Shard`.
        """
        opened: list[Shard] = []
        count = 0
        try:
            for name in self.shard_names():
                opened.append(Shard(self.path_of(name), name=name))
                count += len(opened[-1].header.tensors)
                if count > MAX_TENSORS:
                    raise LimitError("more tensors than a checkpoint may have", path=self.root, expected=MAX_TENSORS)  # noqa: TRY301 - closes them
        except BaseException:
            for shard in opened:
                shard.close()
            raise
        return tuple(opened)

    def _target_mode(self, name: str) -> int:
        mode = self.resolve(check_name(name, path=self.root)).stat().st_mode
        if stat.S_ISDIR(mode):
            # Its files would be read twice, or for ever.
            raise PathError("links to a folder are not followed", path=self.root / name)
        return mode

    def _entries(self, prefix: str) -> list[os.DirEntry[str]]:
        folder = self._real / prefix
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except OSError as error:
            raise refusal(error, self.root / prefix) from error


def _path_refusal(error: OSError | RuntimeError | ValueError, path: Path) -> Exception:
    if isinstance(error, RuntimeError):  # how pathlib reports a circle of links up to Python 3.12
        return PathError("links go round in a circle", path=path)
    return refusal(error, path)
