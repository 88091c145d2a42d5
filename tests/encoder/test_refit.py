"""Scales after encoding: the least-squares fit, its rounding to F16, and what does not fit F16."""

from __future__ import annotations

import numpy as np
import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.encoder.conjugate_gradients import solve
from espalier_format.encoder.f16_scales import flushed, place_exponent, to_f16
from espalier_format.encoder.hessian import Hessian
from espalier_format.encoder.hessian_product import HessianProduct
from espalier_format.encoder.refit import Refit
from espalier_format.encoder.weight_rows import ArrayRows
from espalier_format.errors import ScaleOverflowError
from espalier_format.kernels.reference import decode_weight

CODEBOOK = get_codebook("e2m1@2")
ROTATION = (32, 64)
IN, OUT = 90, 150


class Case:
    """A random trellis, the weight it stands for with some scales, and other scales to start from."""

    def __init__(self, seed: int, noise: float) -> None:
        rng = np.random.default_rng(seed)
        self.trellis = rng.integers(-32768, 32768, (96 // 16, 192 // 16, 32), dtype=np.int16)
        self.inputs = self.scales(rng, 96, IN)
        self.outputs = self.scales(rng, 192, OUT)
        weight = self.decoded(self.inputs, self.outputs)
        self.weight = (weight * (1 + noise * rng.standard_normal(weight.shape))).astype(np.float32)
        self.fit = Refit(ArrayRows(self.weight), self.trellis, CODEBOOK, ROTATION)
        self.start = (self.inputs * rng.uniform(0.8, 1.2, 96), self.outputs * rng.uniform(0.8, 1.2, 192))

    @staticmethod
    def scales(rng: np.random.Generator, size: int, true: int) -> np.ndarray:
        values = rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 2.0, size)
        values[true:] = values[3] = 0
        return values

    def decoded(self, suh: np.ndarray, svh: np.ndarray) -> np.ndarray:
        """The exact weight by the reference decoder, with any scales, (out, in)."""
        ones = np.ones(96, np.float16), np.ones(192, np.float16)
        return (decode_weight(self.trellis, *ones, CODEBOOK, *ROTATION) * suh[:, None] * svh)[:IN, :OUT].T

    def squared_error(self, suh: np.ndarray, svh: np.ndarray) -> float:
        error = self.decoded(suh.astype(np.float64), svh.astype(np.float64)) - self.weight
        return float(np.square(error).sum())


def test_true_scales_are_found_again() -> None:
    """With rounds enough; one round of the alternation already takes most of the error away."""
    case = Case(1, noise=0.0)
    scales, errors = case.start, [case.squared_error(*case.start)]
    for _ in range(6):
        inputs, outputs = case.fit.fit_inputs(*scales)
        scales = inputs, outputs
        errors.append(case.squared_error(*scales))
    assert errors[1] < 0.1 * errors[0]
    assert errors[-1] < 1e-6 * errors[0]
    done = case.fit.finish(*scales, name="m")
    assert done.squared_error < 1e-6 * np.square(case.weight).sum()


def test_error_is_what_the_decoder_gives() -> None:
    case = Case(2, noise=0.3)
    done = case.fit.finish(*case.start, name="m")
    assert done.squared_error == pytest.approx(case.squared_error(done.suh, done.svh), rel=1e-6)
    assert done.loss is done.loss_of_zero is None


def test_svh_is_the_best_for_the_rounded_suh() -> None:
    """No neighbouring F16 number would be better, for any channel."""
    case = Case(3, noise=0.3)
    done = case.fit.finish(*case.start, name="m")
    decoded = case.decoded(done.suh.astype(np.float64), np.ones(192))
    for channel in range(OUT):
        errors = [
            np.square(decoded[channel] * float(scale) - case.weight[channel]).sum()
            for scale in (np.nextafter(done.svh[channel], s * np.float16(np.inf)) for s in (-1, 1))
        ]
        assert np.square(decoded[channel] * float(done.svh[channel]) - case.weight[channel]).sum() <= min(errors)


def test_zeros_stay_zeros() -> None:
    case = Case(4, noise=0.3)
    done = case.fit.finish(*case.fit.fit_inputs(*case.start), name="m")
    assert np.flatnonzero(done.suh.view(np.uint16) == 0).tolist() == [3, *range(IN, 96)]
    assert np.flatnonzero(done.svh.view(np.uint16) == 0).tolist() == [3, *range(OUT, 192)]


def test_refit_off_only_rounds() -> None:
    case = Case(5, noise=0.3)
    done = case.fit.finish(*case.start, name="m", refit=False)
    product = np.outer(done.suh.astype(np.float64), done.svh.astype(np.float64))
    assert np.abs(product - np.outer(*case.start)).max() < 5e-3


def test_fit_with_a_hessian() -> None:
    """The loss is the true one up to a common factor, and both fits lower it; a plain fit does less."""
    case = Case(6, noise=0.3)
    inputs = np.random.default_rng(0).standard_normal((IN, 20)) @ np.random.default_rng(1).standard_normal((20, 500))
    matrix = (inputs @ inputs.T).astype(np.float32)
    product = HessianProduct(Hessian(matrix, 500), case.start[0][:IN])

    def loss(suh: np.ndarray, svh: np.ndarray) -> float:
        error = case.decoded(suh.astype(np.float64), svh.astype(np.float64)) - case.weight
        error[:, 3] = 0  # the input whose scale is zero, which the product leaves out
        return float(np.einsum("ni,ij,nj->", error, matrix.astype(np.float64), error, optimize=True))

    before = case.fit.finish(*case.start, name="m", refit=False, hessian=product)
    outputs_only = case.fit.finish(*case.start, name="m", hessian=product)
    both = case.fit.finish(*case.fit.fit_inputs_weighted(*case.start, product), name="m", hessian=product)
    plain = case.fit.finish(*case.fit.fit_inputs(*case.start), name="m")
    losses = [loss(done.suh, done.svh) for done in (before, outputs_only, both, plain)]
    assert losses[2] < 0.97 * losses[1] < 0.9 * losses[0]
    assert losses[2] < losses[3]
    for done, expected in zip((outputs_only, both), losses[1:3], strict=True):
        assert done.loss is not None
        assert before.loss is not None
        assert done.loss / before.loss == pytest.approx(expected / losses[0], rel=1e-4)


def test_conjugate_gradients_solve() -> None:
    rng = np.random.default_rng(0)
    root = rng.standard_normal((30, 60))
    matrix, wanted = root @ root.T, rng.standard_normal(30)
    matrix[7] = matrix[:, 7] = 0
    wanted[7] = 0
    assert np.abs(solve(matrix, matrix @ wanted) - wanted).max() < 1e-4
    assert not solve(matrix, np.zeros(30)).any()


def scales(*logarithms: float) -> np.ndarray:
    return 2.0 ** np.array(logarithms)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (scales(-6, -5), scales(0, 0), 0),  # outputs are at 1 already
        (scales(-6, -5), scales(3, 5), -4),  # and are brought there
        (scales(-20, -20), scales(0, 0), -6),  # but not further than keeps inputs normal
        (scales(-27, -27), scales(0, 0), -13),
        (scales(-30, -30), scales(0, 0), -15),  # both subnormal by a digit
        (scales(20, 18), scales(0, 0), 5),  # no overflow of inputs
        (scales(0, 0), scales(30, 30), -15),  # nor of outputs
        (scales(0, -30), scales(0, 0), 0),  # a negligible channel does not push others out of range
        (-scales(-6, -5), -scales(3, 5), -4),  # signs do not matter
    ],
)
def test_exponent(inputs: np.ndarray, outputs: np.ndarray, expected: int) -> None:
    assert abs(place_exponent(np.append(inputs, 0), np.append(0, outputs), name="m") - expected) <= 1


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (scales(-45), scales(0)),
        (scales(0, -20), scales(-13, -33)),
        (scales(33), scales(0)),
        (scales(1, 33), scales(-1)),
    ],
)
def test_scales_out_of_range(inputs: np.ndarray, outputs: np.ndarray) -> None:
    with pytest.raises(ScaleOverflowError) as caught:
        place_exponent(inputs, outputs, name="layers.3.up")
    assert caught.value.tensor == "layers.3.up"


def test_no_scale_becomes_infinite() -> None:
    assert to_f16(np.array([65519.0]), 0, name="m")[0] == 65504
    with pytest.raises(ScaleOverflowError):
        to_f16(np.array([1.0, 65520.0]), 0, name="m")
    with pytest.raises(ScaleOverflowError):
        to_f16(np.array([1.0]), 16, name="m")


def test_scales_that_vanish_are_counted() -> None:
    values = np.array([0.0, -0.0, 1.0, 2.0**-24, 2.0**-26, -(2.0**-30)])
    rounded = to_f16(values, 0, name="m")
    assert rounded.view(np.uint16).tolist() == [0, 0, 0x3C00, 1, 0, 0]
    assert flushed(values, rounded) == 2
