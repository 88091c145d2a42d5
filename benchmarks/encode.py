"""Measure the encoder on a CPU: squared error on normal samples, and speed, for grids and EXL3 codebooks.

    python benchmarks/encode.py [--rings 4096] [--exl3-rings 1024] [--write]

Every codebook encodes the same samples of N(0, 1), in rings of 256; --exl3-rings at a time they are normalised to a
mean square of 1. Grids are scaled by the ``gain`` of spec/grids.json, EXL3 codebooks by the best scale for a few of
the samples. Widths from 5 bits on, and EXL3 codebooks, take only the first --exl3-rings rings. Speed is weights a
second of processor time of one thread, the best of seven runs: what else the machine does counts little. With --write
the tables go to benchmarks/results/encode-cpu.md as well. Takes about five minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import resources
from math import log10
from pathlib import Path

import numpy as np
from decode import cpu_model

from espalier_format.codec.codebook import CODEBOOKS, Codebook
from espalier_format.encoder import EXACT, FAST, THOROUGH, Effort, encode_tiles

RESULT = Path(__file__).parent / "results" / "encode-cpu.md"
GRIDS = json.loads((resources.files("espalier_format.spec") / "grids.json").read_text(encoding="utf-8"))
SEED = 20260101
SEARCH_RINGS = 64
SPEED_RINGS = 32


def squared_errors(rings: np.ndarray, codebook: Codebook, scale: float, effort: Effort = THOROUGH) -> np.ndarray:
    """Mean squared error of each ring."""
    threads = os.cpu_count() or 1
    return encode_tiles(rings, codebook, scale=scale, effort=effort, backend="numba", threads=threads).errors / 256


def best_scale(rings: np.ndarray, codebook: Codebook) -> float:
    """Search the scale of least error, by golden sections of 0.9 to 1.5 over the standard deviation of the codes."""
    unit = 1 / float(codebook.codes.astype(np.float64).std())
    golden = (5**0.5 - 1) / 2
    low, high = 0.9 * unit, 1.5 * unit
    known: dict[float, float] = {}

    def error(scale: float) -> float:
        if scale not in known:
            known[scale] = float(squared_errors(rings, codebook, scale).mean())
        return known[scale]

    while high - low > 0.02 * unit:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if error(left) < error(right):
            high = right
        else:
            low = left
    return min(known, key=lambda scale: known[scale])


def speeds(rings: np.ndarray, codebook: Codebook, scale: float, efforts: Sequence[Effort]) -> list[str]:
    """Weights a second of processor time, on one thread; the efforts take turns, so that they meet the same machine."""
    rings = rings[:SPEED_RINGS]
    fastest = [float("inf")] * len(efforts)
    for _ in range(7):
        for index, effort in enumerate(efforts):
            start = time.thread_time()
            encode_tiles(rings, codebook, scale=scale, effort=effort, backend="numba")
            fastest[index] = min(fastest[index], time.thread_time() - start)
    return [f"{rings.size / seconds:,.0f}" for seconds in fastest]


def error_cells(codebook: Codebook, errors: np.ndarray, rings: np.ndarray) -> list[str]:
    """Samples, error with its standard error, distance to the bound.

    Of the standard error, what follows from the energy of the rings is left out: the samples are normalised.
    """
    mse = float(errors.mean())
    rest = errors - mse * np.square(rings[: len(errors)]).mean(axis=1)
    deviation = 100 * float(rest.std()) / len(errors) ** 0.5 / mse
    return [f"{errors.size * 256:,}", f"{mse:.4g} ± {deviation:.2f} %", f"{10 * log10(mse * 4**codebook.bits):.3f}"]


def percent(value: float, reference: float) -> str:
    """How much larger a value is."""
    return f"{100 * (value / reference - 1):+.2f} %"


def row(*columns: str) -> str:
    """Format a row of a table, and show progress."""
    line = f"| {' | '.join(columns)} |"
    print(line, file=sys.stderr, flush=True)
    return line


def measure(rings: np.ndarray, fewer: int) -> list[str]:
    """Measure every codebook and return the report's lines, in Markdown."""
    import numba

    versions = f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    lines = [
        "# Encoding on a CPU",
        "",
        f"{cpu_model()}, {os.cpu_count()} cores; {versions}.",
        "Made by `python benchmarks/encode.py --write`.",
        "",
        f"Samples of N(0, 1) from `numpy.random.default_rng({SEED})`, each {fewer * 256:,} normalised to a mean square",
        "of 1; thorough tail-biting search, the default, where it does not say exact or fast. The bound is that",
        "of a Gaussian source, 4^-bits. Speed: weights a second of processor time of one thread.",
        "",
        "## Grids",
        "",
        '"Over open" compares with the open trellis, `mse` of spec/grids.json (262,144 other samples); goal: at most',
        "2.5 % up to 1.5 bits, 1.5 % from 2 to 4. Goal for the speed at 2 bits, exact: 50,000, at least 12,000.",
        "",
        "| codebook | samples | MSE | dB over bound | over open | weights/s | exact | weights/s | fast | weights/s |",
        f"|{'---|' * 10}",
    ]
    on_fewer: dict[str, float] = {}
    for codebook in (c for c in CODEBOOKS.values() if c.is_grid):
        constants = GRIDS[codebook.family]["widths"][codebook.width]
        samples, scale = rings if codebook.bits < 5 else rings[:fewer], constants["gain"]
        errors = squared_errors(samples, codebook, scale)
        on_fewer[codebook.width] = float(errors[:fewer].mean())
        efforts = (THOROUGH, EXACT, FAST)
        columns: list[str] = []
        for effort, rate in zip(efforts, speeds(rings, codebook, scale, efforts), strict=True):
            found = errors if effort is THOROUGH else squared_errors(samples, codebook, scale, effort)
            columns += [percent(float(found.mean()), constants["mse"]), rate]
        lines.append(row(codebook.name, *error_cells(codebook, errors, rings), *columns))
    lines += [
        "",
        "## EXL3 codebooks through the same encoder",
        "",
        f'At the best scale for {SEARCH_RINGS * 256:,} of the samples. "Over grid" compares with the grid of that',
        "width on the same samples; a plus means that the grid is better.",
        "",
        "| codebook | samples | MSE | dB over the bound | over grid | weights/s | scale |",
        "|---|---|---|---|---|---|---|",
    ]
    for codebook in (c for c in CODEBOOKS.values() if not c.is_grid):
        scale = best_scale(rings[:SEARCH_RINGS], codebook)
        errors = squared_errors(rings[:fewer], codebook, scale)
        grid = on_fewer.get(codebook.width)
        over = "–" if grid is None else percent(float(errors.mean()), grid)
        columns = [over, *speeds(rings, codebook, scale, (THOROUGH,)), f"{scale:.3f}"]
        lines.append(row(codebook.name, *error_cells(codebook, errors, rings), *columns))
    return lines


def main() -> None:
    """Parse the arguments and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rings", type=int, default=4096, help="rings of 256 samples for grids up to 4 bits")
    parser.add_argument("--exl3-rings", type=int, default=1024, help="rings for the rest; at most --rings")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} in benchmarks/results")
    arguments = parser.parse_args()
    rings = np.random.default_rng(SEED).standard_normal((arguments.rings, 256))
    fewer = min(arguments.exl3_rings, arguments.rings)
    for start in range(0, len(rings), fewer):
        rings[start : start + fewer] /= np.square(rings[start : start + fewer]).mean() ** 0.5
    report = "\n".join(measure(rings, fewer)) + "\n"
    print(report)
    if arguments.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
