"""Measure the best global scale of codebooks for a normal source, through the encoder: how the gains came about.

    python benchmarks/gains.py [--tiles N] [--threads N] [CODEBOOK ...]

Prints codebook, gain and mean squared error there. Without names: all of EXL3's, whose gains stand in
espalier_format/encoder/gains.py; those of the grids stand in spec/grids.json.
"""

from __future__ import annotations

import argparse

import numpy as np

from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.encoder.scale_search import minimise
from espalier_format.encoder.tiles import encode_tiles


def measure(codebook: Codebook, targets: np.ndarray, threads: int) -> tuple[float, float]:
    """Return gain and error, found as `search_scale` finds a scale."""
    values = codebook.codes.astype(np.float64) * codebook.value_scale
    return minimise(
        lambda scale: encode_tiles(targets, codebook, scale=scale, threads=threads).errors.sum() / targets.size,
        1.1 / values.std(),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[n for n, c in CODEBOOKS.items() if not c.is_grid])
    parser.add_argument("--tiles", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    targets = np.random.default_rng(20240).standard_normal((arguments.tiles, 256)).astype(np.float32)
    for name in arguments.names:
        gain, error = measure(get_codebook(name), targets, arguments.threads)
        print(f"{name:16} {gain:.6f} {error:.6f}", flush=True)


if __name__ == "__main__":
    main()
