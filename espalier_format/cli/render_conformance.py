"""Print a :class:`ConformanceReport` for a person: a line per level and decoder on stdout, failures on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from espalier_format.cli.console import open_console, print_table
from espalier_format.cli.quantities import plural, size
from espalier_format.cli.terminal import safe_text
from espalier_format.conformance.outcome import LEVELS

if TYPE_CHECKING:
    from espalier_format.conformance.report import ConformanceReport
    from espalier_format.conformance.writer import WrittenKit

_WORK: Final = {1: "opens and refuses", 2: "decodes", 3: "multiplies"}
_MARKS: Final = {"passed": ("ok", "green"), "failed": ("FAILED", "bold red"), "not tested": ("not tested", "dim")}
_MOST_FAILURES: Final = 50


def render_conformance(report: ConformanceReport) -> None:
    """Print levels, decoders and the verdict on stdout; on stderr a line per failed case, at most 50."""
    console = open_console()
    print_table(console, _table(report))
    left_out = f", {report.skipped:,} left out" if report.skipped else ""
    counted = f"{plural(len(report.results), 'case')}{left_out}"
    failures = report.failures
    if failures:
        console.print(Text(f"{plural(len(failures), 'failure')} in {counted}", style="bold red"))
    elif report.exit_code:
        console.print(Text(f"level {report.claim} is not shown; {counted}, nothing wrong", style="bold red"))
    else:
        shown = f": level {report.shown} shown" if report.shown else ""
        console.print(Text(f"{counted}, nothing wrong{shown}", style="bold green"))
    console.file.flush()
    for failure in failures[:_MOST_FAILURES]:
        if failure.mismatch is not None:
            print(f"failed {safe_text(f'{failure.case}: {failure.mismatch.message}')}", file=sys.stderr)  # noqa: T201
    if len(failures) > _MOST_FAILURES:
        print(f"and {len(failures) - _MOST_FAILURES:,} more; --json lists all", file=sys.stderr)  # noqa: T201


def render_written(written: WrittenKit) -> None:
    """Print what was written."""
    console = open_console()
    console.print(Text(safe_text(str(written.folder)), style="bold"), soft_wrap=True)
    console.print(f"  {plural(written.files, 'file')}, {size(written.size)}; begin with kit.json")


def _table(report: ConformanceReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _column in range(4):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for level in sorted(set(LEVELS.values())):
        mark, style = _MARKS[report.verdict(level)]
        table.add_row(f"level {level}", _WORK[level], Text(mark, style=style), "", "")
        for kind in report.kinds:
            if kind.level == level:
                counts = f"{kind.passed} passed" + (f", {kind.failed} failed" if kind.failed else "")
                where = ", refuses at load" if kind.refuses_at_load else ""
                table.add_row("", f"  {kind.kind}", "", counts, Text(safe_text(f"{kind.decoder}{where}")))
    return table
