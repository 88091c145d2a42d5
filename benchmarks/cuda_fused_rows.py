"""Measure from how many rows of activations on it is faster to decode a weight first, and multiply with cuBLAS then.

    python benchmarks/cuda_fused_rows.py

Modules with rotation 128/128, float16, products in a CUDA graph with as many modules as the L2 cache does not hold.
Each figure is the time with the weight decoded first over that with the weight decoded inside the product: above 1, the
second is faster. `kernels.matmul.fused_rows` follows from it. Takes half a minute on an H200.
"""

from __future__ import annotations

import torch
from cuda_matmul import graph_time

from espalier_format.codec.codebook import get_codebook
from espalier_format.kernels import matmul, ops
from espalier_format.kernels.linear import LinearOperand

SHAPES = ((2048, 512), (2048, 1024), (2048, 2048), (2048, 4096), (4096, 4096), (4096, 14336), (8192, 28672))
NAMES = ("e2m1@2", "int6@4", "int8@6", "exl3-mul1@3")
ROWS = (16, 24, 32, 40, 48, 56, 64, 96)
BYTES = 200 << 20


def main() -> None:
    """Print a table, in Markdown."""
    print("| shape | codebook |", " | ".join(map(str, ROWS)), "|")
    print("|---|---|" + "---|" * len(ROWS))
    for k, n in SHAPES:
        for name in NAMES:
            codebook = get_codebook(name)
            shape = (k // 16, n // 16, codebook.halfwords_per_tile)
            scales = (torch.ones(size, dtype=torch.float16, device="cuda") for size in (k, n))
            suh, svh = scales
            operands = [
                LinearOperand(
                    torch.randint(-32768, 32768, shape, dtype=torch.int16, device="cuda"),
                    suh, svh, codebook, 128, 128, k, n,
                )
                for _ in range(max(1, int(BYTES / (k * n * codebook.bits / 8))))
            ]  # fmt: skip
            products = [lambda x, operand=operand: ops.linear(x, operand) for operand in operands]
            cells = []
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda").half()
                times = []
                for most in (0, 1 << 30):
                    matmul.fused_rows = lambda _, most=most: most  # type: ignore[misc]
                    times.append(graph_time(products, x))
                cells.append(f"{times[0] / times[1]:.2f}")
            print(f"| {k}×{n} | {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
