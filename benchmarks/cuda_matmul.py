"""Measure products with quantized weights on a CUDA device, beside exllamav3 where it is installed.

    python benchmarks/cuda_matmul.py [--write]

Each figure is the median time of one product, in microseconds: a CUDA graph of products with different modules, enough
of them that none is found in the L2 cache, replayed some times. Inputs and outputs are float16, rotation 128 on both
sides, all of it included. exllamav3 runs its mul1 codebook at the same width. One product follows the other, and ours
starts while the one before it ends; in a model there are other kernels between, so that for some shapes the same is
measured with an addition of torch's before each product, whose own time is in all figures then. With --write the tables
go to benchmarks/results/cuda-matmul.md as well. Takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cuda_setup import setup

from espalier_format.codec.codebook import get_codebook
from espalier_format.kernels import ops

SHAPES = ((2048, 512), (512, 2048), (2048, 4096), (4096, 4096), (4096, 14336), (8192, 28672), (2048, 248320))
GRIDS = {1: "e2m1@1", 2: "e2m1@2", 3: "int5@3", 4: "int6@4", 6: "int8@6"}
ROWS = (1, 8, 32)
BYTES = 200 << 20  # of weights in a graph: more than three times the L2 cache of an H200
BETWEEN = (((2048, 512), 2), ((2048, 4096), 2), ((2048, 4096), 4), ((4096, 14336), 2), ((4096, 14336), 4))
RESULT = Path(__file__).parent / "results" / "cuda-matmul.md"
NOTES = "## What bounds them"  # from here on written by hand: kept when the tables are written again

Product = Callable[[torch.Tensor], object]


def graph_time(products: Sequence[Product], x: torch.Tensor, replays: int = 7) -> float:
    """Return the median microseconds of one product, from replays of a graph of all of them."""
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(products))
    return statistics.median(times)


def trellises(k: int, n: int, name: str) -> list[torch.Tensor]:
    """Make enough random trellises of a codebook."""
    halfwords = get_codebook(name).halfwords_per_tile
    shape = (k // 16, n // 16, halfwords)
    count = max(BYTES // (2 * math.prod(shape)), 2)
    return [torch.randint(-32768, 32768, shape, dtype=torch.int16, device="cuda") for _ in range(count)]


def ours(k: int, n: int, name: str, packed: Sequence[torch.Tensor]) -> list[Product]:
    """Products of this package."""
    suh, svh = (torch.ones(size, dtype=torch.float16, device="cuda") for size in (k, n))

    def make(trellis: torch.Tensor) -> Product:
        return lambda x: ops.matmul(x, trellis, suh, svh, None, name, 128, 128, k, n)

    return [make(trellis) for trellis in packed]


def theirs(k: int, n: int, packed: Sequence[torch.Tensor]) -> list[Product]:
    """Products of exllamav3."""
    from exllamav3.modules.quant.exl3 import LinearEXL3

    suh, svh = (torch.ones(size, dtype=torch.float16, device="cuda") for size in (k, n))
    mark = torch.tensor(0, dtype=torch.int32, device="cuda")

    def make(trellis: torch.Tensor) -> Product:
        layer = LinearEXL3(None, k, n, suh=suh, svh=svh, trellis=trellis, mul1=mark)
        return lambda x: layer.forward(x, {})

    return [make(trellis) for trellis in packed]


def copy_rate() -> float:
    """Return the rate of a device-to-device copy in GB/s, bytes read and written: of a kernel, not of a copy engine."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.numel() / statistics.median(times) / 1e9


def peer_time(products: Sequence[Product] | None, x: torch.Tensor) -> float | None:
    """Return the time of exllamav3's products, None where there is none or it refuses the shape."""
    try:
        return None if products is None else graph_time(products, x)
    except RuntimeError as error:
        print(f"exllamav3: {error}", file=sys.stderr)
        return None


@dataclass(frozen=True)
class Row:
    """One shape, width and number of rows: microseconds of a product."""

    shape: tuple[int, int]
    width: int
    rows: int
    grid: float
    mul1: float
    peer: float | None

    def line(self, copied: float) -> str:
        """Write a row of the table."""
        k, n = self.shape
        rate = k * n * self.width / 8 / self.grid / 1000
        peer, ratios = "–", "– | –"
        if self.peer is not None:
            peer, ratios = f"{self.peer:.2f}", f"{self.peer / self.grid:.2f} | {self.peer / self.mul1:.2f}"
        return (
            f"| {k}×{n} | {self.width} | {self.rows} | {ratios} | {GRIDS[self.width]} | {self.grid:.2f} | "
            f"{self.mul1:.2f} | {peer} | {rate:.0f} | {100 * rate / copied:.0f} % |"
        )


def measure() -> Iterator[Row]:
    """Measure everything, one row after the other."""
    has_peer = importlib.util.find_spec("exllamav3") is not None
    for k, n in SHAPES:
        for width, name in GRIDS.items():
            packed, peer_packed = trellises(k, n, name), trellises(k, n, f"exl3-mul1@{width}")
            grid, mul1 = ours(k, n, name, packed), ours(k, n, f"exl3-mul1@{width}", peer_packed)
            peer = theirs(k, n, peer_packed) if has_peer else None
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda").half()
                yield Row((k, n), width, rows, graph_time(grid, x), graph_time(mul1, x), peer_time(peer, x))


def measure_between() -> Iterator[str]:
    """Measure products of one row with another kernel before each; yield lines of a table."""
    has_peer = importlib.util.find_spec("exllamav3") is not None
    other = torch.zeros(1 << 12, dtype=torch.float16, device="cuda")

    def after_another(products: Sequence[Product]) -> list[Product]:
        def follow(product: Product) -> Product:
            return lambda x: (other.add_(1), product(x))

        return [follow(product) for product in products]

    for (k, n), width in BETWEEN:
        x = torch.randn(1, k, device="cuda").half()
        packed, peer_packed = trellises(k, n, GRIDS[width]), trellises(k, n, f"exl3-mul1@{width}")
        alone = graph_time([lambda _: other.add_(1)] * len(packed), x)
        grid = graph_time(after_another(ours(k, n, GRIDS[width], packed)), x)
        mul1 = graph_time(after_another(ours(k, n, f"exl3-mul1@{width}", peer_packed)), x)
        peer = peer_time(after_another(theirs(k, n, peer_packed)), x) if has_peer else None
        ratios = "– | –" if peer is None else f"{peer / grid:.2f} | {peer / mul1:.2f}"
        shown = "–" if peer is None else f"{peer:.2f}"
        yield f"| {k}×{n} | {width} | {ratios} | {grid:.2f} | {mul1:.2f} | {shown} | {alone:.2f} |"


def report(measured: Sequence[Row], between: Sequence[str], copied: float) -> str:
    """Write the page, in Markdown: what was measured on, the ratios summed up, and the tables."""
    lines = [
        "# Products with quantized weights on a CUDA device",
        "",
        setup(),
        "",
        f"A device copy moves {copied:.0f} GB/s (read and written). Made by `python benchmarks/cuda_matmul.py",
        "--write`; its text says how. Ratio: time of exllamav3 over ours, so above 1 is faster. GB/s count compressed",
        "bytes, against those of the copy.",
        "",
        "| codebook | rows | geometric mean | smallest | smallest of the first three shapes |",
        "|---|---|---|---|---|",
    ]
    for which, rows in itertools.product(("grid", "mul1"), ROWS):
        found = [(row.shape, row.peer / getattr(row, which)) for row in measured if row.peer and row.rows == rows]
        if found:
            mean = statistics.geometric_mean(ratio for _, ratio in found)
            small = min((ratio for shape, ratio in found if shape in SHAPES[:3]), default=math.nan)
            lines.append(f"| {which} | {rows} | {mean:.2f} | {min(ratio for _, ratio in found):.2f} | {small:.2f} |")
    lines += [
        "",
        "| shape | width | rows | grid ratio | mul1 ratio | grid | grid µs | mul1 µs | exllamav3 µs | GB/s | of copy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row.line(copied) for row in measured),
        "",
        "One row, with an addition of torch's to 4096 numbers before each product; its own time, the last column, is",
        "in all others.",
        "",
        "| shape | width | grid ratio | mul1 ratio | grid µs | mul1 µs | exllamav3 µs | addition µs |",
        "|---|---|---|---|---|---|---|---|",
        *between,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse the arguments and report; the file is written again after every row, lest a long run be lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} in benchmarks/results")
    arguments = parser.parse_args()
    notes = RESULT.read_text(encoding="utf-8").partition(NOTES)[1:] if RESULT.exists() else ()
    copied = copy_rate()
    between = list(measure_between())
    measured: list[Row] = []
    for row in measure():
        measured.append(row)
        print(row.line(copied), file=sys.stderr, flush=True)
        if arguments.write:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text("\n".join([report(measured, between, copied), "".join(notes)]), encoding="utf-8")
    print(report(measured, between, copied))


if __name__ == "__main__":
    main()
