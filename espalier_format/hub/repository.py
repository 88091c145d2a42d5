"""The Hub's records of a repository at one commit: which files there are, and their sizes and hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from espalier_format.container.folder import check_name
from espalier_format.errors import HubError
from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from huggingface_hub import ModelInfo

    from espalier_format.hub.address import HubAddress
    from espalier_format.hub.client import HubClient


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as the Hub records it: size in bytes, and SHA-256 (large files) or git blob SHA-1 (the others)."""

    name: str
    size: int
    sha256: str | None
    git_blob_sha1: str | None


@dataclass(frozen=True, slots=True)
class RemoteRepository:
    """All files of a repository at ``commit``; everything about it is read from that commit, whatever is pushed."""

    address: HubAddress
    commit: str
    private: bool
    files: Mapping[str, RemoteFile]


def read_repository(client: HubClient, address: HubAddress) -> RemoteRepository:
    """Ask the Hub for the commit that a revision is now, and for its files: one request.

    Raises:
        HubError, UnreachableError: there is none, it may not be seen, or the Hub cannot be asked.
        PathError: a file has a name that leads out of a folder.
    """

    def ask() -> ModelInfo:
        try:
            return client.api().model_info(
                address.repo_id, revision=address.revision, files_metadata=True, timeout=client.timeout
            )
        except (TypeError, KeyError, AttributeError) as error:  # how huggingface_hub fails on JSON of another form
            raise HubError("the Hub's answer is unusable", path=address.root) from error

    info = client.patiently(address.root, ask)
    if not isinstance(info.sha, str) or info.siblings is None:
        raise HubError("the Hub names no commit or lists no files", path=address.root)
    files = {}
    for sibling in info.siblings:
        name = check_name(sibling.rfilename, path=address.root)
        files[name] = _file(name, sibling, address)
    return RemoteRepository(address, info.sha, bool(info.private), ReadOnlyDict(sorted(files.items())))


def _file(name: str, sibling: Any, address: HubAddress) -> RemoteFile:
    size = sibling.size if sibling.lfs is None else sibling.lfs["size"]
    if type(size) is not int or size < 0:
        raise HubError("the Hub does not say how large the file is", path=address.root / name)
    if sibling.lfs is None:
        return RemoteFile(name, size, None, sibling.blob_id)
    return RemoteFile(name, size, sibling.lfs["sha256"], None)
