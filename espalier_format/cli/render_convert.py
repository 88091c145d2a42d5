"""Print a :class:`ConversionReport` for a person: what was written, where, and what to do next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.text import Text

from espalier_format.cli.console import open_console
from espalier_format.cli.quantities import FORMATS, count, plural, size
from espalier_format.cli.terminal import print_warnings, safe_text

if TYPE_CHECKING:
    from espalier_format.converters.report import ConversionReport


def render_convert(report: ConversionReport) -> None:
    """Print the summary on stdout and the warnings on stderr."""
    console = open_console()
    source = FORMATS.get(report.source_format, report.source_format)
    target = FORMATS.get(report.target_format, report.target_format)
    destination = safe_text(str(report.destination))
    console.print(Text(destination, style="bold"), soft_wrap=True)
    resumed = f", {count(report.resumed)} of them before this run" if report.resumed else ""
    files = f"{plural(len(report.files), 'file')}{resumed}"
    rows = [
        ("converted", f"{source} to {target}, {plural(report.modules, 'quantized module')}"),
        ("written", f"{size(report.bytes_written)} in {files}; read {size(report.bytes_read)}"),
    ]
    if report.decode_digests:
        rows.append(("digests", f"{plural(len(report.decode_digests), 'decode digest')} in the manifest"))
    rows.append(("next", f"espalier-format {_next_command(report)}"))
    for label, value in rows:
        console.print(Text.assemble((f"  {label:<11}", "dim"), value), soft_wrap=True)
    print_warnings(report.warnings)


def _next_command(report: ConversionReport) -> str:
    quoted = safe_text(shlex.quote(str(report.destination)))
    if report.target_format == "hf":
        return f"inspect {quoted}"
    return f"verify {quoted} --deep" if report.decode_digests else f"verify {quoted}"
