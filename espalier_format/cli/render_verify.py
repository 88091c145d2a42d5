"""Print a :class:`VerifyReport` for a person: a line per check on stdout, a line per finding on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from espalier_format.cli.console import open_console, print_table
from espalier_format.cli.quantities import NOTHING, plural
from espalier_format.cli.terminal import print_error, print_warnings, safe_text

if TYPE_CHECKING:
    from espalier_format.operations.verify_report import VerifyReport

_MARKS = {"passed": ("ok", "green"), "failed": ("WRONG", "bold red"), "skipped": (NOTHING, "dim")}


def render_verify(report: VerifyReport) -> None:
    """Print the checks and the verdict on stdout, findings and warnings on stderr."""
    console = open_console()
    console.print(Text(safe_text(report.path), style="bold"), soft_wrap=True)
    print_table(console, checks_table(report))
    if report.recorded:
        console.print(f"  {plural(report.recorded, 'decode digest')} added to the manifest")
    if report.findings:
        console.print(Text(f"{plural(len(report.findings), 'finding')}:", style="bold red"))
    else:
        console.print(Text("nothing wrong", style="bold green"))
    console.file.flush()
    for finding in report.findings:
        print_error(finding.code, str(finding))
    print_warnings(report.warnings)


def checks_table(report: VerifyReport) -> Table:
    """Return one row per check: name, outcome, what was looked at."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        mark, style = _MARKS[check.outcome]
        detail = Text(safe_text(check.detail), style="dim" if check.outcome == "skipped" else "")
        table.add_row(f"  {check.name}", Text(mark, style=style), detail)
    return table
