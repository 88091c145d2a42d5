"""``verify`` of whatever the command names: a folder or file here, or a repository on the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.errors import UsageError
from espalier_format.hub.address import HubAddress, local_path, locate

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.hub.signing import TrustedKey
    from espalier_format.operations.verify_report import VerifyReport
    from espalier_format.progress import Progress


def verify_source(
    source: str | Path,
    *,
    remote: bool = False,
    deep: bool = False,
    record: bool = False,
    trusted: TrustedKey | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a checkpoint here (``verify_checkpoint``) or, with ``remote``, on the Hub (``verify_remote``).

    Raises:
        UsageError: ``source`` is not where ``remote`` says, or options that do not go together.
        EspalierError: as the two functions.
    """
    if not remote:
        from espalier_format.operations.verify import verify_checkpoint  # noqa: PLC0415 - only what is needed

        purpose = "add --remote to verify it there, or, to verify its files"
        return verify_checkpoint(
            local_path(source, purpose), deep=deep, record=record, trusted=trusted, progress=progress
        )
    if deep or record:
        raise UsageError("deep and record need the tensors, and remote does not fetch them")
    place = locate(source)
    if not isinstance(place, HubAddress):
        raise UsageError("remote needs a repository: org/name or hf://org/name@revision", path=source)
    from espalier_format.hub.remote_verify import verify_remote  # noqa: PLC0415 - imports the HTTP client

    return verify_remote(place, trusted=trusted)
