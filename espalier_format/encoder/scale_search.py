"""Search the global scale: what a codebook value stands for in a weight of variance 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.tile import RING, TILE
from espalier_format.encoder.effort import THOROUGH, Effort
from espalier_format.encoder.gains import gain
from espalier_format.encoder.regularise import Regularised
from espalier_format.encoder.tiles import encode_tiles, to_rings

_STEP: Final = 0.08
"""Distance of the first scales that are tried, in the logarithm: where the error is about 2 % above the least."""

_MOST_STEPS: Final = 50
_PLACES: Final = 4
"""The sample is taken from this many blocks of output channels."""


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """A scale and what it does on the sample."""

    scale: float
    relative_error: float
    """Squared error ÷ squares of the sample; 0 without a sample."""


def search_scale(
    regularised: Regularised,
    codebook: Codebook,
    *,
    tiles: int,
    effort: Effort = THOROUGH,
    backend: str = "auto",
    threads: int = 1,
) -> ScaleChoice:
    """Find the scale of the least error on a sample of about ``tiles`` tiles, spread over the weight.

    Starts at the codebook's gain times the sample's root mean square and walks in steps of 8 % until the error
    rises on both sides; the result is the lowest point of the parabola (over the logarithm of the scale) through the
    best scale and its neighbours. At least three encodings of the sample. The same for every back end and number of
    threads. Without tiles, or for a sample of zeros, the gain itself is the result.
    """
    sample = Sample.of(regularised, tiles)
    return search_scale_of(sample, codebook, effort=effort, backend=backend, threads=threads)


def search_scale_of(
    sample: Sample, codebook: Codebook, *, effort: Effort = THOROUGH, backend: str = "auto", threads: int = 1
) -> ScaleChoice:
    """Do what `search_scale` does on a sample that was taken already."""
    if not sample.energy:
        return ScaleChoice(gain(codebook), 0.0)
    start = gain(codebook) * (sample.energy / sample.rings.size) ** 0.5
    scale, least = minimise(lambda scale: sample.error(codebook, scale, effort, backend, threads), start)
    return ScaleChoice(scale, least * sample.rings.size / sample.energy)


def minimise(error: Callable[[float], float], start: float) -> tuple[float, float]:
    """Return the scale of the least error, walking from ``start`` as `search_scale` says, and that error."""
    best, errors = _walk(lambda position: error(start * exp(position * _STEP)))
    offset, least = _lowest_point(errors[best - 1], errors[best], errors[best + 1])
    return start * exp((best + offset) * _STEP), least


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Rings to encode, and a larger part of the weight that only extreme values are counted in.

    At high rates much of the error is clipping: the distance of the few targets beyond the largest values of the
    codebook. A few dozen tiles hold too few of those (the error of a sample of 32 is off by half, at 8 bits), but
    what they add is known without encoding anything.
    """

    rings: NDArray[np.float32]
    """(n, 256)."""
    energy: float
    """Sum of squares of ``rings``."""
    neighbours: NDArray[np.float32]
    """Everything from the blocks that the rings come from, (m, 256)."""

    @classmethod
    def of(cls, regularised: Regularised, tiles: int) -> Self:
        """Take at least ``tiles`` rings, or all there are; none for 0. They come from a few blocks, evenly spread."""
        unit = max(regularised.rotation[1], TILE)
        units = regularised.padded_out // unit
        places = min(units, _PLACES, tiles)
        blocks, found = [np.empty((0, RING), np.float32)], [np.empty((0, RING), np.float32)]
        for place in range(places):
            start = (2 * place + 1) * units // (2 * places) * unit
            blocks.append(to_rings(regularised.columns(start, start + unit)))
            count = min(-(-tiles // places), len(blocks[-1]))
            found.append(blocks[-1][(2 * np.arange(count) + 1) * len(blocks[-1]) // (2 * count)])
        rings = np.concatenate(found)
        return cls(rings, float(np.square(rings.astype(np.float64)).sum()), np.concatenate(blocks))

    def error(self, codebook: Codebook, scale: float, effort: Effort, backend: str, threads: int) -> float:
        """Return the mean squared error at a scale: that of the rings, but with the clipping of all neighbours."""
        encoded = encode_tiles(self.rings, codebook, scale=scale, effort=effort, backend=backend, threads=threads)
        values = codebook.codes.astype(np.float64) * (codebook.value_scale * scale)
        limits = float(values.min()), float(values.max())
        own = float(encoded.errors.sum()) / self.rings.size
        return max(own - _clipping(self.rings, *limits), 0.0) + _clipping(self.neighbours, *limits)


def _clipping(targets: NDArray[np.float32], low: float, high: float) -> float:
    """Return the mean square of the distance of targets to the range [low, high]."""
    beyond = targets[(targets < low) | (targets > high)].astype(np.float64)
    return float(np.square(beyond - np.clip(beyond, low, high)).sum()) / targets.size


def _walk(error: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Walk from 0 downhill; return the lowest position and the errors of it, its neighbours and others."""
    errors = {position: error(position) for position in (-1, 0, 1)}
    best = min(errors, key=lambda position: (errors[position], abs(position)))
    while True:
        for neighbour in (best - 1, best + 1):
            if neighbour not in errors:
                errors[neighbour] = error(neighbour)
        lower = min((best - 1, best, best + 1), key=lambda position: errors[position])
        if errors[lower] >= errors[best] or abs(lower) >= _MOST_STEPS:
            return best, errors
        best = lower


def _lowest_point(before: float, here: float, after: float) -> tuple[float, float]:
    """Return where, in -1..1, the parabola through values at -1, 0 and 1 is lowest, and its value there.

    ``here`` is not above the others.
    """
    curvature = before - 2 * here + after
    if curvature <= 0:
        return 0.0, here
    offset = min(max((before - after) / (2 * curvature), -1.0), 1.0)
    return offset, here - curvature * offset * offset / 2
