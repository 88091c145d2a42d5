"""Print the steps of the demo as they are done, each with the command that does the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from espalier_format.cli.console import open_console, print_table
from espalier_format.cli.quantities import FORMATS, bits, count, plural, size
from espalier_format.cli.render_verify import checks_table
from espalier_format.cli.terminal import print_error, safe_text
from espalier_format.converters.report import ConversionReport
from espalier_format.errors import DigestError, EspalierError
from espalier_format.operations.inspect_report import InspectReport
from espalier_format.operations.verify_report import VerifyReport

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

    from espalier_format.operations.demo import ComparedFile, DemoStep

_HASH_DIGITS = 16  # enough for a person to see that two are the same; the whole hashes are compared


def render_demo(steps: Iterable[DemoStep], keep: Path | None) -> int:
    """Print each step and the verdict; return 0 if nothing was wrong and every byte came back, else 1."""
    console = open_console()
    problems: list[EspalierError] = []
    compared: tuple[ComparedFile, ...] = ()
    for step in steps:
        words = " ".join(step.command)
        command = words if step.command[0] == "sha256sum" else f"espalier-format {words}"
        console.print(Text.assemble((step.title, "bold"), "  ", (f"$ {command}", "dim")), soft_wrap=True)
        if isinstance(step.result, InspectReport):
            console.print(f"  {_inspected(step.result)}", soft_wrap=True)
        elif isinstance(step.result, ConversionReport):
            console.print(f"  {_converted(step.result)}", soft_wrap=True)
        elif isinstance(step.result, VerifyReport):
            print_table(console, checks_table(step.result))
            problems += step.result.findings
        else:
            compared = step.result
            _print_files(console, compared)
        console.print()
    problems += [DigestError("did not come back as it was", path=file.name) for file in compared if not file.identical]
    if not problems:
        total = sum(file.size for file in compared)
        verdict = f"All {len(compared)} files, {count(total)} bytes, are identical: no bit was lost."
        console.print(Text(verdict, style="bold green"), soft_wrap=True)
    else:
        console.print(Text("The demo failed: what came back is not what went in.", style="bold red"), soft_wrap=True)
    if keep is not None:
        console.print(Text(f"The checkpoints are in {safe_text(str(keep))}", style="dim"), soft_wrap=True)
    console.file.flush()
    for problem in problems:
        print_error(problem.code, str(problem))
    return 1 if problems else 0


def _inspected(report: InspectReport) -> str:
    total = sum(file.size for file in report.files)
    codebooks = {part.name: part.modules for part in report.total.storage if part.quantized}
    stored = ", ".join(f"{plural(modules, 'module')} {name}" for name, modules in codebooks.items())
    kind = FORMATS[report.format]
    average = f"{bits(report.bits)} bits per weight, head {bits(report.head_bits)}"
    return safe_text(f"{kind}, {report.architecture}, {size(total)}, {average}") + "\n  " + safe_text(stored)


def _converted(report: ConversionReport) -> str:
    line = f"{plural(report.modules, 'module')}, {size(report.bytes_written)} in {plural(len(report.files), 'file')}"
    if report.decode_digests:
        line += f", {plural(len(report.decode_digests), 'decode digest')}"
    return line


def _print_files(console: Console, compared: tuple[ComparedFile, ...]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for file in compared:
        verdict = Text("identical", style="green") if file.identical else Text("DIFFERS", style="bold red")
        table.add_row(f"  {file.name}", size(file.size), (file.sha256 or "missing")[:_HASH_DIGITS], verdict)
    print_table(console, table)
