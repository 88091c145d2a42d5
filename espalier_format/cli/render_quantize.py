"""Print a :class:`QuantizeReport` for a person."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.text import Text

from espalier_format.cli.console import open_console
from espalier_format.cli.quantities import FORMATS, bits, count, plural, size
from espalier_format.cli.terminal import print_warnings, safe_text

if TYPE_CHECKING:
    from espalier_format.quantize.report import QuantizeReport


def render_quantize(report: QuantizeReport) -> None:
    """Print the summary on stdout and the warnings on stderr."""
    console = open_console()
    console.print(Text(safe_text(str(report.destination)), style="bold"), soft_wrap=True)
    source, target = FORMATS[report.source_format], FORMATS[report.target_format]
    kept = f", {count(report.kept)} kept" if report.kept else ""
    resumed = f", {count(report.resumed)} of them before this run" if report.resumed else ""
    rows = [
        ("quantized", f"{source} to {target}, {plural(len(report.modules), 'module')}{resumed}{kept}"),
        ("bits", f"{bits(report.bits)} per weight, head {bits(report.head_bits)}"),
        ("error", f"{report.relative_mse:.4g} of the squared weights, effort {report.effort}"),
        *((codebook, plural(number, "module")) for codebook, number in _codebooks(report).items()),
        (
            "written",
            f"{size(report.bytes_written)} in {plural(len(report.files), 'file')}, from {size(report.bytes_read)}",
        ),
        ("next", f"espalier-format verify {safe_text(shlex.quote(str(report.destination)))} --deep"),
    ]
    width = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        console.print(Text.assemble((f"  {label:<{width}}", "dim"), value), soft_wrap=True)
    print_warnings(report.warnings)


def _codebooks(report: QuantizeReport) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for module in report.modules:
        numbers[module.codebook] = numbers.get(module.codebook, 0) + 1
    return dict(sorted(numbers.items(), key=lambda entry: (float(entry[0].rpartition("@")[2]), entry[0])))
