"""Encoding whole modules, judged by the reference decoder: quality, zeros, sizes, determinism, refusals."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.trellis import pack_states, unpack_states
from espalier_format.encoder.gains import gain
from espalier_format.encoder.hessian import Hessian
from espalier_format.encoder.module import encode_module, sample_errors
from espalier_format.encoder.options import EncodedModule, EncoderOptions
from espalier_format.encoder.tiles import encode_tiles, to_rings
from espalier_format.errors import ScaleOverflowError, ShapeError, SourceError, UsageError
from espalier_format.kernels.reference import decode_weight


def normal(out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((out_features, in_features)).astype(np.float32)


def uneven(out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    """Channels and whole blocks of unlike size, as real weights have them."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.standard_normal((out_features, 1)), rng.standard_normal(in_features)
    return (0.03 * normal(out_features, in_features, seed) * np.exp(0.5 * rows + 0.5 * columns)).astype(np.float32)


def encode(weight: np.ndarray, name: str, rotation: tuple[int, int] = (64, 64), **more: object) -> EncodedModule:
    options = EncoderOptions(**{"scale_search_tiles": 8, **more})  # type: ignore[arg-type]
    return encode_module(weight, get_codebook(name), rotation, seed=1, name="layers.0.up", options=options)


def decoded(module: EncodedModule) -> np.ndarray:
    """By the reference decoder, in true size and the orientation of the weight."""
    whole = decode_weight(module.trellis, module.suh, module.svh, module.codebook, *module.rotation)
    return whole[: module.in_features, : module.out_features].T


def relative_error(weight: np.ndarray, module: EncodedModule) -> float:
    return float(np.square(weight - decoded(module)).sum() / np.square(weight.astype(np.float64)).sum())


def same(one: EncodedModule, other: EncodedModule) -> bool:
    pairs = ((one.trellis, other.trellis), (one.suh.view(np.uint16), other.suh.view(np.uint16)))
    pairs += ((one.svh.view(np.uint16), other.svh.view(np.uint16)),)
    numbers = [
        (m.stats.relative_mse, m.stats.relative_proxy_loss, m.stats.scale, m.stats.damping) for m in (one, other)
    ]
    return all(np.array_equal(*pair) for pair in pairs) and numbers[0] == numbers[1]


@pytest.mark.parametrize("name", ["e2m1@1.5", "e2m1@2", "int6@4", "exl3-mul1@2.5"])
def test_error_is_that_of_the_tiles(name: str) -> None:
    """For normal weights, within 1 %, all that is done around the trellis costs nothing."""
    weight, codebook = normal(128, 256), get_codebook(name)
    tiles = encode_tiles(to_rings(weight), codebook, scale=gain(codebook)).errors.sum() / np.square(weight).sum()
    module = encode(weight, name, (128, 128))
    assert relative_error(weight, module) < 1.01 * tiles
    assert relative_error(weight, module) == pytest.approx(module.stats.relative_mse, rel=1e-6)
    assert np.array_equal(pack_states(unpack_states(module.trellis), codebook.half_steps), module.trellis)


def test_what_scales_and_refit_are_worth() -> None:
    """On unlike channels each step lowers the error at the same number of bits."""
    weight = uneven(192, 128)
    settings = ({"channel_scales": False, "refit": False, "feedback": False}, {"refit": False, "feedback": False})
    errors = [relative_error(weight, encode(weight, "e2m1@2", **more)) for more in (*settings, {"feedback": False}, {})]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("rotation", [(64, 64), (0, 0), (128, 0)])
def test_zeros_decode_to_zeros(rotation: tuple[int, int], feedback: bool) -> None:
    """Rows and columns of zeros, exactly; the rest is unharmed."""
    weight = uneven(100, 90)
    weight[[0, 37]], weight[:, [5, 89]] = 0, 0
    module = encode(weight, "e2m1@2", rotation, feedback=feedback)
    back = decoded(module)
    assert not back[[0, 37]].any()
    assert not back[:, [5, 89]].any()
    assert np.flatnonzero(module.suh == 0).tolist() == [5, 89, *range(90, len(module.suh))]
    assert np.flatnonzero(module.svh == 0).tolist() == [0, 37, *range(100, len(module.svh))]
    assert not np.signbit(module.suh[module.suh == 0]).any()
    assert not np.signbit(module.svh[module.svh == 0]).any()
    assert relative_error(weight, module) < 0.08


def test_matrix_of_zeros() -> None:
    module = encode(np.zeros((20, 40), np.float32), "int5@3", (32, 0))
    assert not decoded(module).any()
    assert not module.suh.view(np.uint16).any()
    assert not module.svh.view(np.uint16).any()
    assert module.trellis.shape == (4, 2, 48)
    assert module.stats.relative_mse == 0
    hessian = Hessian(np.eye(40, dtype=np.float32), 1)
    again = encode_module(
        np.zeros((20, 40), np.float32), get_codebook("int5@3"), (32, 0), seed=1, name="m", hessian=hessian
    )
    assert np.array_equal(again.trellis, module.trellis)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (17, 33), (128, 576)])
@pytest.mark.parametrize("rotation", [(128, 128), (0, 0)])
def test_sizes(size: tuple[int, int], rotation: tuple[int, int]) -> None:
    weight = normal(*size)
    module = encode(weight, "e2m1@2", rotation)
    assert module.trellis.shape == (padded(size[1], rotation[0]) // 16, padded(size[0], rotation[1]) // 16, 32)
    assert module.suh.shape == (padded(size[1], rotation[0]),)
    assert module.svh.shape == (padded(size[0], rotation[1]),)
    assert not module.suh[size[1] :].any()
    assert not module.svh[size[0] :].any()
    assert relative_error(weight, module) < 0.07


@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1e4, 1e8])
def test_magnitudes_do_not_matter(magnitude: float) -> None:
    """Only the scales change, and they stay within F16 with the precision that the width needs."""
    weight = uneven(64, 64)
    small, usual = encode((weight * magnitude).astype(np.float32), "int6@4"), encode(weight, "int6@4")
    assert relative_error((weight * magnitude).astype(np.float32), small) == pytest.approx(
        usual.stats.relative_mse, rel=0.01
    )


def test_one_huge_row_and_one_tiny_row() -> None:
    """Channels count by themselves: neither spoils the others, nor is spoiled."""
    weight = uneven(64, 64)
    spoiled = weight.copy()
    spoiled[3] *= 1e5
    spoiled[4] *= 1e-2
    errors = []
    for source in (weight, spoiled):
        module = encode(source, "e2m1@2")
        error = np.square(source - decoded(module)).sum(axis=1) / np.square(source.astype(np.float64)).sum(axis=1)
        errors.append(error)
    assert errors[1].mean() == pytest.approx(errors[0].mean(), rel=0.1)
    assert errors[1].max() < 2 * errors[0].max()
    assert module.stats.flushed_outputs == 0


def test_channel_that_vanishes_is_reported() -> None:
    weight = uneven(64, 64)
    weight[9] *= 1e-30
    weight[:, 4] *= 1e-25
    module = encode(weight, "e2m1@2")
    assert (module.stats.flushed_inputs, module.stats.flushed_outputs) == (1, 1)
    assert len(module.stats.warnings) == 2
    assert np.isfinite(decoded(module)).all()


@pytest.mark.parametrize("magnitude", [1e-16, 1e15])
def test_scales_that_do_not_fit(magnitude: float) -> None:
    with pytest.raises(ScaleOverflowError, match=r"layers\.0\.up"):
        encode((normal(32, 32) * magnitude).astype(np.float32), "e2m1@2", (32, 32))


@pytest.mark.parametrize("with_hessian", [True, False])
def test_result_is_the_same_whatever_the_machine_does(with_hessian: bool) -> None:
    """Threads, size of the buffers, back end, and how the rows come."""
    weight, codebook = uneven(300, 64), get_codebook("e2m1@2")
    inputs = normal(64, 200)
    hessian = Hessian(inputs @ inputs.T, 200) if with_hessian else None

    class Rows:
        shape = (300, 64)
        reads = 0

        def rows(self, start: int, stop: int) -> np.ndarray:
            self.reads += 1
            return weight[start:stop].copy()

    def run(source: object, **more: object) -> EncodedModule:
        options = EncoderOptions(scale_search_tiles=4, **more)  # type: ignore[arg-type]
        return encode_module(source, codebook, (32, 0), seed=4, name="m", hessian=hessian, options=options)  # type: ignore[arg-type]

    first = run(weight)
    assert same(first, run(weight, threads=2))
    assert same(first, run(weight, buffer_bytes=1))
    assert same(first, run(Rows()))
    other = encode_module(weight, codebook, (32, 0), seed=5, name="m", options=EncoderOptions(scale_search_tiles=4))
    assert not np.array_equal(other.trellis, first.trellis)


def test_back_ends_agree() -> None:
    pytest.importorskip("numba")
    weight = normal(16, 16)
    assert same(
        *(encode(weight, "e2m1@2", (0, 0), backend=backend, scale_search_tiles=0) for backend in ("numba", "numpy")),
    )


def test_progress_adds_up() -> None:
    for feedback in (True, False):
        steps: list[int] = []
        options = EncoderOptions(scale_search_tiles=2, buffer_bytes=1, feedback=feedback)
        encode_module(
            normal(140, 50), get_codebook("e2m1@2"), (32, 0), seed=0, name="m", options=options, advance=steps.append
        )
        assert sum(steps) == 140 * 50
        assert min(steps) > 0
        assert len(steps) > 1


def test_sample_error_predicts_the_error() -> None:
    """Without feedback within 10 %, from a part of the tiles; padding and zeros are accounted for."""
    weight = normal(100, 150)
    codebooks = [get_codebook(name) for name in ("e2m1@2", "int6@4")]
    options = EncoderOptions(scale_search_tiles=12, feedback=False)
    guess = sample_errors(weight, codebooks, (128, 128), seed=1, name="m", options=options)
    for codebook, error in zip(codebooks, guess.relative_mse, strict=True):
        module = encode_module(weight, codebook, (128, 128), seed=1, name="m", options=options)
        assert error == pytest.approx(module.stats.relative_mse, rel=0.1)
        assert module.stats.energy == guess.energy == pytest.approx(np.square(weight, dtype="f8").sum(), rel=1e-12)
        alone = sample_errors(weight, [codebook], (128, 128), seed=1, name="m", options=options)
        assert alone.relative_mse == (error,)
    zeros = sample_errors(np.zeros((4, 4), np.float32), codebooks, (0, 0), seed=0, name="m")
    assert (zeros.relative_mse, zeros.energy) == ((0.0, 0.0), 0.0)


def test_hessian_without_content_is_reported() -> None:
    weight = normal(32, 32)
    hessian = Hessian(np.zeros((32, 32), np.float32), 0)
    module = encode_module(weight, get_codebook("e2m1@2"), (32, 32), seed=1, name="layers.0.up", hessian=hessian)
    assert len(module.stats.warnings) == 1
    assert module.stats.relative_proxy_loss is None
    assert relative_error(weight, module) < 0.08


def test_refusals() -> None:
    codebook = get_codebook("e2m1@2")
    weight = normal(32, 32)
    with pytest.raises(SourceError, match=r"layers\.7\.x"):
        encode_module(np.where(weight > 2, np.nan, weight), codebook, (0, 0), seed=0, name="layers.7.x")
    with pytest.raises(ShapeError, match=r"layers\.7\.x"):
        encode_module(
            weight, codebook, (0, 0), seed=0, name="layers.7.x", hessian=Hessian(np.eye(31, dtype=np.float32), 1)
        )
    with pytest.raises(ShapeError):
        encode_module(weight[:0], codebook, (0, 0), seed=0, name="m")
    with pytest.raises(UsageError):
        encode_module(weight, codebook, (0, 0), seed=-1, name="m")
    with pytest.raises(UsageError):
        encode_module(weight, codebook, (48, 0), seed=0, name="m")
    for wrong in (
        {"threads": 0},
        {"effort": "fast"},
        {"scale_search_tiles": -1},
        {"damping": 0.0},
        {"buffer_bytes": 0},
        {"backend": "no"},
    ):
        with pytest.raises(UsageError):
            encode(weight, "e2m1@2", (32, 32), **wrong)


def test_memory_is_bounded() -> None:
    """Of what numpy allocates: no copy of the whole weight, which comes in rows (here, of zeros but for a few)."""

    class Rows:
        shape = (16384, 128)

        def rows(self, start: int, stop: int) -> np.ndarray:
            block = np.zeros((stop - start, 128), np.float32)
            block[0] = 1.0
            return block

    options = EncoderOptions(scale_search_tiles=1, buffer_bytes=1 << 20, refit=False)
    encoded: list[int] = []

    class Enough(Exception):  # noqa: N818 - it ends the run, and is no error
        pass

    def advance(weights: int) -> None:
        encoded.append(weights)
        if sum(encoded) > 60_000:
            raise Enough

    encode_module(np.ones((16, 16), np.float32), get_codebook("e2m1@2"), (0, 0), seed=0, name="m", options=options)
    tracemalloc.start()
    try:
        with pytest.raises(Enough):
            encode_module(Rows(), get_codebook("e2m1@2"), (128, 0), seed=0, name="m", options=options, advance=advance)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    trellis = 16384 * 128 // 4
    assert peak < trellis + (6 << 20) < 16384 * 128 * 4
