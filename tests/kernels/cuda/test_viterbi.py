"""The trellis search on a GPU: the states of the numba back end, bit for bit, for every codebook, also at the extremes.

The numba back end itself is compared with the definition in tests/encoder/test_viterbi.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.encoder import EXACT, FAST, THOROUGH, Effort, encode_tiles
from espalier_format.encoder.branch_cost import BranchCost, branch_cost
from espalier_format.errors import DtypeError, EspalierError, ShapeError, UsageError
from espalier_format.kernels.cuda import compiler, viterbi
from espalier_format.kernels.cuda.viterbi import FLOAT, TABLE, WIDE, SearchForm, form_within, search_forms

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


def skip_unless_it_fits(codebook: Codebook) -> SearchForm:
    """Skip where the GPU at hand has too little shared memory; `WIDTHS` says which have."""
    try:
        return viterbi.form_on(codebook, 0)
    except UsageError as refusal:
        pytest.skip(str(refusal))


def by_both(targets: NDArray[np.int16], cost: BranchCost, effort: Effort) -> None:
    """Search on the GPU and on the CPU and compare."""
    pytest.importorskip("numba")
    skip_unless_it_fits(cost.codebook)
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
    skip_unless_it_fits(cost.codebook)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    few = normal_targets(cost, 61, seed=3)
    rings = np.random.default_rng(4).integers(0, len(few), 9 * blocks + 5)
    np.testing.assert_array_equal(search(few[rings], cost, FAST, 1), search(few, cost, FAST, 1)[rings])


@gpu
def test_on_another_stream_and_into_memory_that_was_used(cuda: str) -> None:
    """The result depends neither on what device memory holds nor on the stream."""
    from espalier_format.kernels.cuda.viterbi import search_on_device

    cost = branch_cost(get_codebook("e2m1@2"))
    skip_unless_it_fits(cost.codebook)
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
        skip_unless_it_fits(get_codebook(name))
        ours = encode_tiles(targets, get_codebook(name), scale=scale, backend="cuda")
        theirs = encode_tiles(targets, get_codebook(name), scale=scale, backend="numba")
        np.testing.assert_array_equal(ours.states, theirs.states)
        assert ours.errors.tobytes() == theirs.errors.tobytes()


SHARED_KIB = {"8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""Shared memory that a block may have, by compute capability: from the CUDA C++ Programming Guide."""

ALL_WIDTHS = {"1", "1.5", "2", "2.5", "3", "3.5", "4", "5", "6", "7", "8"}
WIDTHS = {227: ALL_WIDTHS, 163: ALL_WIDTHS - {"1", "1.5"}, 99: {"2.5", "3", "3.5", "4"}}
"""Of codebooks that can be encoded, by KiB of shared memory: what the README says."""


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", CODEBOOKS)
def test_which_codebooks_fit_which_architecture(name: str, capability: str) -> None:
    limit = SHARED_KIB[capability] << 10
    codebook = CODEBOOKS[name]
    if codebook.width in WIDTHS[SHARED_KIB[capability]]:
        form = form_within(codebook, limit, "cuda:0")
        assert form.shared_bytes <= limit
        assert form in search_forms(codebook)
        return
    with pytest.raises(UsageError, match=r"cuda:3 has too little shared memory to encode .*--backend numba") as refusal:
        form_within(codebook, limit, "cuda:3")
    assert name in str(refusal.value)
    assert f"{limit:,}" in str(refusal.value)
    assert f"{min(form.shared_bytes for form in search_forms(codebook)):,} bytes" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "kibibytes", "cost", "rings", "two_steps"),
    [
        ("e2m1@1", 227, TABLE, 2, False),
        ("e2m1@2", 227, TABLE, 2, True),
        ("e2m1@2", 163, TABLE, 2, False),
        ("int5@2.5", 227, TABLE, 4, False),
        ("int5@2.5", 163, TABLE, 2, False),
        ("int5@2.5", 99, FLOAT, 2, False),
        ("int5@3", 163, TABLE, 4, False),
        ("int5@3", 99, TABLE, 2, False),
        ("int6@4", 163, TABLE, 4, False),
        ("int6@4", 99, TABLE, 2, False),
        ("int8@6", 163, WIDE, 1, False),
        ("exl3-mul1@2.5", 99, FLOAT, 2, False),
    ],
)
def test_the_fastest_form_that_fits(name: str, kibibytes: int, cost: int, rings: int, two_steps: bool) -> None:
    form = form_within(get_codebook(name), kibibytes << 10, "cuda:0")
    assert (form.cost, form.rings, form.two_steps) == (cost, rings, two_steps)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_forms_take_less_and_less_memory(name: str) -> None:
    sizes = [form.shared_bytes for form in search_forms(CODEBOOKS[name])]
    assert sizes == sorted(set(sizes), reverse=True)


SMALLER = [(name, form) for name in CODEBOOKS for form in search_forms(CODEBOOKS[name])[1:]]
"""Forms that only a device with less shared memory takes."""


def test_there_are_smaller_forms() -> None:
    assert {name for name, _ in SMALLER} == {name for name, book in CODEBOOKS.items() if book.is_grid} - {
        "int8@5", "int8@6",
    }  # fmt: skip


@gpu
@pytest.mark.parametrize(("name", "form"), SMALLER, ids=str)
@pytest.mark.parametrize("effort", [FAST, THOROUGH], ids=str)
def test_smaller_forms_find_the_same_states(
    name: str, form: SearchForm, effort: Effort, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced on a device that has the memory for larger ones."""
    if form.shared_bytes > torch.cuda.get_device_properties(0).shared_memory_per_block_optin:
        pytest.skip("too large for the GPU at hand")
    taken: list[SearchForm] = []

    def force(codebook: object, device: int) -> SearchForm:
        taken.append(form)
        return form

    monkeypatch.setattr(viterbi, "form_on", force)
    cost = branch_cost(CODEBOOKS[name])
    by_both(np.concatenate([normal_targets(cost, 4, seed=len(name)), extreme_targets(cost)]), cost, effort)
    assert set(taken) == {form}


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_what_an_architecture_takes_compiles_for_it(capability: str) -> None:
    """One codebook of each smaller form that this amount of memory asks for."""
    pytest.importorskip("cuda.core", reason="kernels are compiled by cuda-core, which is not installed")
    architecture = f"sm_{capability.replace('.', '')}"
    limit = SHARED_KIB[capability] << 10
    fitting = {
        name: [form for form in search_forms(CODEBOOKS[name]) if form.shared_bytes <= limit] for name, _ in SMALLER
    }
    chosen = {
        forms[0]: name for name, forms in fitting.items() if forms and forms[0] != search_forms(CODEBOOKS[name])[0]
    }
    assert bool(chosen) == (SHARED_KIB[capability] < 227)
    source = compiler.kernel_source("viterbi")
    for form, name in chosen.items():
        cubin, remarks = compiler.compile_text(source, "viterbi", form.macros, architecture)
        assert cubin.startswith(b"\x7fELF"), name
        assert remarks == "", name


def test_the_layout_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SearchForm.shared_bytes` is SHARED_BYTES of ``viterbi_layout.cuh``, for every form."""
    pytest.importorskip("cuda.core", reason="kernels are compiled by cuda-core, which is not installed")
    layout = compiler.kernel_source("viterbi").partition("// What a search needs to know")[0]
    for form in dict.fromkeys(form for codebook in CODEBOOKS.values() for form in search_forms(codebook)):
        check = f"{layout}\nstatic_assert(SHARED_BYTES == {form.shared_bytes} && THREADS == {form.threads});"
        compiler.compile_text(check, "viterbi", form.macros, "sm_80")


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, book in CODEBOOKS.items() for form in search_forms(book)], ids=str
)
def test_metrics_fit(name: str, form: SearchForm) -> None:
    """The largest sums that the kernel forms before it takes the least, from the bounds in `branch_cost`."""
    cost = branch_cost(CODEBOOKS[name])
    steps, largest = cost.mixing_steps, cost.largest
    lag = 2 if cost.wide else 7 if form.two_steps else 5  # steps until the least metric is subtracted, and more
    metric = max((steps + lag) * largest, steps * largest + 1 + (steps - 1) * largest)
    assert metric + largest < (1 << 32 if cost.wide else 1 << 16)
    if form.cost != TABLE:  # distances are not clamped before they are squared, and narrow sums are floats
        distance = int(cost.codes.max()) - int(cost.codes.min()) + cost.reach
        unclamped = (distance << cost.shift) ** 2 >> cost.drop
        assert metric + unclamped < (1 << 32 if cost.wide else 1 << 22)


def test_a_device_without_the_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its properties say: `launch.launch` asks the driver, and here it refuses."""
    from espalier_format.kernels.cuda import launch, loading

    def refuse(kernel: object, size: int, device_index: int) -> None:
        raise UsageError("cuda:0 has less shared memory than the kernel needs", expected=size)

    monkeypatch.setattr(loading, "allow_shared_memory", refuse)
    monkeypatch.setattr(launch, "allow_shared_memory", refuse)
    with pytest.raises(UsageError, match="shared memory"):
        launch.launch(object(), 0, (1, 1, 1), 32, 150 << 10)
