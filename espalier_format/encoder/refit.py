"""Fit suh and svh to the weight again, by least squares, once the codes are known, and measure what error remains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.encoder.channel_scales import pieces
from espalier_format.encoder.conjugate_gradients import solve
from espalier_format.encoder.exact_product import Pieces
from espalier_format.encoder.f16_scales import place_exponent, to_f16
from espalier_format.encoder.hessian_product import HessianProduct
from espalier_format.encoder.weight_rows import WeightRows
from espalier_format.kernels.numpy_decoder import decode_rows

_PANEL: Final = 1024
_MOST_CHANGE: Final = 16.0
"""A fit that changes a scale by more than this factor, or its sign, is not believed: the channel keeps what it had."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedScales:
    """Scales in F16, and the sums of squares of what the module decodes to with them."""

    suh: NDArray[np.float16]
    svh: NDArray[np.float16]
    squared_error: float
    loss: float | None
    """tr(E H E^T) in arbitrary units; None without a Hessian."""
    loss_of_zero: float | None
    """The same for E = W."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    rows: slice
    wanted: NDArray[np.float64]
    decoded: NDArray[np.float64]
    """With all scales 1."""


class Refit:
    """The two scale vectors of a module whose trellis is final.

    Everything is computed in pieces of 128 output channels, in float64 and a fixed order.
    """

    def __init__(
        self,
        weight: WeightRows,
        trellis: NDArray[np.int16],
        codebook: Codebook,
        rotation: tuple[int, int],
        *,
        threads: int = 1,
    ) -> None:
        """Look at a module; ``threads`` is for decoding."""
        self._weight = weight
        self._trellis = trellis
        self._codebook = codebook
        self._rotation = rotation
        self._threads = threads

    def fit_inputs(
        self, inputs: NDArray[np.float64], outputs: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return better input scales than ``inputs`` (in_p,), and the output scales that go with the former.

        One round of alternating least squares: the best output scales for ``inputs``, then the best input scales for
        those. For the latter an output channel counts relative to its scale; else a huge one would decide alone, and
        spoil the others. Scales of zero stay so.
        """
        in_features = self._weight.shape[1]
        fitted_outputs = outputs.copy()
        products, squares = np.zeros(in_features), np.zeros(in_features)
        for piece in self._pieces():
            decoded = piece.decoded
            scaled = decoded * inputs[:in_features]
            fitted = _ratio((piece.wanted * scaled).sum(axis=1), (scaled * scaled).sum(axis=1), outputs[piece.rows])
            fitted_outputs[piece.rows] = fitted
            inverse = _inverse(outputs[piece.rows])[:, None]
            wanted = piece.wanted * inverse
            decoded *= fitted[:, None] * inverse
            products += (wanted * decoded).sum(axis=0)
            squares += (decoded * decoded).sum(axis=0)
        fitted_inputs = inputs.copy()
        fitted_inputs[:in_features] = _ratio(products, squares, inputs[:in_features])
        return fitted_inputs, fitted_outputs

    def fit_inputs_weighted(
        self, inputs: NDArray[np.float64], outputs: NDArray[np.float64], hessian: HessianProduct
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Do the same where errors count by a Hessian.

        Input scales then depend on each other: with P the weight as it decodes now, relative changes u solve
        ``(H * (P^T P)) u = sum over rows of P * (E H)``, entry by entry products. Memory: 8 bytes * in_features^2.
        """
        in_features = self._weight.shape[1]
        fitted_outputs = outputs.copy()
        system, right = np.zeros((in_features, in_features)), np.zeros(in_features)
        for piece in self._pieces():
            now = piece.decoded
            now *= inputs[:in_features]
            weighted = hessian.times(now)
            fitted = _ratio((piece.wanted * weighted).sum(axis=1), (now * weighted).sum(axis=1), outputs[piece.rows])
            fitted_outputs[piece.rows] = fitted
            inverse = _inverse(outputs[piece.rows])[:, None]
            wanted = piece.wanted * inverse
            now *= fitted[:, None] * inverse
            transposed = Pieces.of(np.ascontiguousarray(now.T))
            for left in range(0, in_features, _PANEL):
                panel = slice(left, left + _PANEL)
                system[:, panel] += transposed.roughly_times_transposed(transposed.rows(panel))
            right += (hessian.times(wanted - now) * now).sum(axis=0)
        changes = solve(hessian.for_inputs(system), right)
        fitted_inputs = inputs.copy()
        fitted_inputs[:in_features] = _ratio(1.0 + changes, np.ones(in_features), 1.0) * inputs[:in_features]
        return fitted_inputs, fitted_outputs

    def finish(
        self,
        inputs: NDArray[np.float64],
        outputs: NDArray[np.float64],
        *,
        name: str,
        refit: bool = True,
        hessian: HessianProduct | None = None,
    ) -> FittedScales:
        """Round both scale vectors to F16, and measure.

        suh is rounded first; svh is fitted to what suh has become, so that it makes up for the rounding on average,
        unless ``refit`` is off. With a ``hessian``, the fit is weighted with it. Raises ScaleOverflowError, naming
        the module.
        """
        in_features = self._weight.shape[1]
        exponent = place_exponent(inputs, outputs, name=name)
        suh = to_f16(inputs, -exponent, name=name)
        near = np.ldexp(outputs, exponent)
        svh = to_f16(near, 0, name=name)
        scales = suh[:in_features].astype(np.float64)
        squared_error, loss, loss_of_zero = 0.0, 0.0, 0.0
        for piece in self._pieces():
            scaled = piece.decoded
            scaled *= scales
            if refit:
                weighted = scaled if hessian is None else hessian.times(scaled)
                fitted = _ratio(
                    (piece.wanted * weighted).sum(axis=1), (scaled * weighted).sum(axis=1), near[piece.rows]
                )
                svh[piece.rows] = _kept(to_f16(fitted, 0, name=name), svh[piece.rows])
            error = piece.wanted - scaled * svh[piece.rows, None]
            squared_error += float((error * error).sum())
            if hessian is not None:
                loss += hessian.loss(error)
                loss_of_zero += hessian.loss(piece.wanted)
        return FittedScales(suh, svh, squared_error, *((loss, loss_of_zero) if hessian is not None else (None, None)))

    def _pieces(self) -> Iterator[_Piece]:
        out_features, in_features = self._weight.shape
        tile_rows, tile_columns, _ = self._trellis.shape
        ones = (np.ones(16 * tile_rows, np.float16), np.ones(16 * tile_columns, np.float16))
        for rows in pieces(out_features):
            decoded = decode_rows(
                self._trellis, *ones, self._codebook, *self._rotation, in_features, out_features, "float32", rows,
                threads=self._threads,
            )  # fmt: skip
            wanted = self._weight.rows(rows.start, rows.stop).astype(np.float64)
            yield _Piece(rows, wanted, decoded.astype(np.float64))


def _inverse(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / values, and 0 for 0."""
    result: NDArray[np.float64] = np.divide(1.0, values, out=np.zeros_like(values), where=values != 0)
    return result


def _ratio(
    products: NDArray[np.float64], squares: NDArray[np.float64], before: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return products / squares where that is a sane change of ``before``, else ``before``."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitted = products / squares
        change = fitted / before
        sane = (change > 1 / _MOST_CHANGE) & (change < _MOST_CHANGE)  # False for NaN
    return np.where(sane, fitted, before)


def _kept(fitted: NDArray[np.float16], before: NDArray[np.float16]) -> NDArray[np.float16]:
    """Return the fitted scales, but no zero where there was none."""
    return np.where(fitted == 0, before, fitted)
