"""Measure the encoder's search on a GPU against exllamav3's: speed and squared error, on the same normal samples.

    python benchmarks/cuda_encode.py [--rings 8448] [--write]

Samples of N(0, 1) in rings of 256, on the device as float32. Ours: rounding to fixed point and `search_on_device`,
with every effort: fast, exact (two passes, as exllamav3 does) and thorough, the default; grids at the ``gain`` of
spec/grids.json, EXL3 codebooks at theirs. Theirs: ``quantize_tiles`` of exllamav3 with the codebook mul1, if exllamav3
is installed. Each is run once to warm up and then twice; the faster counts, by CUDA events. Errors are those of the
decoded values in float64.
With --check some rings of each codebook are compared with the numba back end, bit for bit. With --write the table goes
to benchmarks/results/cuda-encode.md as well, after every row. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from cuda_setup import setup

from espalier_format.codec.codebook import CODEBOOKS, Codebook
from espalier_format.encoder.branch_cost import branch_cost
from espalier_format.encoder.effort import EFFORTS, Effort
from espalier_format.encoder.gains import gain
from espalier_format.kernels.cuda.viterbi import search_on_device

RESULT = Path(__file__).parent / "results" / "cuda-encode.md"
SEED = 20260101
CHECKED_RINGS = 4
RUNS = 2
THEIR_WIDTHS = (1, 2, 3, 4, 5, 6)
LIKE_FOR_LIKE = tuple(f"exl3-mul1@{width}" for width in THEIR_WIDTHS)

BOUNDS = """
## What bounds it

Clock cycles of a multiprocessor for a ring and a step, on one H200 at 1.98 GHz. The third pass shows what a step takes:
256 / (thorough speed) less 256 / (exact speed). Instructions are those of the compiled code.

| form | what is scarce | least | measured |
|---|---|---|---|
| grids, 1 bit | shared memory, 128 bytes a cycle: 2 bytes of cost a state; metrics | 2,048 | 2,420 |
| grids, 2 to 4 bits | the same | 1,150 to 1,410 | 1,570 to 1,850 |
| EXL3, 3 and 4 bits | instructions, 4 a cycle: 960 to 1,020 for 128 states of two rings | 1,960 | 2,640 to 2,750 |
| 5 bits and more | integer multiplication, 64 a cycle: 2 a state | 2,048 | 3,350 to 3,540 |

The aim, 4 times exllamav3 at equal error, is reached for grids from 1 to 4 bits by the fast search, whose error is not
above exllamav3's, and at 1 bit by the exact one too. The exact one would need steps of 1,535, 1,400 and 1,235 cycles at
2, 3 and 4 bits, for the end of the free pass and the last rings take a tenth of the time: 83 to 93 % of what shared
memory can do; it is 73, 75 and 73 %. From 5 bits on it is not reached, by any effort: the metrics take 32 bits there,
so that two rings no longer share an instruction; what is gained instead is error.
"""


def fastest(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the result of some work on the device, and the seconds of its fastest run."""
    result, times = work(), []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return result, min(times)


def encode(samples: torch.Tensor, codebook: Codebook, effort: Effort, *, check: bool) -> tuple[float, float]:
    """Return weights per second and the mean squared error, having compared some rings with the CPU if asked to."""
    cost = branch_cost(codebook)
    unit = codebook.value_scale * gain(codebook)
    low, high = int(cost.codes.min()) - cost.reach, int(cost.codes.max()) + cost.reach

    def work() -> torch.Tensor:
        targets = (samples.double() * (cost.units / unit)).round().clamp(low, high).to(torch.int16)
        return search_on_device(targets, cost, effort)

    states, seconds = fastest(work)
    if check:
        from espalier_format.encoder import numba_backend

        few = samples[:CHECKED_RINGS].cpu().numpy()
        expected = numba_backend.search(cost.fixed_point(few, gain(codebook)), cost, effort, CHECKED_RINGS)
        if not np.array_equal(states[:CHECKED_RINGS].cpu().numpy().view(np.uint16), expected):
            sys.exit(f"{codebook.name}: the states differ from those of the CPU")
    values = torch.from_numpy(codebook.codes.astype(np.float64) * unit).to(samples.device)
    error = (values[states.long() & 0xFFFF] - samples.double()).square().mean()
    return samples.numel() / seconds, float(error)


def theirs(samples: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Return exllamav3's weights per second and error for every width, {} without exllamav3."""
    try:
        import exllamav3.ext  # noqa: F401 - builds or loads its extension
        from exllamav3.modules.quant.exl3_lib.quantize import quantize_tiles
    except ImportError:
        return {}
    found = {}
    for width in THEIR_WIDTHS:
        options = {"K": width, "mul1": True, "devices": [0]}
        tiles, seconds = fastest(lambda options=options: quantize_tiles(samples.clone(), options)[0])
        error = (tiles.double() - samples.double()).square().mean()
        found[str(width)] = samples.numel() / seconds, float(error)
    return found


def row(*columns: str) -> str:
    """Format a row of a table, and show progress."""
    line = f"| {' | '.join(columns)} |"
    print(line, file=sys.stderr, flush=True)
    return line


def measure(samples: torch.Tensor, *, check: bool) -> Iterator[str]:
    """Measure and yield the report's lines, in Markdown."""
    peer = theirs(samples)
    yield from (
        "# Encoding on a GPU",
        "",
        setup(),
        "Made by `python benchmarks/cuda_encode.py --write`.",
        "",
        f"{samples.numel():,} samples of N(0, 1) on the device. Speed in million weights a second; ×: over exllamav3's",
        "`quantize_tiles` (mul1, 2 passes) at the same width in the same run. Error: mean square error of the decoded",
        "values; a minus means that it is lower than exllamav3's. The tests compare states with those of the CPU.",
        "",
        "| codebook | fast: Mw/s | × | error | exact: Mw/s | × | error | thorough: Mw/s | × | error | theirs | error |",
        f"|{'---|' * 12}",
    )
    grids = [name for name, codebook in CODEBOOKS.items() if codebook.is_grid]
    for name in (*grids, *LIKE_FOR_LIKE):
        codebook = CODEBOOKS[name]
        their_speed, their_error = peer.get(codebook.width, (0.0, 0.0))
        columns = [name]
        for effort in EFFORTS.values():
            speed, error = encode(samples, codebook, effort, check=check)
            columns += [
                f"{speed / 1e6:.1f}",
                f"{speed / their_speed:.2f}" if their_speed else "–",
                f"{error:.5g}" + (f" ({100 * (error / their_error - 1):+.1f} %)" if their_speed else ""),
            ]
        columns += [f"{their_speed / 1e6:.1f}", f"{their_error:.5g}"] if their_speed else ["–", "–"]
        yield row(*columns)


def main() -> None:
    """Parse the arguments and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rings", type=int, default=8448, help="rings of 256 samples")
    parser.add_argument("--check", action="store_true", help="compare with the CPU")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} in benchmarks/results")
    arguments = parser.parse_args()
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    samples = torch.randn(arguments.rings, 256, device="cuda", generator=generator)
    report = ""
    for line in measure(samples, check=arguments.check):
        report += line + "\n"
        if arguments.write:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(report, encoding="utf-8")
    report += BOUNDS
    if arguments.write:
        RESULT.write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
