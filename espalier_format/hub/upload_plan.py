"""What an upload changes in a repository: files to add, files to delete, and in which commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from espalier_format.container.folder import is_shard_name
from espalier_format.container.hashing import hash_file
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import UsageError
from espalier_format.hub.card import CARD_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.hub.repository import RemoteFile
    from espalier_format.schema.manifest import Manifest

GIT_ATTRIBUTES: Final = ".gitattributes"

_LAST: Final = (MANIFEST_NAME, SIGNATURE_NAME, INDEX_NAME, CONFIG_NAME)
"""Written with the last commit: without config and index nothing looks like a checkpoint."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """How much goes into one commit, well under what the Hub accepts (25,000 large files, 1 GB of small ones)."""

    files: int = 1000
    small_bytes: int = 250_000_000
    small_file: int = 10 * 1024 * 1024
    """What may be committed without LFS, in bytes; larger files do not count towards ``small_bytes``."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Names of files: ``sizes`` are those to add, with their sizes; ``unchanged`` are there with the same content."""

    sizes: Mapping[str, int]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether the repository is as it should be already."""
        return not self.sizes and not self.deleted

    def commits(self, limits: CommitLimits) -> list[list[str]]:
        """Return the files of each commit in order; one commit if it keeps the limits, else config and index last."""
        small = sum(size for size in self.sizes.values() if size <= limits.small_file)
        if len(self.sizes) + len(self.deleted) <= limits.files and small <= limits.small_bytes:
            return [list(self.sizes)]
        parts: list[list[str]] = []
        room = files = 0
        for name in (name for name in self.sizes if name not in _LAST):
            size = self.sizes[name] if self.sizes[name] <= limits.small_file else 0
            if not parts or files >= limits.files or size > room:
                parts.append([])
                files, room = 0, limits.small_bytes
            parts[-1].append(name)
            files, room = files + 1, room - size
        return [*parts, [name for name in _LAST if name in self.sizes]]


def plan_upload(
    folder: CheckpointFolder,
    manifest: Manifest,
    remote: Mapping[str, RemoteFile],
    published: Iterable[str],
    *,
    prune: bool = False,
) -> UploadPlan:
    """Compare a verified folder with the files of a repository.

    ``published`` names the files that the repository's own manifest lists: those that are gone are deleted, and so
    are shards, index and signature that the folder does not have. Anything else that is only in the repository
    belongs to somebody; it is deleted with ``prune`` only.

    Raises:
        UsageError: there are such files, and ``prune`` is not given.
    """
    sizes: dict[str, int] = {}
    unchanged: list[str] = []
    names = [name for name in folder.files() if name != GIT_ATTRIBUTES]
    for name in names:
        size = folder.resolve(name).stat().st_size
        file = remote.get(name)
        if file is not None and file.size == size and is_same(folder, name, manifest, file):
            unchanged.append(name)
        else:
            sizes[name] = size
    local = set(names)
    gone = [
        name
        for name in remote
        if name not in local
        and name not in (CARD_NAME, GIT_ATTRIBUTES)
        and not any(part[0] == "." for part in name.split("/")[:-1])
    ]
    ours = {*published, INDEX_NAME, SIGNATURE_NAME, MANIFEST_NAME}
    foreign = [name for name in gone if name not in ours and not is_shard_name(name)]
    if foreign and not prune:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise UsageError(
            f"the repository holds files that the folder does not: {', '.join(foreign[:_SHOWN])}{more}; "
            "a verified checkpoint has none that its manifest does not list: pass --prune to delete them"
        )
    return UploadPlan(sizes, tuple(unchanged), tuple(gone))


def is_same(folder: CheckpointFolder, name: str, manifest: Manifest, file: RemoteFile) -> bool:
    """Tell whether the Hub's record of a file is of the file of that name in a verified folder."""
    entry = manifest.files.get(name)
    if entry is None:  # the card, the manifest, its signature
        record = hash_file(folder.resolve(name))
        sha256, blob = record.sha256, record.git_blob_sha1
    else:
        sha256, blob = entry.sha256, entry.git_blob_sha1
    return file.sha256 == sha256 if file.sha256 is not None else blob is not None and file.git_blob_sha1 == blob
