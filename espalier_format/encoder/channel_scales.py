"""Channel scales: the size of each input and output channel of a weight, so that what remains has variance 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rotation import padded
from espalier_format.encoder.weight_rows import WeightRows
from espalier_format.errors import ShapeError, SourceError

ROWS: Final = 128
"""Sums over output channels are taken over pieces of this many, however much fits in memory."""

_PASSES: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class ChannelScales:
    """Positive scales of both sides, padded; 0 in the padding and for channels that are all zero."""

    inputs: NDArray[np.float64]
    """(in_p,)."""
    outputs: NDArray[np.float64]
    """(out_p,)."""
    energy: float
    """Sum of squares of the weight."""


def pieces(size: int) -> Iterator[slice]:
    """Cut 0:size into slices of `ROWS`, the last one shorter."""
    for start in range(0, size, ROWS):
        yield slice(start, min(start + ROWS, size))


def measure_channels(weight: WeightRows, rotation: tuple[int, int], *, name: str, each: bool) -> ChannelScales:
    """Find scales a, b such that W[n, k] / (a[k] b[n]) has, in the rotated basis, variance 1.

    With ``each``, row and column variances are balanced in turn, so that every channel counts alike; otherwise all
    channels share one scale. Channels of zeros and padding get 0. In a rotation block that holds such channels the
    others are scaled up: the block shares their energy. Raises ShapeError for an empty weight and SourceError, naming
    the module, for a NaN or an infinity.
    """
    out_features, in_features = weight.shape
    if not (out_features and in_features):
        raise ShapeError("an empty weight cannot be encoded", tensor=name, got=weight.shape)
    # First the plain sums of squares, which also tell what is zero.
    by_output, by_input = np.zeros(out_features), np.zeros(in_features)
    for piece in pieces(out_features):
        squares = np.square(_finite(weight.rows(piece.start, piece.stop), name))
        by_output[piece] = squares.sum(axis=1)
        by_input += squares.sum(axis=0)
    energy = float(by_output.sum())
    live_in, live_out = by_input > 0, by_output > 0
    n_in, n_out = int(live_in.sum()), int(live_out.sum())
    if not n_in:
        return ChannelScales(
            np.zeros(padded(in_features, rotation[0])), np.zeros(padded(out_features, rotation[1])), 0.0
        )

    inputs, outputs = np.where(live_in, energy / n_in / n_out, 0.0), live_out.astype(np.float64)
    if each:
        # Variances: outputs[n] is the mean of W^2 / inputs over the live inputs, and the other way round.
        inputs = by_input / n_out
        for _ in range(_PASSES):
            inverse = _inverse(inputs)
            by_input = np.zeros(in_features)
            for piece in pieces(out_features):
                squares = np.square(weight.rows(piece.start, piece.stop).astype(np.float64))
                outputs[piece] = (squares * inverse).sum(axis=1) / n_in
                by_input += (squares * _inverse(outputs[piece])[:, None]).sum(axis=0)
            inputs = by_input / n_out
    return ChannelScales(
        _shared(np.sqrt(inputs), live_in, rotation[0]), _shared(np.sqrt(outputs), live_out, rotation[1]), energy
    )


def _finite(rows: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    if not np.isfinite(rows).all():
        raise SourceError("the weight holds a NaN or an infinity", tensor=name)
    return rows.astype(np.float64)


def _inverse(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / values, and 0 for 0."""
    result: NDArray[np.float64] = np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
    return result


def _shared(scales: NDArray[np.float64], live: NDArray[np.bool_], block: int) -> NDArray[np.float64]:
    """Pad scales, and lower those of a rotation block by what its dead channels take of its energy."""
    size = padded(len(scales), block)
    result, alive = np.zeros(size), np.zeros(size, np.bool_)
    result[: len(scales)], alive[: len(scales)] = scales, live
    result[~alive] = 0.0
    if block:
        share = alive.reshape(-1, block).sum(axis=1) / block
        result *= np.repeat(np.sqrt(share), block)
    return result
