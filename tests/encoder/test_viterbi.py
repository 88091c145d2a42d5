"""Encoding tiles: back ends that agree bit for bit, results that decode, input that is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.codec.trellis import unpack_states
from espalier_format.encoder import (
    EXACT,
    FAST,
    THOROUGH,
    Effort,
    EncodedTiles,
    backend,
    encode_tiles,
    from_rings,
    to_rings,
)
from espalier_format.encoder.branch_cost import branch_cost
from espalier_format.errors import DependencyError, DtypeError, ShapeError, UsageError
from espalier_format.kernels import reference

SCALE = {"e2m1": 0.44, "int5": 0.214, "int6": 0.103, "int8": 0.03, "exl3-mul1": 1.0}


def scale_of(codebook: Codebook) -> float:
    return SCALE.get(codebook.family, 1 / 1.244)


def normal_rings(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((count, 256)).astype(np.float32)


def both(targets: np.ndarray[Any, Any], codebook: Codebook, scale: float, effort: Effort) -> EncodedTiles:
    """Encode with both back ends and compare."""
    pytest.importorskip("numba")
    slow = encode_tiles(targets, codebook, scale=scale, effort=effort, backend="numpy")
    fast = encode_tiles(targets, codebook, scale=scale, effort=effort, backend="numba")
    np.testing.assert_array_equal(fast.states, slow.states)
    assert fast.errors.tobytes() == slow.errors.tobytes()
    return fast


@pytest.mark.parametrize("name", CODEBOOKS)
def test_numba_equals_numpy(name: str) -> None:
    """One ring of every codebook; half of it is ordinary, the rest far out, zero and huge."""
    targets = normal_rings(1, seed=len(name))
    targets[0, 128:192] *= 4
    targets[0, 192:224] = 0
    targets[0, 224:] *= 1e20
    encoded = both(targets, CODEBOOKS[name], scale_of(CODEBOOKS[name]), effort=Effort(3, short=len(name) % 2 == 1))
    np.testing.assert_array_equal(unpack_states(encoded.pack()), encoded.states)


@pytest.mark.parametrize("name", ["e2m1@1", "e2m1@1.5", "int6@4", "exl3-mcg@8"])
@pytest.mark.parametrize("kind", ["zero", "alternating", "random"])
def test_numba_equals_numpy_at_the_extremes(name: str, kind: str) -> None:
    """The largest costs at every step, in orders that drive metrics apart; and ties everywhere."""
    signs = {
        "zero": np.zeros(256),
        "alternating": np.where(np.arange(256) // 16 % 2, 1.0, -1.0),
        "random": np.where(normal_rings(1, seed=9)[0] > 0, 1.0, -1.0),
    }[kind]
    both(1e6 * signs[None, :], CODEBOOKS[name], scale_of(CODEBOOKS[name]), effort=EXACT)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_costs_fit_their_integers(name: str) -> None:
    """The bound that `branch_cost` states, and that 16-bit differences cannot wrap."""
    cost = branch_cost(CODEBOOKS[name])
    windows = [sum(cost.bits[(start + k) % 256] for k in range(cost.mixing_steps)) for start in range(2)]
    assert min(windows) >= 16
    assert (cost.mixing_steps + 2) * cost.largest < cost.unreachable == (1 << 31 if cost.wide else 1 << 15)
    assert (cost.mixing_steps + 2) * (((cost.limit + 1) << cost.shift) ** 2 >> cost.drop) >= cost.unreachable
    largest_code = int(np.abs(cost.codes.astype(np.int64)).max())
    largest_target = int(cost.fixed_point(np.array([1e9]), 1.0)[0])
    assert largest_target == int(cost.codes.max()) + cost.reach
    assert largest_code + largest_target < (1 << 16 if cost.wide else 1 << 15)
    assert cost.limit << cost.shift < 1 << 16
    # A target that was clamped still prefers the nearest code to one a quarter of the limit away.
    near, far = cost.codes.max(), cost.codes.max() - cost.limit // 4
    costs = cost.of(largest_target, np.array([near, far], np.int16))
    assert costs[0] < costs[1]
    # Codes lie exactly on the grid; EXL3's are rounded by at most half a unit.
    off_grid = np.abs(cost.codes - CODEBOOKS[name].codes.astype(np.float64) * cost.units).max()
    assert off_grid == 0 if CODEBOOKS[name].is_grid else off_grid <= 0.5


def test_cost_is_monotone_in_the_distance() -> None:
    for name in ("e2m1@1", "int6@4", "int8@6"):
        cost = branch_cost(get_codebook(name))
        costs = cost.of(-200, np.arange(-200, 32000, dtype=np.int16))
        assert costs[0] == 0
        assert (np.diff(costs) >= 0).all()
        assert costs[-1] == cost.largest


@pytest.mark.parametrize("name", ["e2m1@1.5", "int5@3", "exl3-mul1@2.5"])
def test_encoded_matrix_decodes(name: str) -> None:
    """Matrix to rings to trellis to the reference decoder, and back to the rings' values."""
    pytest.importorskip("numba")
    codebook = get_codebook(name)
    matrix = normal_rings(6, seed=1).reshape(32, 48)
    rings = to_rings(matrix)
    np.testing.assert_array_equal(from_rings(rings, 48), matrix)
    encoded = encode_tiles(rings, codebook, scale=scale_of(codebook))
    codes = reference.decode_codes(encoded.pack().reshape(2, 3, -1), codebook)
    decoded = codes.astype(np.float64) * (codebook.value_scale * scale_of(codebook))
    np.testing.assert_array_equal(decoded.astype(np.float32), from_rings(encoded.values, 48))
    error = np.square(matrix - decoded).sum()
    assert error == pytest.approx(encoded.errors.sum(), rel=1e-12)
    assert error / matrix.size < 1.2 * 0.25**codebook.bits


def test_quality_at_two_bits() -> None:
    """15,360 samples: within 4 % of the open trellis (the standard error is 0.7 %); benchmarks/encode.py has more."""
    pytest.importorskip("numba")
    encoded = encode_tiles(normal_rings(60, seed=2), get_codebook("e2m1@2"), scale=0.441726)
    assert 0.97 < encoded.errors.mean() / 256 / 0.066721 < 1.04


def test_a_third_pass_pays() -> None:
    """In integer costs no ring gets worse; on average they get a little better."""
    pytest.importorskip("numba")
    targets, codebook = normal_rings(24, seed=5), get_codebook("e2m1@2")
    cost = branch_cost(codebook)
    wanted = cost.fixed_point(targets, 0.44)
    totals = []
    for effort in (EXACT, THOROUGH, Effort(4)):
        codes = cost.codes[encode_tiles(targets, codebook, scale=0.44, effort=effort).states]
        distance = np.minimum(np.abs(wanted.astype(np.int64) - codes), cost.limit) << cost.shift
        totals.append((distance**2 >> cost.drop).sum(axis=1))
    assert (totals[1] <= totals[0]).all()
    assert (totals[2] <= totals[1]).all()
    assert totals[1].sum() < totals[0].sum()


@pytest.mark.parametrize("name", ["e2m1@1.5", "int6@4"])
def test_a_short_free_pass_costs_little(name: str) -> None:
    """15,360 samples: between nothing and 2 % more error than the exact search, and other states."""
    pytest.importorskip("numba")
    targets, codebook = normal_rings(60, seed=8), get_codebook(name)
    fast, exact = (encode_tiles(targets, codebook, scale=scale_of(codebook), effort=effort) for effort in (FAST, EXACT))
    assert 1 < fast.errors.sum() / exact.errors.sum() < 1.02
    same = (fast.states == exact.states).all(axis=1)
    assert same.any()
    assert not same.all()


def test_result_does_not_depend_on_threads_or_neighbours() -> None:
    pytest.importorskip("numba")
    targets, codebook = normal_rings(5, seed=3), get_codebook("e2m1@2")
    whole = encode_tiles(targets, codebook, scale=0.44, backend="numba").states
    for threads in (2, 3, 7):
        again = encode_tiles(targets, codebook, scale=0.44, backend="numba", threads=threads)
        np.testing.assert_array_equal(again.states, whole)
    for ring in range(5):
        alone = encode_tiles(targets[ring : ring + 1], codebook, scale=0.44, backend="numba")
        np.testing.assert_array_equal(alone.states[0], whole[ring])


def test_memory_order_and_precision_of_the_targets_do_not_matter() -> None:
    pytest.importorskip("numba")
    targets, codebook = normal_rings(3, seed=4), get_codebook("e2m1@2")
    states = encode_tiles(targets, codebook, scale=0.44).states
    for same in (np.asfortranarray(targets), targets.astype(np.float64)):
        np.testing.assert_array_equal(encode_tiles(same, codebook, scale=0.44).states, states)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_no_rings(name: str) -> None:
    if name == "numba":
        pytest.importorskip("numba")
    encoded = encode_tiles(np.empty((0, 256)), get_codebook("e2m1@2"), scale=0.44, backend=name)
    assert encoded.states.shape == (0, 256)
    assert encoded.errors.shape == (0,)
    assert encoded.pack().shape == (0, 32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_targets_that_are_no_numbers_are_refused(bad: float) -> None:
    targets = normal_rings(2).astype(np.float64)
    targets[1, 77] = bad
    with pytest.raises(UsageError, match="targets must be finite"):
        encode_tiles(targets, get_codebook("e2m1@2"), scale=0.44)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_scales_that_make_no_sense_are_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="scale"):
        encode_tiles(normal_rings(1), get_codebook("e2m1@2"), scale=scale)


def test_other_bad_arguments_are_refused() -> None:
    codebook = get_codebook("e2m1@2")
    with pytest.raises(ShapeError, match="rings"):
        encode_tiles(normal_rings(1).reshape(16, 16), codebook, scale=0.44)
    with pytest.raises(DtypeError, match="floating"):
        encode_tiles(np.zeros((1, 256), np.int8), codebook, scale=0.44)
    with pytest.raises(UsageError, match="threads"):
        encode_tiles(normal_rings(1), codebook, scale=0.44, threads=0)
    for wrong in ((1,), (2.0,), (True,), ("3",), (2, "no")):
        with pytest.raises(UsageError, match="passes"):
            Effort(*wrong)  # type: ignore[arg-type]
    for effort in ("fast", None, 3):
        with pytest.raises(UsageError, match="effort"):
            encode_tiles(normal_rings(1), codebook, scale=0.44, effort=effort)  # type: ignore[arg-type]
    for bad in (np.inf, -np.inf, np.nan):
        for dtype in (np.float16, np.float32, np.float64):
            with pytest.raises(UsageError, match="finite"):
                encode_tiles(np.full((1, 256), bad, dtype), codebook, scale=0.44)
    with pytest.raises(UsageError, match="back end"):
        encode_tiles(normal_rings(1), codebook, scale=0.44, backend="abacus")
    with pytest.raises(ShapeError, match="whole tiles"):
        to_rings(np.zeros((16, 24)))
    with pytest.raises(ShapeError, match="fill"):
        from_rings(np.zeros((3, 256)), 32)


def test_what_a_back_end_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, Effort, int]] = []

    def search(targets: np.ndarray[Any, Any], cost: Any, effort: Effort, threads: int) -> np.ndarray[Any, Any]:
        seen.append((len(targets), effort, threads))
        assert targets.dtype == np.int16
        return np.zeros(targets.shape, np.uint16)

    monkeypatch.setitem(backend._LOADERS, "zeros", lambda: search)
    encoded = encode_tiles(normal_rings(2), get_codebook("e2m1@2"), scale=0.44, backend="zeros", threads=5)
    assert seen == [(2, THOROUGH, 5)]
    assert not encoded.states.any()


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow back end is taken only where it is asked for; everything else says what to install."""
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    monkeypatch.setattr(backend, "_has_able_gpu", lambda: False)
    rings, codebook = normal_rings(1), get_codebook("e2m1@2")
    assert encode_tiles(rings, codebook, scale=0.44, backend="numpy").states.shape == (1, 256)
    with pytest.raises(DependencyError, match=r"the extra \[cpu\] brings: pip install numba; the back end numpy"):
        encode_tiles(rings, codebook, scale=0.44)
    with pytest.raises(DependencyError, match="pip install numba"):
        backend.load_backend("numba")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the GPU says what is missing; "auto" goes on without one, also where only the driver is installed."""
    monkeypatch.setattr(backend, "CDLL", lambda _: None)
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    with pytest.raises(DependencyError, match="PyTorch and cuda-core"):
        backend.load_backend("cuda")
    with pytest.raises(DependencyError, match="without a GPU needs numba"):
        backend.load_backend("auto")
    monkeypatch.undo()
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "CDLL", lambda _: None)
    with pytest.raises(DependencyError, match="CUDA device"):
        backend.load_backend("cuda")
    assert backend.load_backend("auto") is backend.load_backend("numba")


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, tuple[int, int]], None]:
    """A function that makes torch see a GPU of so much shared memory a block, in KiB, and that compute capability."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cuda.core")
    loading = pytest.importorskip("espalier_format.kernels.cuda.loading")

    def pretend(kibibytes: int, capability: tuple[int, int]) -> None:
        properties = SimpleNamespace(shared_memory_per_block_optin=kibibytes << 10)
        monkeypatch.setattr(backend, "CDLL", lambda _: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr("espalier_format.kernels.cuda.viterbi.architecture", inspect.unwrap(loading.architecture))

    return pretend


@pytest.mark.parametrize(
    ("kibibytes", "capability", "codebook", "expected"),
    [
        (227, (9, 0), None, "cuda"),
        (227, (9, 0), "e2m1@1", "cuda"),
        (163, (8, 0), None, "numba"),
        (163, (8, 0), "e2m1@1.5", "numba"),
        (163, (8, 0), "e2m1@2", "cuda"),
        (99, (8, 9), None, "numba"),
        (99, (8, 9), "e2m1@2", "numba"),
        (99, (8, 9), "int6@4", "cuda"),
        (99, (12, 0), "int8@6", "numba"),
        (96, (7, 0), "int6@4", "numba"),
    ],
)
def test_auto_takes_a_gpu_that_can_encode_the_codebook(
    kibibytes: int,
    capability: tuple[int, int],
    codebook: str | None,
    expected: str,
    gpu_of: Callable[[int, tuple[int, int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one that can, and without numba, the error names both; asked for by name, the GPU says what it lacks."""
    gpu_of(kibibytes, capability)
    book = None if codebook is None else get_codebook(codebook)
    monkeypatch.setattr(backend, "find_spec", lambda name: name in ("torch", "numba") or None)
    fitting = {"cuda": backend._cuda, "numba": backend._numba}[expected]()
    assert backend.load_backend("auto", book) is fitting
    if expected == "cuda":
        assert backend.load_backend("cuda", book) is fitting
        return
    words = "too little shared memory to encode.*--backend numba" if capability >= (8, 0) else "too old"
    with pytest.raises(UsageError, match=words):
        backend.load_backend("cuda", book)
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "torch" or None)
    with pytest.raises(DependencyError, match=words.replace(" to encode", "") + ".*pip install numba"):
        backend.load_backend("auto", book)


def test_a_numba_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espalier_format.encoder.numba_backend", None)
    monkeypatch.delattr(sys.modules["espalier_format.encoder"], "numba_backend", raising=False)
    with pytest.raises(DependencyError, match="numba is installed, but cannot be imported"):
        backend.load_backend("numba")
