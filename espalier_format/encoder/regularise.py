"""Regularise a weight: random signs, channel scales and rotation, so that it looks like independent normal numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier_format.encoder.channel_scales import ChannelScales, measure_channels
from espalier_format.encoder.hadamard_transform import rotate_rows
from espalier_format.encoder.signs import random_signs
from espalier_format.encoder.weight_rows import WeightRows


def default_block(size: int) -> int:
    """Return the rotation block for a side: 128, 64 or 32 if it divides the size, else 128 with padding."""
    return next((block for block in (128, 64, 32) if size % block == 0), 128)


@dataclass(frozen=True, slots=True, eq=False)
class Regularised:
    """A weight in the basis that is encoded: ``R = H_in diag(1/a) W^T diag(1/b) H_out``, of variance about 1."""

    weight: WeightRows
    rotation: tuple[int, int]
    inputs: NDArray[np.float64]
    """a: signs times scales, (in_p,); +0 where a channel is zero or padding."""
    outputs: NDArray[np.float64]
    """b: the same for the other side, (out_p,)."""
    energy: float
    """Sum of squares of the weight."""

    @property
    def padded_in(self) -> int:
        """Stored input size."""
        return len(self.inputs)

    @property
    def padded_out(self) -> int:
        """Stored output size."""
        return len(self.outputs)

    @property
    def kept_error(self) -> float:
        """What part of an error that is spread evenly over R remains, relative to the weight, when it is decoded.

        1 without channels of zeros and padding; what falls on those is cut off.
        """
        sides = zip((self.inputs, self.outputs), self.rotation, strict=True)
        return float(
            np.prod(
                [
                    _kept(np.count_nonzero(scales.reshape(-1, block or len(scales)), axis=1), block or len(scales))
                    for scales, block in sides
                ]
            )
        )

    def columns(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return columns [start, stop) of R, float32 (in_p, stop - start): whole rotation blocks of output channels.

        Output channels beyond the true size are zeros. The result for a column does not depend on the others.
        """
        out_features, in_features = self.weight.shape
        rows = self.weight.rows(min(start, out_features), min(stop, out_features))
        block = np.zeros((stop - start, self.padded_in), np.float32)
        step = 128  # bounds the float64 intermediate, which has the range that float32 scales would lack
        for top in range(0, len(rows), step):
            part = rows[top : top + step].astype(np.float64)
            part *= _inverse(self.inputs[:in_features])
            part *= _inverse(self.outputs[start + top : start + top + len(part)])[:, None]
            block[top : top + len(part), :in_features] = part
        rotate_rows(block, self.rotation[1])
        result = np.ascontiguousarray(block.T)
        del block
        rotate_rows(result, self.rotation[0])
        return result


def regularise(
    weight: WeightRows, rotation: tuple[int, int], *, seed: int, name: str, each: bool = True
) -> Regularised:
    """Choose signs and channel scales for a weight: `signs.random_signs` and `channel_scales.measure_channels`.

    Raises what those raise: UsageError for a seed or rotation block, ShapeError, SourceError.
    """
    scales: ChannelScales = measure_channels(weight, rotation, name=name, each=each)
    sides = (("in", scales.inputs), ("out", scales.outputs))
    # Adding 0.0 makes -0 of a negative sign and a scale of zero a +0.
    inputs, outputs = (random_signs(seed, name, side, len(values)) * values + 0.0 for side, values in sides)  # type: ignore[arg-type]
    return Regularised(weight, rotation, inputs, outputs, scales.energy)


def _inverse(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / values, and 0 for 0."""
    result: NDArray[np.float64] = np.divide(1.0, values, out=np.zeros_like(values), where=values != 0)
    return result


def _kept(live: NDArray[np.intp], block: int) -> float:
    """Return the mean, over live channels, of the share of live channels in their block."""
    return float(np.square(live / block).sum() / (live / block).sum())
