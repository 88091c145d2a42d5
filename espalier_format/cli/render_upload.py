"""Print an :class:`UploadReport` for a person: what was sent where, and that it arrived."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.text import Text

from espalier_format.cli.console import open_console
from espalier_format.cli.quantities import plural, size
from espalier_format.cli.render_verify import render_verify
from espalier_format.cli.terminal import print_warnings, safe_text

if TYPE_CHECKING:
    from espalier_format.hub.upload_report import UploadReport


def render_upload(report: UploadReport) -> None:
    """Print what was done and the verification of the result; of a folder that was refused, what is wrong with it."""
    if report.remote is None:
        render_verify(report.local)
        print("nothing was published", file=sys.stderr)  # noqa: T201
        return
    console = open_console()
    console.print(Text(safe_text(report.address.repo_id), style="bold"), soft_wrap=True)
    for label, value in _rows(report):
        console.print(Text.assemble((f"  {label:<12}", "dim"), safe_text(value)), soft_wrap=True)
    console.print()
    console.file.flush()
    render_verify(report.remote)
    print_warnings(report.warnings)


def _rows(report: UploadReport) -> list[tuple[str, str]]:
    rows = []
    if report.created:
        rows.append(("repository", "new"))
    if report.added or report.deleted:
        parts = [f"{plural(len(report.added), 'file')} ({size(report.uploaded)})"]
        if report.unchanged:
            parts.append(f"{len(report.unchanged):,} unchanged")
        if report.deleted:
            parts.append(f"{len(report.deleted):,} deleted")
        rows.append(("published", ", ".join(parts)))
    else:
        rows.append(("published", "nothing has changed"))
    rows.append(("commit", f"{report.commit} on {report.revision}"))
    if report.pull_request is not None:
        rows.append(("review", report.pull_request))
    return rows
