"""Tables of expert widths: the histogram over all layers, and layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from espalier_format.cli.console import print_table
from espalier_format.cli.quantities import NOTHING, count, plural
from espalier_format.cli.terminal import safe_text
from espalier_format.operations.inspect_report import PLAIN_WIDTH, width_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from espalier_format.operations.inspect_report import ExpertBankReport, InspectReport

_BAR = 20  # cells of a full histogram bar


def print_summary(console: Console, report: InspectReport) -> None:
    """Print a histogram per component: a row per width, a column per projection, the share of each width as a bar."""
    for component, histogram in report.expert_widths.items():
        banks = [bank for bank in report.expert_banks if bank.component == component]
        _print_histogram(console, f"expert widths, {_extent(component, banks)}", histogram)


def _print_histogram(console: Console, title: str, histogram: Mapping[str, Mapping[str, int]]) -> None:
    table = _table()
    table.add_column("bits")
    for projection in histogram:
        table.add_column(safe_text(projection), justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    everything = sum(sum(counts.values()) for counts in histogram.values())
    for width in _widths(histogram):
        row = [counts.get(width, 0) for counts in histogram.values()]
        share = sum(row) / everything
        bar = Text("█" * round(_BAR * share) or "▏", style="cyan") + Text(f" {share:.1%}", style="dim")
        table.add_row(width, *(count(n) if n else NOTHING for n in row), count(sum(row)), bar)
    means = [_mean(counts) for counts in histogram.values()]
    table.add_row("mean", *means, _mean(_sum(histogram)), "", style="bold")
    console.print(title)
    print_table(console, table)
    console.print()


def print_layers(console: Console, report: InspectReport) -> None:
    """Print a row per bank and projection with its count of experts per width."""
    names = [bank.name for bank in report.expert_banks]
    prefix, suffix = _common(names)
    table = _table()
    table.add_column("layer", no_wrap=True)
    table.add_column("projection", no_wrap=True)
    widths = sorted(
        {w for bank in report.expert_banks for counts in bank.widths.values() for w in counts}, key=width_key
    )
    for width in widths:
        table.add_column(width if width == PLAIN_WIDTH else f"{width} bit", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    for bank in report.expert_banks:
        layer = bank.name[len(prefix) : len(bank.name) - len(suffix)]
        for projection, counts in bank.widths.items():
            cells = (count(counts[width]) if counts.get(width) else NOTHING for width in widths)
            table.add_row(safe_text(layer), safe_text(projection), *cells, _mean(counts))
            layer = ""
    console.print(Text(f"expert widths by layer, {safe_text(prefix)}*{safe_text(suffix)}"), soft_wrap=True)
    print_table(console, table)
    console.print()


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _extent(component: str, banks: list[ExpertBankReport]) -> str:
    sizes = sorted({bank.num_experts for bank in banks})
    experts = count(sizes[0]) if len(sizes) == 1 else f"{count(sizes[0])} to {count(sizes[-1])}"
    place = "" if component == "experts" else f" in {component}"
    return f"{plural(len(banks), 'layer')}{place} of {experts} experts"


def _widths(histogram: Mapping[str, Mapping[str, int]]) -> list[str]:
    return sorted({width for counts in histogram.values() for width in counts}, key=width_key)


def _sum(histogram: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in histogram.values():
        for width, number in counts.items():
            total[width] = total.get(width, 0) + number
    return total


def _mean(counts: Mapping[str, int]) -> str:
    quantized = {width: number for width, number in counts.items() if width != PLAIN_WIDTH}
    experts = sum(quantized.values())
    if not experts:
        return NOTHING
    return f"{sum(float(width) * number for width, number in quantized.items()) / experts:.2f}"


def _common(names: list[str]) -> tuple[str, str]:
    """Return the leading and trailing parts, split at dots, that all names share, so that a layer's number is left."""
    parts = [name.split(".") for name in names]
    if len(names) == 1:
        return "", ""
    leading = _shared(parts)
    trailing = _shared([part[leading:][::-1] for part in parts])
    first = parts[0]
    return "".join(f"{part}." for part in first[:leading]), "".join(
        f".{part}" for part in first[len(first) - trailing :]
    )


def _shared(rows: list[list[str]]) -> int:
    """Return how many first entries all rows share, at least one of each being left over."""
    shared = 0
    for column in zip(*(row[:-1] for row in rows), strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared
