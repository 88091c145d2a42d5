"""Measure decoding on a GPU: packed weights to float16 with both rotations, against exllamav3 and a device copy.

    python benchmarks/cuda_decode.py [--size 8192] [--write]

Random modules of size x size weights, rotation 128 on both sides. Each figure is the median of replays of a CUDA graph
of eight calls on four different trellises, so that no call finds its input in the cache. exllamav3 is measured in the
same run, in the same way, where it is installed with its extension: ``reconstruct_had_slice`` at the same width, with
its mul1 or mcg codebook (mul1 for grids, which it does not have). With --write the table goes to
benchmarks/results/cuda-decode.md as well. Takes less than a minute once kernels are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_setup import setup

CALLS = 8
TRELLISES = 4
REPLAYS = 15
RESULT = Path(__file__).parent / "results" / "cuda-decode.md"
NOTES = "## What bounds it"  # written by hand: kept when the tables are written again
OTHERS = (
    ("e2m1@2", 128, 128, "bfloat16"),
    ("exl3-mul1@2", 128, 128, "bfloat16"),
    ("e2m1@2", 0, 0, "float16"),
    ("e2m1@2", 64, 64, "float16"),
    ("exl3-mul1@2", 0, 0, "float16"),
    ("exl3-mul1@2", 256, 256, "float16"),
)
"""Codebook, rotation in and out, dtype: measured beside the main table."""


def graph_time(work: Callable[[int], object]) -> float:
    """Seconds of one call: ``work`` gets the number of the call."""
    import torch

    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            work(call)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS / 1e3)
    return sorted(times)[REPLAYS // 2]


def copy_rate() -> float:
    """Bytes read and written a second by a copy of 1 GiB on the device.

    Outside a graph: one node of a graph that copies 1 GiB was seen to move a third less.
    """
    import torch

    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / sorted(times)[REPLAYS // 2]


def peer() -> Any:
    """Return exllamav3's extension, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        from exllamav3.ext import exllamav3_ext

        return exllamav3_ext
    return None


class Module:
    """Random tensors of one codebook."""

    def __init__(self, name: str, size: int) -> None:
        import torch

        from espalier_format.codec.codebook import get_codebook

        self.name, self.size, self.codebook = name, size, get_codebook(name)
        shape = (size // 16, size // 16, self.codebook.halfwords_per_tile)
        options = {"dtype": torch.int16, "device": "cuda"}
        self.trellises = [torch.randint(-32768, 32767, shape, **options) for _ in range(TRELLISES)]
        self.suh = (0.02 * torch.randn(size, device="cuda")).half()
        self.svh = torch.randn(size, device="cuda").half()

    def moved(self) -> int:
        """Bytes that have to be read and written, at two bytes a weight."""
        return self.trellises[0].numel() * 2 + 2 * self.size**2

    def time(self, rotation_in: int, rotation_out: int, dtype: str) -> float:
        """Seconds of one decode_weight."""
        import torch

        from espalier_format.kernels.decode import decode_weight

        rest = (self.name, rotation_in, rotation_out, self.size, self.size, getattr(torch, dtype))
        return graph_time(lambda call: decode_weight(self.trellises[call % TRELLISES], self.suh, self.svh, *rest))

    def peer_time(self, extension: Any) -> float | None:
        """Seconds of exllamav3 at this width; None where it has no such width."""
        import torch

        if self.codebook.half_steps % 2:
            return None
        weight = torch.empty((self.size, self.size), dtype=torch.float16, device="cuda")
        mcg = self.codebook.family == "exl3-mcg"
        rest = (self.suh, self.svh, self.codebook.half_steps // 2, mcg, not mcg, 0)
        return graph_time(lambda call: extension.reconstruct_had_slice(weight, self.trellises[call % TRELLISES], *rest))


def first_compile(name: str) -> tuple[float, float]:
    """Seconds to compile the weight kernel of a codebook, and to load it again from disk."""
    import tempfile
    from unittest import mock

    from espalier_format.codec.codebook import get_codebook
    from espalier_format.kernels.cuda import compiler, decode

    macros, _ = decode.weight_macros(get_codebook(name), 128, 128, False, 227 << 10, 228 << 10)
    times = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {compiler.CACHE_VARIABLE: folder}):
        for _ in range(2):
            compiler._open_cache.cache_clear()  # noqa: SLF001
            start = time.perf_counter()
            compiler.compile_cubin("decode_weight", macros, "sm_90")
            times.append(time.perf_counter() - start)
    compiler._open_cache.cache_clear()  # noqa: SLF001
    return times[0], times[1]


def measure(size: int) -> list[str]:
    """Measure every codebook and return the report's lines, in Markdown."""
    from espalier_format.codec.codebook import CODEBOOKS

    extension = peer()
    copy = copy_rate()
    compiled, kept = first_compile("exl3-mul1@2")
    lines = [
        "# Decoding on a GPU",
        "",
        setup(),
        f"Modules of {size} x {size} weights to float16, rotation 128/128, medians of {REPLAYS} replays of a graph.",
        "Made by `python benchmarks/cuda_decode.py --write`.",
        "",
        f"A copy of 1 GiB on the device moved {copy / 1e9:.0f} GB/s, bytes read and written; the goals are 60 % of it",
        "(trellis read, weights written) and 2.0 times exllamav3.",
        f"Compiling the kernel took {compiled:.2f} s the first time, finding it on disk {kept * 1e3:.1f} ms.",
        "",
        "| codebook | exllamav3's time over ours | share of the copy rate | ms | GB/s | exllamav3, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name in CODEBOOKS:
        module = Module(name, size)
        seconds = module.time(128, 128, "float16")
        theirs = None if extension is None else module.peer_time(extension)
        ratio, their_ms = ("–", "–") if theirs is None else (f"{theirs / seconds:.2f}", f"{theirs * 1e3:.4f}")
        rate = module.moved() / seconds
        cells = (ratio, f"{100 * rate / copy:.0f} %", f"{seconds * 1e3:.4f}", f"{rate / 1e9:.0f}", their_ms)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    lines += [
        "",
        "Other dtypes and rotations:",
        "",
        "| codebook | rotation | dtype | share | ms |",
        "|---|---|---|---|---|",
    ]
    for name, rotation_in, rotation_out, dtype in OTHERS:
        module = Module(name, size)
        seconds = module.time(rotation_in, rotation_out, dtype)
        share = 100 * module.moved() / seconds / copy
        lines.append(f"| {name} | {rotation_in}/{rotation_out} | {dtype} | {share:.0f} % | {seconds * 1e3:.4f} |")
    return lines


def main() -> None:
    """Parse the arguments, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="features on both sides, a multiple of 256")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} in benchmarks/results")
    arguments = parser.parse_args()
    report = "\n".join(measure(arguments.size)) + "\n"
    print(report)
    if arguments.write:
        notes = RESULT.read_text(encoding="utf-8").partition(NOTES)[1:] if RESULT.exists() else ()
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join([report, "".join(notes)]), encoding="utf-8")


if __name__ == "__main__":
    main()
