"""Measure decoding on a CPU: weights to BF16 with numpy and torch on one thread, codes with their digest on two.

    python benchmarks/decode.py [--size 4096] [--write]

Each figure is the best of a few runs on random modules of size x size weights, rotation 128 on both sides; one thread
means that of the library too: the script starts itself again with OMP_NUM_THREADS and the like set to 1. With --write
the table goes to benchmarks/results/decode-cpu.md as well. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

SINGLE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
CODEBOOKS = (
    "e2m1@2",
    "int5@2.5",
    "int5@3",
    "int6@3.5",
    "int6@4",
    "exl3-mcg@3",
    "exl3-mul1@2",
    "exl3-mul1@2.5",
    "exl3-mul1@4",
)
TARGETS = {"numpy": 20, "torch": 60, "codes": 100}
RESULT = Path(__file__).parent / "results" / "decode-cpu.md"


def cpu_model() -> str:
    """Name the processor, as Linux or else Python knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def best_rate(work: Callable[[], object], weights: int, runs: int) -> float:
    """Millions of weights a second of the fastest run, after one run that is not counted."""
    work()
    fastest = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return weights / fastest / 1e6


def measure(size: int, runs: int) -> list[str]:
    """Measure every codebook and return the report's lines, in Markdown."""
    import numpy as np

    from espalier_format.codec.codebook import get_codebook
    from espalier_format.kernels import numpy_decoder
    from espalier_format.kernels.digest import decode_digest

    has_torch = importlib.util.find_spec("torch") is not None
    versions = [f"Python {platform.python_version()}", f"numpy {np.__version__}"]
    if has_torch:
        import torch

        from espalier_format.kernels import torch_decoder

        torch.set_num_threads(1)
        versions.append(f"torch {torch.__version__}")
    rng = np.random.default_rng(0)
    lines = [
        "# Decoding on a CPU",
        "",
        f"{cpu_model()}, {os.cpu_count()} cores; {', '.join(versions)}.",
        f"Modules of {size} x {size} weights, rotation 128/128, best of {runs} runs.",
        "Made by `python benchmarks/decode.py --write`.",
        "",
        "Millions of weights a second, and in brackets that over the goal of",
        f"{TARGETS['numpy']}, {TARGETS['torch']} and {TARGETS['codes']}:",
        "",
        "| codebook | numpy to BF16, 1 thread | torch to BF16, 1 thread | codes and SHA-256, 2 threads |",
        "|---|---|---|---|",
    ]
    for name in CODEBOOKS:
        codebook = get_codebook(name)
        shape = (size // 16, size // 16, codebook.halfwords_per_tile)
        trellis = rng.integers(-32768, 32768, shape).astype(np.int16)
        suh = (0.02 * rng.standard_normal(size)).astype(np.float16)
        svh = rng.standard_normal(size).astype(np.float16)
        arrays = (trellis, suh, svh)
        rest = (codebook, 128, 128, size, size, "bfloat16")
        rates = {"numpy": best_rate(lambda a=arrays, r=rest: numpy_decoder.decode_weight(*a, *r), size**2, runs)}
        if has_torch:
            tensors = tuple(torch.from_numpy(array) for array in arrays)
            rates["torch"] = best_rate(lambda t=tensors, r=rest: torch_decoder.decode_weight(*t, *r), size**2, runs)
        rates["codes"] = best_rate(lambda t=trellis, c=codebook: decode_digest(t, c, threads=2), size**2, runs)
        cells = [f"{rates[key]:.0f} ({rates[key] / TARGETS[key]:.1f})" if key in rates else "–" for key in TARGETS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return lines


def main() -> None:
    """Parse the arguments, start again with single-threaded libraries, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="features on both sides, a multiple of 128")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} in benchmarks/results")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SINGLE_THREAD.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SINGLE_THREAD)
    report = "\n".join(measure(arguments.size, arguments.runs)) + "\n"
    print(report)
    if arguments.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
