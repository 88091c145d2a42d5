"""Names of repositories on the Hub, and how they are told apart from paths."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Final, Self

from espalier_format.container.names import SHARD_SUFFIX
from espalier_format.errors import UsageError

SCHEME: Final = "hf://"

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REVISION = r"[^\s@:?*~^\\\x00-\x1f\x7f]{1,250}"
_WITH_OWNER = re.compile(rf"({_NAME}/{_NAME})(?:@({_REVISION}))?")
_ANY = re.compile(rf"({_NAME}(?:/{_NAME})?)(?:@({_REVISION}))?")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A model repository, and a branch, tag, commit or pull request in it; None for its default branch."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"

    @property
    def root(self) -> RemotePath:
        """The repository as the folder that its files are named by in messages."""
        return RemotePath.of(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `hf://[owner/]name[@revision]`, or the same without the scheme.

        Raises:
            UsageError: the text is not of that form.
        """
        match = _ANY.fullmatch(text.removeprefix(SCHEME))
        if match is None:
            raise UsageError(f"{text[:200]!r} is no repository; write org/name or {SCHEME}org/name@revision")
        return cls(match[1], match[2])


class RemotePath(PosixPath):
    """The name of a remote file in messages: joins like a path and prints as hf://…; nothing local has this name."""

    __slots__ = ()

    @classmethod
    def of(cls, address: HubAddress) -> RemotePath:
        """Return the name of the repository's top level."""
        return cls(str(address))

    def __str__(self) -> str:
        return SCHEME + super().__str__()


def locate(source: str | Path) -> Path | HubAddress:
    """Return what `source` names: a path, or a repository on the Hub.

    A `Path` is a path. A string that begins with hf:// is always a repository. Otherwise whatever exists on this
    machine is a path, and so is everything that begins with "/", "." or "~", or that ends with "/" or ".safetensors".
    What is left is a repository if it looks like org/name or org/name@revision, and a path (of something that does
    not exist) if not.

    Raises:
        UsageError: an hf:// address that names no model repository, or nothing at all.
    """
    if isinstance(source, Path):
        return source
    if not source:
        raise UsageError('the path of the source is empty; the current folder is "."')
    if source.startswith(SCHEME):
        return HubAddress.parse(source)
    path = Path(source)
    if os.path.lexists(path) or source.startswith(("/", ".", "~")) or source.endswith(("/", SHARD_SUFFIX)):
        return path
    match = _WITH_OWNER.fullmatch(source)
    return path if match is None else HubAddress(match[1], match[2])


def local_path(source: str | Path, purpose: str) -> Path:
    """Return `source` as a path, for an operation that needs the files themselves (`purpose`, "to convert it").

    Raises:
        UsageError: it is a repository on the Hub.
    """
    place = locate(source)
    if isinstance(place, HubAddress):
        raise UsageError(
            f"{place.repo_id} is not on this machine; {purpose}, download it: "
            f"hf download {place.repo_id} --local-dir {place.repo_id.rpartition('/')[2]}"
        )
    return place
