"""Print an :class:`InspectReport` for a person: summary, components, expert widths, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from espalier_format.cli.console import open_console, print_table
from espalier_format.cli.quantities import FORMATS, NOTHING, bits, count, plural, size, weights
from espalier_format.cli.render_experts import print_layers, print_summary
from espalier_format.cli.terminal import print_warnings, safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from espalier_format.operations.inspect_report import ComponentReport, InspectReport, Storage

_MAX_LISTED = 12  # files or padded modules named one by one; --json has all


def render_inspect(report: InspectReport, *, experts: bool) -> None:
    """Print the report on stdout and its warnings on stderr; ``experts`` adds the widths of each layer."""
    console = open_console()
    _summary(console, report)
    _components(console, report)
    if report.expert_banks:
        print_summary(console, report)
        if experts:
            print_layers(console, report)
    _files(console, report)
    _padded(console, report)
    print_warnings(report.warnings)


def _summary(console: Console, report: InspectReport) -> None:
    kind = FORMATS[report.format]
    if report.format_version is not None:
        kind += f" {report.format_version}"
    if report.format == "plain" and report.quant_method is not None:
        kind += f", {report.quant_method} (listed as stored)"
    if report.producer is not None:
        kind += f", written by {report.producer}"
    rows = [("format", kind)]
    if report.architecture is not None:
        model = report.architecture if report.model_type is None else f"{report.architecture} ({report.model_type})"
        rows.append(("model", model))
    if report.bits is not None or report.head_bits is not None:
        rows.append(("average", _average(report)))
    shards = sum(file.kind == "shard" for file in report.files)
    total = sum(file.size for file in report.files)
    rows.append(("size", f"{size(total)} in {plural(len(report.files), 'file')}, {plural(shards, 'shard')}"))
    console.print(Text(safe_text(report.path), style="bold"), soft_wrap=True)
    for label, value in rows:
        console.print(Text.assemble((f"  {label:<9}", "dim"), safe_text(value)), soft_wrap=True)
    console.print()


def _average(report: InspectReport) -> str:
    parts = []
    if report.bits is not None:
        parts.append(f"{bits(report.bits)} bits per weight ({bits(report.bits_with_scales)} with scales)")
    if report.head_bits is not None:
        parts.append(f"head {bits(report.head_bits)}")
    return ", ".join(parts)


def _components(console: Console, report: InspectReport) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("component", no_wrap=True)
    table.add_column("stored as", no_wrap=True)
    for heading in ("modules", "weights", "bits", "+scales", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for component in report.components:
        _component_rows(table, component)
    total = report.total
    table.add_row()
    quantized = total.quantized
    if quantized.modules and total.plain.weights:
        table.add_row("quantized", "", *_numbers(quantized), style="dim")
        table.add_row("plain", "", *_numbers(total.plain), style="dim")
    everything = quantized.weights + total.plain.weights
    table.add_row(
        "total",
        "",
        count(quantized.modules) if quantized.modules else NOTHING,
        weights(everything),
        "",
        "",
        size(total.bytes),
        style="bold",
    )
    print_table(console, table)
    if report.padding_note is not None:
        console.print(Text(safe_text(report.padding_note), style="dim"), soft_wrap=True)
    console.print()


def _component_rows(table: Table, component: ComponentReport) -> None:
    label = component.name
    codebooks = [part for part in component.storage if part.quantized]
    for part in codebooks:
        table.add_row(label, part.name, *_numbers(part))
        label = ""
    if len(codebooks) > 1:
        table.add_row("", "together", *_numbers(component.quantized), style="bold")
    for part in component.storage:
        if not part.quantized:
            table.add_row(label, part.name, *_numbers(part))
            label = ""


def _numbers(part: Storage) -> tuple[str, ...]:
    return (
        count(part.modules) if part.modules else NOTHING,
        weights(part.weights),
        bits(part.bits),
        bits(part.bits_with_scales) if part.quantized else "",
        size(part.bytes),
    )


def _files(console: Console, report: InspectReport) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    shown = sorted(report.files, key=lambda file: -file.size)[:_MAX_LISTED]
    for file in shown:
        table.add_row(Text(safe_text(file.name)), size(file.size))
    rest = len(report.files) - len(shown)
    if rest:
        left = sum(file.size for file in report.files) - sum(file.size for file in shown)
        table.add_row(f"{count(rest)} more", size(left), style="dim")
    print_table(console, table)


def _padded(console: Console, report: InspectReport) -> None:
    if not report.padded_modules:
        return
    console.print()
    console.print(
        Text(
            f"{plural(len(report.padded_modules), 'module')} of unknown true size, counted with padding "
            "(cannot be converted with --to hf):",
            style="yellow",
        )
    )
    for name in report.padded_modules[:_MAX_LISTED]:
        console.print(Text(f"  {safe_text(name)}"), soft_wrap=True)
    rest = len(report.padded_modules) - _MAX_LISTED
    if rest > 0:
        console.print(Text(f"  {count(rest)} more", style="dim"))
