"""The project's own reader, as the kinds "open" and "verify"."""

from __future__ import annotations

from espalier_format.checkpoint import open_checkpoint
from espalier_format.operations.verify import verify_checkpoint


def open_folder(folder: str) -> None:
    """Open a checkpoint and close it; a refusal is one of `espalier_format.errors`."""
    open_checkpoint(folder).close()


def verify_folder(folder: str) -> str | None:
    """Verify a checkpoint with everything that decoding can show; returns the code of the first finding."""
    findings = [finding for check in verify_checkpoint(folder, deep=True).checks for finding in check.findings]
    return findings[0].code if findings else None
