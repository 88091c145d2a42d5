"""The trellis search on a GPU: the states of the numba back end, bit for bit, for every codebook, also at the extremes.

The numba back end itself is compared with the definition in tests/encoder/test_viterbi.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.encoder import EXACT, FAST, THOROUGH, Effort, encode_tiles
from espalier_format.encoder.branch_cost import BranchCost, branch_cost
from espalier_format.errors import DtypeError, EspalierError, ShapeError, UsageError
from espalier_format.kernels.cuda.viterbi import LARGEST_SHARED_BYTES, TABLE, SearchForm

torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("poisoned")

ONE_OF_EACH_FORM = ("e2m1@1", "e2m1@1.5", "e2m1@2", "int5@2.5", "int6@3.5", "int8@5", "exl3-mul1@1", "exl3-mul1@3")


def normal_targets(cost: BranchCost, rings: int, seed: int) -> NDArray[np.int16]:
    """Normal samples with the standard deviation of the codes."""
    values = np.random.default_rng(seed).standard_normal((rings, 256)) * cost.codes.astype(np.float64).std()
    return fixed_point(values, cost)


def fixed_point(values: NDArray[Any], cost: BranchCost) -> NDArray[np.int16]:
    return cost.fixed_point(values, cost.units / cost.codebook.value_scale)


def extreme_targets(cost: BranchCost) -> NDArray[np.int16]:
    """The largest costs at every step, in several orders, and ties everywhere; steps between the two."""
    generator = np.random.default_rng(7)
    position = np.arange(256)
    rows = [
        np.zeros(256),
        np.full(256, 1e9),
        np.full(256, -1e9),
        np.full(256, float(cost.codes.max())),
        np.where(position // 16 % 2, 1e9, -1e9),
        np.where(position % 2, 1e9, -1e9),
        np.where(generator.standard_normal(256) > 0, 1e9, -1e9),
        np.where(position < 128, 0.0, 1e9),
        np.where(position < 250, generator.standard_normal(256) * 4 * cost.codes.std(), 0.0),
    ]
    return fixed_point(np.array(rows), cost)


def by_both(targets: NDArray[np.int16], cost: BranchCost, effort: Effort) -> None:
    """Search on the GPU and on the CPU and compare."""
    pytest.importorskip("numba")
    from espalier_format.encoder import numba_backend
    from espalier_format.kernels.cuda.viterbi import search

    found = search(targets, cost, effort, 1)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, numba_backend.search(targets, cost, effort, 4))


@gpu
@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.capability("CUDA kernels", "encoder, the same states as on the CPU", device=True)
def test_same_states_as_on_the_cpu(name: str, cuda: str) -> None:
    """An odd number of rings: narrow searches take two or four at a time. Memory is poisoned before."""
    cost = branch_cost(CODEBOOKS[name])
    by_both(np.concatenate([normal_targets(cost, 4, seed=len(name)), extreme_targets(cost)]), cost, THOROUGH)


@gpu
@pytest.mark.parametrize("name", ONE_OF_EACH_FORM)
@pytest.mark.parametrize("effort", [EXACT, Effort(4), Effort(5), FAST, Effort(3, short=True)], ids=str)
def test_any_effort(name: str, effort: Effort, cuda: str) -> None:
    """The last pass starts at position 0 or at 128, and the free one at 128 or 192."""
    cost = branch_cost(get_codebook(name))
    by_both(np.concatenate([normal_targets(cost, 3, seed=effort.passes), extreme_targets(cost)]), cost, effort)


@gpu
@pytest.mark.parametrize("name", ["e2m1@2", "int6@4", "int8@6"])
def test_small_numbers_of_rings(name: str, cuda: str) -> None:
    cost = branch_cost(get_codebook(name))
    for rings in (0, 1, 2, 3):
        by_both(normal_targets(cost, rings, seed=rings), cost, EXACT)


@gpu
@pytest.mark.parametrize("name", ["e2m1@2", "int5@3"])
def test_many_rings(name: str, cuda: str) -> None:
    """More than the blocks take at a time, and no multiple of it: every ring by itself, whatever its neighbours."""
    from espalier_format.kernels.cuda.viterbi import search

    cost = branch_cost(get_codebook(name))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    few = normal_targets(cost, 61, seed=3)
    rings = np.random.default_rng(4).integers(0, len(few), 9 * blocks + 5)
    np.testing.assert_array_equal(search(few[rings], cost, FAST, 1), search(few, cost, FAST, 1)[rings])


@gpu
def test_on_another_stream_and_into_memory_that_was_used(cuda: str) -> None:
    """The result depends neither on what device memory holds nor on the stream."""
    from espalier_format.kernels.cuda.viterbi import search_on_device

    cost = branch_cost(get_codebook("e2m1@2"))
    targets = torch.from_numpy(normal_targets(cost, 20, seed=5)).cuda()
    expected = search_on_device(targets, cost, THOROUGH).clone()
    for filling in (0, -1):
        poison = torch.full((1 << 24,), filling, dtype=torch.int32, device="cuda")
        del poison
        with torch.cuda.stream(torch.cuda.Stream()):
            found = search_on_device(targets, cost, THOROUGH)
            torch.cuda.current_stream().synchronize()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        (torch.zeros(4, 256, dtype=torch.int32), DtypeError, "int16"),
        (torch.zeros(4, 128, dtype=torch.int16), ShapeError, "256"),
        (torch.zeros(256, dtype=torch.int16), ShapeError, "256"),
        (torch.zeros(256, 4, dtype=torch.int16).T, ShapeError, "contiguous"),
        (torch.zeros(4, 256, dtype=torch.int16), UsageError, "CUDA device"),
        (torch.zeros(0, 256, dtype=torch.int32), DtypeError, "int16"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    targets: Any, error: type[EspalierError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled, loaded or launched."""
    from espalier_format.kernels.cuda import viterbi

    monkeypatch.setattr(viterbi, "_prepared", None)
    monkeypatch.setattr(viterbi, "launch", None)
    with pytest.raises(error, match=words):
        viterbi.search_on_device(targets, branch_cost(get_codebook("e2m1@2")), EXACT)


@gpu
def test_encode_tiles_with_the_back_end(cuda: str) -> None:
    """The whole way, by name, from float targets to errors."""
    pytest.importorskip("numba")
    targets = np.random.default_rng(6).standard_normal((9, 256)).astype(np.float32)
    for name, scale in (("e2m1@2", 0.44), ("exl3-mul1@4", 1.1)):
        ours = encode_tiles(targets, get_codebook(name), scale=scale, backend="cuda")
        theirs = encode_tiles(targets, get_codebook(name), scale=scale, backend="numba")
        np.testing.assert_array_equal(ours.states, theirs.states)
        assert ours.errors.tobytes() == theirs.errors.tobytes()


def test_every_width_fits_the_shared_memory_that_auto_asks_for() -> None:
    """Of compute capabilities 9.0 and 10.0: 227 KiB a block."""
    forms = [SearchForm.of(branch_cost(codebook)) for codebook in CODEBOOKS.values()]
    assert max(form.shared_bytes for form in forms) <= LARGEST_SHARED_BYTES <= 227 << 10


@pytest.mark.parametrize("name", CODEBOOKS)
def test_metrics_fit(name: str) -> None:
    """The largest sums that the kernel forms before it takes the least, from the bounds in `branch_cost`."""
    cost = branch_cost(CODEBOOKS[name])
    form = SearchForm.of(cost)
    steps, largest = cost.mixing_steps, cost.largest
    lag = 2 if cost.wide else 7 if form.two_steps else 5  # steps until the least metric is subtracted, and more
    metric = max((steps + lag) * largest, steps * largest + 1 + (steps - 1) * largest)
    assert metric + largest < (1 << 32 if cost.wide else 1 << 16)
    if form.cost != TABLE:  # distances are not clamped before they are squared, and narrow sums are floats
        distance = int(cost.codes.max()) - int(cost.codes.min()) + cost.reach
        unclamped = (distance << cost.shift) ** 2 >> cost.drop
        assert metric + unclamped < (1 << 32 if cost.wide else 1 << 22)


def test_a_device_without_the_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch.launch` asks the driver; here it refuses."""
    from espalier_format.kernels.cuda import launch, loading

    def refuse(kernel: object, size: int, device_index: int) -> None:
        raise UsageError("cuda:0 has less shared memory than the kernel needs", expected=size)

    monkeypatch.setattr(loading, "allow_shared_memory", refuse)
    monkeypatch.setattr(launch, "allow_shared_memory", refuse)
    with pytest.raises(UsageError, match="shared memory"):
        launch.launch(object(), 0, (1, 1, 1), 32, 150 << 10)
