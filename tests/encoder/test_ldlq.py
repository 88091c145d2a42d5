"""Block LDL, exact feedback and the LDLQ loop, against plain numpy; damping, and what it buys."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import hadamard
from espalier_format.encoder.block_ldl import factorise
from espalier_format.encoder.exact_product import MOST_TERMS, Pieces
from espalier_format.encoder.hessian import Hessian
from espalier_format.encoder.ldlq import feedback_of_hessian, feedback_of_scales, quantise
from espalier_format.encoder.module import encode_module
from espalier_format.encoder.options import EncodedModule, EncoderOptions
from espalier_format.errors import SourceError
from espalier_format.kernels.reference import decode_weight


def correlated(size: int, rank: int, *, noise: float = 0.3, seed: int = 0) -> np.ndarray:
    """A Hessian of inputs that lie near a subspace, and have channels of unlike size."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((size, rank)) @ rng.standard_normal((rank, 2000)) / np.sqrt(rank)
    inputs += noise * rng.standard_normal((size, 2000)) * np.exp(rng.standard_normal((size, 1)) / 2)
    return (inputs @ inputs.T / 2000).astype(np.float32)


def lower(matrix: np.ndarray) -> np.ndarray:
    """L with its diagonal blocks, from the form that `factorise` leaves."""
    result = np.eye(len(matrix))
    for column in range(0, len(matrix), 16):
        result[column + 16 :, column : column + 16] = matrix[column + 16 :, column : column + 16]
    return result


@pytest.mark.parametrize("size", [16, 48, 128, 144, 400])
def test_block_factorisation(size: int) -> None:
    matrix = correlated(size, 20).astype(np.float64) + 0.01 * np.eye(size)
    work = matrix.copy()
    assert factorise(work)
    factor = lower(work)
    middle = np.linalg.solve(factor, np.linalg.solve(factor, matrix).T)
    blocks = np.kron(np.eye(size // 16), np.ones((16, 16)))
    assert np.abs(middle * (1 - blocks)).max() < 1e-11 * np.abs(matrix).max()
    assert np.linalg.eigvalsh(middle * blocks).min() > 0


@pytest.mark.parametrize("where", [0, 20, 140])
@pytest.mark.parametrize("value", [-1.0, 0.0, np.nan])
def test_factorisation_of_what_is_not_positive(where: int, value: float) -> None:
    matrix = np.eye(160)
    matrix[where, where] = value
    assert not factorise(matrix)


def test_products_of_pieces_are_precise() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((n, MOST_TERMS)) * 10.0 ** rng.integers(-9, 9, (n, 1)) for n in (7, 5))
    left[3] = 0
    exact = (left.astype(np.longdouble) @ right.T.astype(np.longdouble)).astype(np.float64)
    bound = np.abs(left).max(axis=1, keepdims=True) * np.abs(right).max(axis=1)
    assert (np.abs(Pieces.of(left).times_transposed(Pieces.of(right)) - exact) <= 2.0**-42 * MOST_TERMS * bound).all()
    rough = Pieces.of(left).roughly_times_transposed(Pieces.of(right))
    assert (np.abs(rough - exact) <= 2.0**-20 * MOST_TERMS * bound).all()


def test_products_of_pieces_do_not_depend_on_order() -> None:
    """Sums in any order of terms are equal in every bit, which is what makes BLAS libraries agree."""
    rng = np.random.default_rng(1)
    left, right, order = rng.standard_normal((4, 512)), rng.standard_normal((6, 512)), rng.permutation(512)
    straight = Pieces.of(left).times_transposed(Pieces.of(right))
    mixed = Pieces.of(left[:, order]).times_transposed(Pieces.of(right[:, order]))
    assert np.array_equal(straight, mixed)


def round_all(row: int, rows: np.ndarray) -> np.ndarray:
    """A coarse quantiser that needs no trellis."""
    return np.rint(2 * rows) / 2


@pytest.mark.parametrize("block", [0, 32])
def test_loop_is_ldlq(block: int) -> None:
    """Against the textbook in float64 with numpy's own factorisation: the same rounding decisions."""
    rng = np.random.default_rng(2)
    size, hessian, scales = 96, correlated(96, 10), rng.uniform(0.5, 2, 96) * rng.choice([-1.0, 1.0], 96)
    targets = rng.standard_normal((size, 24)).astype(np.float32)
    feedback = feedback_of_hessian(Hessian(hessian, 1), scales, block, damping=0.05, name="m")
    assert feedback is not None
    found = np.empty_like(targets)

    def encode(row: int, rows: np.ndarray) -> np.ndarray:
        found[row : row + 16] = round_all(row, rows)[0]
        return round_all(row, rows)

    quantise(targets, feedback, encode)

    rotation = np.kron(np.eye(size // 32), hadamard(32)) / np.sqrt(32) if block else np.eye(size)
    matrix = rotation @ np.diag(scales) @ hessian.astype(np.float64) @ np.diag(scales) @ rotation
    matrix += 0.05 * np.trace(matrix) / size * np.eye(size)
    cholesky = np.linalg.cholesky(matrix)
    diagonal = np.kron(np.eye(size // 16), np.ones((16, 16)))
    factor = cholesky @ np.linalg.inv(cholesky * diagonal)
    expected, errors = np.empty((size, 24)), np.zeros((size, 24))
    for row in range(size - 16, -1, -16):
        here = slice(row, row + 16)
        expected[here] = round_all(0, targets[here] + factor[row + 16 :, here].T @ errors[row + 16 :])
        errors[here] = targets[here] - expected[here]
    assert np.mean(found != expected) < 0.01  # near ties may fall either way

    def loss(quantised: np.ndarray) -> float:
        return float(np.einsum("in,ij,jn->", targets - quantised, matrix, targets - quantised, optimize=True))

    assert loss(found) == pytest.approx(loss(expected), rel=0.05)
    assert loss(found) < 0.6 * loss(round_all(0, targets))


def test_feedback_of_columns_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(3)
    feedback = feedback_of_hessian(Hessian(correlated(64, 5), 1), np.ones(64), 64, damping=0.01, name="m")
    assert feedback is not None
    errors = np.rint(rng.standard_normal((1, 64, 700)) * 2.0**15)
    whole = feedback.of(16, errors)
    for part in (slice(0, 1), slice(3, 300), slice(650, 700)):
        assert np.array_equal(whole[..., part], feedback.of(16, np.ascontiguousarray(errors[..., part])))


def test_feedback_is_bounded() -> None:
    """Sums stay exact, below 2^53, for the worst errors that are fed back."""
    feedback = feedback_of_hessian(Hessian(np.ones((128, 128), np.float32), 1), np.ones(128), 0, damping=1e-9, name="m")
    assert feedback is not None
    factors = feedback.factors[0]
    for row in range(0, 112, 16):
        below = factors[row + 16 :, row : row + 16]
        assert np.array_equal(below, np.rint(below))
        assert np.abs(below).sum(axis=0).max() * 2.0**21 < 2.0**52


def test_damping_is_raised_until_it_helps() -> None:
    hessian = correlated(64, 4, noise=0.01)
    hessian -= 0.1 * np.trace(hessian) / 64 * np.eye(64, dtype=np.float32)  # eigenvalues down to -0.1 of the mean
    feedback = feedback_of_hessian(Hessian(hessian, 1), np.ones(64), 64, damping=0.003, name="m")
    assert feedback is not None
    assert feedback.damping == pytest.approx(0.3)


def test_matrix_that_is_no_hessian() -> None:
    hessian = np.eye(64, dtype=np.float32)
    hessian[5, 6] = hessian[6, 5] = 9.0
    with pytest.raises(SourceError, match="positive semidefinite") as caught:
        feedback_of_hessian(Hessian(hessian, 1), np.ones(64), 0, damping=0.01, name="layers.1.down_proj")
    assert caught.value.tensor == "layers.1.down_proj"


def test_hessian_without_content() -> None:
    hessian = np.zeros((32, 32), np.float32)
    assert feedback_of_hessian(Hessian(hessian, 0), np.ones(32), 32, damping=0.01, name="m") is None
    hessian[3, 3] = 1
    alive = (np.arange(32) != 3).astype(np.float64)
    assert feedback_of_hessian(Hessian(hessian, 1), alive, 32, damping=0.01, name="m") is None


def test_feedback_without_a_hessian_is_that_of_the_unit_matrix() -> None:
    """For each rotation block. Damping is relative to the block, not to the whole, so here the blocks are alike."""
    scales = np.tile(np.random.default_rng(4).uniform(0.2, 3, 32), 3)
    dense = feedback_of_hessian(Hessian(np.eye(96, dtype=np.float32), 1), scales, 32, damping=0.01, name="m")
    blocks = feedback_of_scales(scales, 32, damping=0.01)
    assert dense is not None
    assert blocks is not None
    for group in range(3):
        rows = slice(32 * group, 32 * group + 32)
        one = dense.factors[0][rows, rows][16:, :16] * dense.unit
        assert np.abs(one - blocks.factors[group][16:, :16] * blocks.unit).max() < 1e-6
    assert feedback_of_scales(scales, 0, damping=0.01) is None
    padding = feedback_of_scales(np.zeros(64), 64, damping=0.01)
    assert padding is not None
    assert not padding.factors[0][16:, :16].any()


def loss(weight: np.ndarray, module: EncodedModule, hessian: np.ndarray) -> float:
    """Relative loss of what the reference decoder makes of a module."""
    decoded = decode_weight(module.trellis, module.suh, module.svh, module.codebook, *module.rotation)
    error = weight - decoded[: weight.shape[1], : weight.shape[0]].T
    losses = [np.einsum("ni,ij,nj->", x, hessian.astype(np.float64), x, optimize=True) for x in (error, weight)]
    return float(losses[0] / losses[1])


@pytest.mark.parametrize(("name", "rotation"), [("e2m1@2", (64, 64)), ("int6@4", (32, 0)), ("exl3-mul1@2", (128, 128))])
def test_hessian_lowers_the_loss(name: str, rotation: tuple[int, int]) -> None:
    """By far more than a fifth, for inputs near a subspace; the reported loss is the true one."""
    weight = np.random.default_rng(5).standard_normal((64, 192)).astype(np.float32)
    matrix = correlated(192, 24)
    hessian = Hessian(matrix, 2000)
    losses = []
    for feedback in (True, False):
        options = EncoderOptions(feedback=feedback, scale_search_tiles=8)
        module = encode_module(weight, get_codebook(name), rotation, seed=1, name="m", hessian=hessian, options=options)
        losses.append(loss(weight, module, matrix))
        assert module.stats.relative_proxy_loss == pytest.approx(losses[-1], rel=1e-4)
        assert module.stats.damping == (0.01 if feedback else None)
    assert losses[0] < 0.6 * losses[1]


def test_feedback_without_a_hessian_lowers_the_squared_error() -> None:
    """Where input channels are unlike, and where there is padding."""
    rng = np.random.default_rng(6)
    weight = (rng.standard_normal((64, 160)) * np.exp(0.7 * rng.standard_normal(160))).astype(np.float32)
    errors = [
        encode_module(
            weight, get_codebook("e2m1@2"), (128, 64), seed=1, name="m", options=EncoderOptions(feedback=feedback)
        ).stats.relative_mse
        for feedback in (True, False)
    ]
    assert errors[0] < 0.85 * errors[1]


_PROGRAM = """
import hashlib, numpy as np
from espalier_format.codec.codebook import get_codebook
from espalier_format.encoder.hessian import Hessian
from espalier_format.encoder.module import encode_module
from espalier_format.encoder.options import EncoderOptions
rng = np.random.default_rng(0)
x = rng.standard_normal((320, 40)) @ rng.standard_normal((40, 900)) + rng.standard_normal((320, 900))
weight = rng.standard_normal((48, 320)).astype(np.float32)
options = EncoderOptions(scale_search_tiles=4)
m = encode_module(weight, get_codebook("e2m1@2"), (64, 0), seed=1, name="m",
                  hessian=Hessian((np.einsum("ik,jk->ij", x, x)).astype(np.float32), 1), options=options)
stats = (m.stats.relative_mse, m.stats.relative_proxy_loss, m.stats.scale)
print(hashlib.sha256(m.trellis.tobytes() + m.suh.tobytes() + m.svh.tobytes() + repr(stats).encode()).hexdigest())
"""


def test_result_does_not_depend_on_blas() -> None:
    """Neither on its number of threads nor, where OpenBLAS can be told, on the processor it thinks it runs on."""
    digests = set()
    for settings in ({"OPENBLAS_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": "NEHALEM"}):
        environment = {**os.environ, **settings}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1
