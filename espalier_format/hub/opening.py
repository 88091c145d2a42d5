"""Open a repository on the Hub as a checkpoint: config, index and headers are checked, no tensor is fetched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from espalier_format.checkpoint.opening import open_checkpoint, open_folder
from espalier_format.errors import UnreachableError
from espalier_format.hub.client import HubClient
from espalier_format.hub.remote_folder import RemoteFolder
from espalier_format.hub.repository import read_repository

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.hub.address import HubAddress


def open_remote(address: HubAddress, client: HubClient | None = None) -> Checkpoint:
    """Open the checkpoint at ``address``, as ``open_checkpoint`` opens a folder, by its JSON files and shard headers.

    All is read from the commit that the revision is at the beginning; at most two requests per shard, which are not
    stored. The checkpoint describes itself, but refuses to give tensors (``SourceError``). Of EXL3's codebook markers,
    which are tensors, only the presence is known: a warning says so.

    With HF_HUB_OFFLINE, or when the Hub cannot be reached, a complete snapshot in huggingface_hub's cache is opened
    instead, if there is one, as the folder that it is; in the latter case a warning says so.

    Raises:
        HubError: the Hub refuses: no such repository or revision, no permission, too many requests.
        UnreachableError: it cannot be reached, and the cache does not help.
        EspalierError: as ``open_checkpoint``.
    """
    hub = HubClient() if client is None else client
    try:
        repository = read_repository(hub, address)
    except UnreachableError as error:
        snapshot = cached_snapshot(address)
        if snapshot is None:
            message = f"{error.message}; the cache holds no complete copy of it"
            raise UnreachableError(message, path=error.path) from None
        checkpoint = open_checkpoint(snapshot)
        if _is_offline():
            return checkpoint
        warning = f"{error.message}; this is the copy in the cache, {snapshot}"
        return replace(checkpoint, warnings=(*checkpoint.warnings, warning))
    return open_folder(RemoteFolder(hub, repository))


def cached_snapshot(address: HubAddress) -> Path | None:
    """Return the folder of the complete snapshot that huggingface_hub has of ``address``; None if it has none."""
    try:
        return Path(snapshot_download(address.repo_id, revision=address.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _is_offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE)
