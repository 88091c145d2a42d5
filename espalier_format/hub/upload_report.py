"""What ``upload`` did, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier_format.hub.address import HubAddress
    from espalier_format.operations.verify_report import VerifyReport


@dataclass(frozen=True, slots=True)
class UploadReport:
    """The outcome. ``remote`` is None where ``local`` found something wrong: then nothing was sent.

    ``commit`` is what the repository was verified at, ``revision`` the branch or pull request that holds it, and
    ``pull_request`` its page. ``uploaded`` counts bytes of the files in ``added``; what the Hub already had of them was
    not sent again.
    """

    path: str
    address: HubAddress
    local: VerifyReport
    remote: VerifyReport | None = None
    created: bool = False
    commit: str | None = None
    revision: str | None = None
    pull_request: str | None = None
    added: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    uploaded: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """That of the local verification, else of the remote one."""
        return self.local.exit_code if self.remote is None else self.remote.exit_code

    def to_json(self) -> dict[str, object]:
        """Return the stable document of ``upload --json``."""
        return {
            "path": self.path,
            "repository": self.address.repo_id,
            "published": self.remote is not None,
            "ok": self.exit_code == 0,
            "created": self.created,
            "commit": self.commit,
            "revision": self.revision,
            "pull_request": self.pull_request,
            "added": list(self.added),
            "unchanged": list(self.unchanged),
            "deleted": list(self.deleted),
            "uploaded_bytes": self.uploaded,
            "local": self.local.to_json(),
            "remote": None if self.remote is None else self.remote.to_json(),
            "warnings": list(self.warnings),
        }
