"""The product on a CUDA device, against a float64 product with the reference decoder's codes.

The bound is derived in `Case.check`. Not checked here: how fast it is (benchmarks/cuda_matmul.py), and architectures
other than the one at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS, hadamard
from espalier_format.errors import CodebookError, DtypeError, ShapeError, UsageError
from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import ops  # noqa: E402
from espalier_format.kernels.cuda import matmul as cuda_matmul  # noqa: E402
from espalier_format.kernels.cuda.matmul_plan import Device, candidates  # noqa: E402
from espalier_format.kernels.matmul import MOST_FUSED_ROWS, fused_rows  # noqa: E402

matmul = ops.matmul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no CUDA device from 8.0 on",
    ),
]
Maker = Callable[..., Any]

UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The relative error of rounding the result."""
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-109}
"""The absolute error of results near zero: half the spacing of subnormal float16; for bfloat16, whose numbers are kept
2^24 smaller in float32 on the way, that of subnormal float32 times 2^24, and much more than one of them."""
OPERAND_ROUNDOFF = 2.0**-11
"""Rotated activations are rounded to float16,"""
OPERAND_FLOOR = 2.0**-39
"""times a power of two that keeps them below 2^15: where 2^-25 is the error of subnormal ones, that is 2^-39 of the
largest |x suh| times the rotation block."""
SUM_ROUNDOFF = 2.0**-22
"""An mma adds 16 products to a float32 sum, with truncation: below 2^-22 of all magnitudes, for each tile along k."""


class Case:
    """A module on the device, with everything that an expected value needs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.tensors = [torch.from_numpy(a.copy()).cuda() for a in (module.trellis, module.suh, module.svh)]
        codes = reference.decode_codes(module.trellis, module.codebook)
        self.values = codes.astype(np.float64) * module.codebook.value_scale

    def product(self, x: Any, bias: Any = None) -> Any:
        """The result, after memory that is likely to become it has been filled with NaN."""
        module = self.module
        for _ in range(2):
            poison = torch.full((*x.shape[:-1], module.out_features), float("nan"), dtype=x.dtype, device="cuda")
            del poison
        sizes = module.in_features, module.out_features
        return matmul(x, *self.tensors, bias, module.codebook.name, *module.rotation, *sizes)

    def check(self, x: Any, bias: Any, got: Any) -> None:
        """Compare every element with the exact one.

        With t = x suh (exact in float32), the rotated input has an error of OPERAND_ROUNDOFF |x'| + OPERAND_FLOOR b
        max|t| and, from log2(b) additions in float32, log2(b) 2^-24 sum |t| of its block. Times |V| and summed over k,
        together with the error of that sum itself, it is an error before the second rotation; which adds up the errors
        of a block, and its own roundings. Scales, bias and result are rounded a few times more.
        """
        module = self.module
        block_in, block_out = (max(block, 1) for block in module.rotation)
        padded_in, padded_out = self.values.shape
        t = np.zeros((x.shape[0], padded_in))
        t[:, : module.in_features] = x.to(torch.float64).cpu().numpy()
        t *= module.suh.astype(np.float64)
        blocks = t.reshape(len(t), -1, block_in)
        inputs = (blocks @ hadamard(module.rotation[0]).astype(np.float64)).reshape(t.shape)
        spread = np.repeat(np.abs(blocks).sum(-1), block_in, axis=-1).reshape(t.shape)
        inputs_error = OPERAND_ROUNDOFF * np.abs(inputs) + np.log2(block_in) * 2.0**-24 * spread
        inputs_error += OPERAND_FLOOR * block_in * np.abs(t).max(-1, keepdims=True)
        magnitude = np.abs(inputs) @ np.abs(self.values)
        error = inputs_error @ np.abs(self.values) + (padded_in / 16 + 4) * SUM_ROUNDOFF * magnitude

        sums = (inputs @ self.values).reshape(len(t), -1, block_out)
        exact = (sums @ hadamard(module.rotation[1]).astype(np.float64)).reshape(len(t), padded_out)
        error = error + np.log2(block_out) * 2.0**-24 * magnitude
        error = np.repeat(error.reshape(sums.shape).sum(-1), block_out, axis=-1).reshape(exact.shape)
        scales = module.svh.astype(np.float64) / np.sqrt(block_in * block_out)
        exact, error = exact * scales, error * np.abs(scales)
        exact, error = exact[:, : module.out_features], error[:, : module.out_features]
        if bias is not None:
            offset = bias.to(torch.float64).cpu().numpy()
            error = error + 2.0**-23 * np.abs(offset)
            exact = exact + offset
        bound = 1.01 * error + (UNIT_ROUNDOFF[x.dtype] + 2.0**-21) * np.abs(exact) + SMALLEST[x.dtype]

        assert got.dtype == x.dtype
        assert tuple(got.shape) == exact.shape
        assert got.is_contiguous()
        actual = got.to(torch.float64).cpu().numpy()
        assert np.isfinite(actual).all()
        assert np.all(np.abs(actual - exact) <= bound), float((np.abs(actual - exact) / bound).max())
        # The bound is for the worst case. Roundings are independent: together they stay below one of each, everywhere.
        typical, size = np.sqrt(np.mean((actual - exact) ** 2)), np.sqrt(np.mean(exact**2))
        assert typical <= (OPERAND_ROUNDOFF + 0.6 * UNIT_ROUNDOFF[x.dtype]) * size, (float(typical), float(size))


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode inside the product for all rows for which large weights are, in these tests of small ones."""
    monkeypatch.setattr("espalier_format.kernels.matmul.fused_rows", lambda _: MOST_FUSED_ROWS)


@pytest.fixture(scope="module")
def make_case(random_module: Maker) -> Callable[..., Case]:
    return lambda *arguments, **options: Case(random_module(*arguments, **options))


def activations(rows: int, features: int, dtype: Any, seed: int = 0) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, features, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("name", list(CODEBOOKS))
@pytest.mark.capability("CUDA kernels", "products with every codebook and rotation", device=True)
def test_every_codebook(name: str, make_case: Callable[..., Case]) -> None:
    case = make_case(name, (128, 128), 640, 384)
    for rows, dtype in ((1, torch.float16), (7, torch.bfloat16), (32, torch.float16)):
        x = activations(rows, 640, dtype)
        case.check(x, None, case.product(x))


@pytest.mark.parametrize("rotation_out", BLOCKS)
@pytest.mark.parametrize("rotation_in", BLOCKS)
@pytest.mark.capability("CUDA kernels", "products with every codebook and rotation", device=True)
def test_every_rotation(rotation_in: int, rotation_out: int, make_case: Callable[..., Case]) -> None:
    """Sizes that are no multiple of anything, so that padding is everywhere, with a bias of each dtype."""
    case = make_case("int5@3", (rotation_in, rotation_out), 501, 333, seed=rotation_in + rotation_out)
    for rows, dtype in ((1, torch.bfloat16), (5, torch.float16)):
        for bias_dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, bias = activations(rows, 501, dtype), activations(1, 333, bias_dtype, seed=1)[0]
            case.check(x, bias, case.product(x, bias))


@pytest.mark.parametrize("rows", [*range(1, 18), 24, 31, 32, 33, 48, 63, MOST_FUSED_ROWS])
def test_every_number_of_rows(rows: int, make_case: Callable[..., Case]) -> None:
    case = make_case("e2m1@1.5", (64, 128), 448, 256)
    x = activations(rows, 448, torch.float16, seed=rows)
    case.check(x, None, case.product(x))


@pytest.mark.parametrize(
    "size", [(1, 1), (16, 16), (17, 129), (64, 2000), (5000, 31), (2048, 512), (6000, 200), (300, 5000), (40, 36000)]
)
@pytest.mark.parametrize("name", ["e2m1@1", "exl3-mul1@2.5", "int6@4", "int8@6"])
def test_sizes(name: str, size: tuple[int, int], make_case: Callable[..., Case]) -> None:
    """Sizes that are cut into few and many parts on both sides, for one row and so many that inputs take turns."""
    for rotation, rows, dtype in (
        ((0, 0), 1, torch.float16),
        ((128, 256), 1, torch.bfloat16),
        ((32, 64), 64, torch.float16),
    ):
        case = make_case(name, rotation, *size)
        x = activations(rows, size[0], dtype)
        case.check(x, None, case.product(x))


@pytest.mark.parametrize(
    ("name", "rows"), [("e2m1@2", 1), ("int5@3", 1), ("int6@4", 6), ("exl3-mul1@2.5", 20), ("int8@6", 40)]
)
def test_every_plan(name: str, rows: int, make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the product is cut. With few multiprocessors a thread block takes several blocks of columns in turn."""
    case = make_case(name, (128, 128), 3000, 700)
    x = activations(rows, 3000, torch.float16)
    k_tiles, n_tiles, _ = case.module.trellis.shape
    device = cuda_matmul.device_limits(torch.cuda.current_device())
    seen = set()
    for multiprocessors in (1, 4, device.multiprocessors):
        cut_for = Device(multiprocessors, device.shared_bytes)
        for plan in candidates(case.module.codebook, 128, 128, k_tiles, n_tiles, rows, cut_for):
            monkeypatch.setattr(cuda_matmul, "make_plan", lambda *_, plan=plan: plan)
            case.check(x, None, case.product(x))
            seen.add((plan.prepared, plan.slice_tiles < k_tiles, plan.ranks > 1))
    assert len(seen) >= (2 if rows == 1 else 4)


def test_many_rows_are_decoded_first(make_case: Callable[..., Case]) -> None:
    """Weights are rounded to the dtype of x there: the bound is another one, of the same size."""
    case = make_case("int6@3.5", (128, 128), 500, 700)
    x, bias = activations(MOST_FUSED_ROWS + 1, 500, torch.float16), activations(1, 700, torch.float16, seed=1)[0]
    exact = x.to(torch.float64).cpu().numpy() @ reference.decode_weight(*case.module.operands())[:500, :700]
    exact += bias.to(torch.float64).cpu().numpy()
    got = case.product(x, bias).to(torch.float64).cpu().numpy()
    assert np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) <= 2 * OPERAND_ROUNDOFF


@pytest.mark.parametrize("size", [(512, 256), (2048, 4096)])
def test_fewer_rows_are_decoded_first_where_the_weight_is_small(
    size: tuple[int, int], make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the product is launched up to `fused_rows` rows, and not beyond."""
    monkeypatch.setattr("espalier_format.kernels.matmul.fused_rows", fused_rows)
    launched, launch = [], cuda_matmul.launch_matmul

    def counted(x: Any, *rest: Any) -> None:
        launched.append(len(x))
        launch(x, *rest)

    monkeypatch.setattr(cuda_matmul, "launch_matmul", counted)
    case = make_case("e2m1@2", (128, 128), *size)
    most = fused_rows(size[0] * size[1])
    assert 0 < most < MOST_FUSED_ROWS
    for rows in (most, most + 1):
        x = activations(rows, size[0], torch.float16)
        got = case.product(x).to(torch.float64)
        exact = x.double() @ torch.from_numpy(reference.decode_weight(*case.module.operands())).cuda()
        assert (got - exact).norm() <= 2 * OPERAND_ROUNDOFF * exact.norm()
    assert launched == [most]


@pytest.mark.parametrize("rows", [1, 20, MOST_FUSED_ROWS + 1])
def test_nothing_waits_for_the_device(
    rows: int, make_case: Callable[..., Case], no_waiting: Callable[..., Any]
) -> None:
    case = make_case("int8@6", (128, 128), 512, 256)
    x = activations(rows, 512, torch.bfloat16)
    case.product(x)
    with no_waiting():
        case.product(x)


def test_any_strides_and_dimensions(make_case: Callable[..., Case]) -> None:
    case = make_case("e2m1@2", (128, 128), 256, 128)
    x = activations(6, 256, torch.float16)
    expected = case.product(x)
    wide = torch.zeros(6, 300, dtype=x.dtype, device="cuda")
    wide[:, 3:259] = x
    assert torch.equal(case.product(wide[:, 3:259]), expected)
    assert torch.equal(case.product(x.t().contiguous().t()), expected)
    assert torch.equal(case.product(x.view(2, 3, 256)), expected.view(2, 3, 128))
    assert case.product(x[:0]).shape == (0, 128)
    assert torch.equal(case.product(x[0]), case.product(x[:1])[0])


def test_unaligned_operands(make_case: Callable[..., Case]) -> None:
    """Views into larger tensors, as of an expert bank, at addresses that are not multiples of 16."""
    case = make_case("e2m1@1.5", (0, 32), 48, 96)
    x = activations(3, 48, torch.float16)
    expected = case.product(x)
    for i, tensor in enumerate(case.tensors):
        shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:]
        case.tensors[i] = shifted.copy_(tensor.flatten()).view(tensor.shape)
        assert case.tensors[i].data_ptr() % 16 != 0
    assert torch.equal(case.product(x), expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_large_activations_are_not_lost(rows: int, make_case: Callable[..., Case]) -> None:
    """Products with suh, and sums of a rotation, would exceed float32 or float16 on the way; the result does not."""
    for size, suh, svh in ((1e30, 1.0, 1.0), (2e37, 6e4, 1e-7), (1e-30, 1.0, 1.0)):
        case = make_case("exl3-mul1@3", (128, 128), 512, 256)
        case.module.suh[:] *= np.float16(suh / 100)
        case.module.svh[:] = (case.module.svh.astype(np.float64) * svh).astype(np.float16)
        case.tensors[1:] = [torch.from_numpy(a.copy()).cuda() for a in (case.module.suh, case.module.svh)]
        x = (activations(rows, 512, torch.float32) * size).to(torch.bfloat16)
        case.check(x, None, case.product(x))


def test_one_outlier_does_not_cost_the_others(make_case: Callable[..., Case]) -> None:
    """A slice has one power of two for all of it: what is 2^20 smaller than its largest element is still there."""
    case = make_case("int5@3", (32, 32), 512, 64)
    x = activations(4, 512, torch.bfloat16)
    x[:, 0] *= 2.0**20
    x[1, 0] = 0
    case.check(x, None, case.product(x))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_activations_stay_visible(bad: float, make_case: Callable[..., Case]) -> None:
    """In their own row, and in no other."""
    case = make_case("e2m1@2", (128, 128), 256, 256)
    x = activations(3, 256, torch.float16)
    expected = case.product(x)
    x[1, 77] = bad
    got = case.product(x)
    assert not torch.isfinite(got[1]).any()
    assert torch.equal(got[::2], expected[::2])


@pytest.mark.parametrize("shape", [(2048, 512), (512, 4096), (4096, 384)])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_the_same_in_every_run(shape: tuple[int, int], rows: int, make_case: Callable[..., Case]) -> None:
    """Where thread blocks share columns as well, on several streams at once, and in graphs beside each other."""
    case = make_case("e2m1@2", (128, 128), *shape)
    x = activations(rows, shape[0], torch.float16)
    expected = case.product(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(case.product(x))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)

    graphs = [torch.cuda.CUDAGraph() for _ in streams]
    outputs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append([case.product(x) for _ in range(5)])
    for output in (output for each in outputs for output in each):
        output.fill_(float("nan"))
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        case.product(x)
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for each in outputs for output in each)


def test_a_replay_sees_new_activations(make_case: Callable[..., Case]) -> None:
    case = make_case("int6@4", (128, 128), 1024, 256)
    x, other = activations(2, 1024, torch.bfloat16), activations(2, 1024, torch.bfloat16, seed=1)
    expected = case.product(other)
    case.product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.product(x)
    x.copy_(other)
    graph.replay()
    assert torch.equal(output, expected)


def test_the_operator_is_well_formed(make_case: Callable[..., Case]) -> None:
    case = make_case("e2m1@2", (32, 32), 64, 96)
    sample = (activations(2, 64, torch.float16), *case.tensors, None, "e2m1@2", 32, 32, 64, 96)
    torch.library.opcheck(
        torch.ops.espalier_format.matmul.default, sample, test_utils=("test_schema", "test_faketensor")
    )


def test_errors_come_before_the_launch(make_case: Callable[..., Case]) -> None:
    case = make_case("int6@4", (32, 64), 50, 60)
    trellis, suh, svh = case.tensors
    x = activations(2, 50, torch.float16)
    rest = (None, "int6@4", 32, 64, 50, 60)
    cases: list[tuple[type[Exception], tuple[Any, ...]]] = [
        (DtypeError, (x.double(), trellis, suh, svh, *rest)),
        (DtypeError, (x, trellis.int(), suh, svh, *rest)),
        (DtypeError, (x, trellis, suh, svh.float(), *rest)),
        (ShapeError, (x[:, :49], trellis, suh, svh, *rest)),
        (ShapeError, (x, trellis, suh[:-1], svh, *rest)),
        (ShapeError, (x, trellis.transpose(0, 1).contiguous().transpose(0, 1), suh, svh, *rest)),
        (ShapeError, (x, trellis, suh, torch.zeros(128, dtype=torch.float16, device="cuda")[::2], *rest)),
        (ShapeError, (x, trellis, suh, svh, None, "int6@4", 128, 64, 50, 60)),
        (UsageError, (x, trellis, suh, svh, None, "int6@4", 48, 64, 50, 60)),
        (UsageError, (x, trellis, suh.cpu(), svh, *rest)),
        (UsageError, (x.cpu(), trellis, suh, svh, *rest)),
        (CodebookError, (x, trellis, suh, svh, None, "int6@9", 32, 64, 50, 60)),
    ]
    torch.cuda.synchronize()
    for error, arguments in cases:
        with pytest.raises(error):
            matmul(*arguments)
    torch.cuda.synchronize()
    case.check(x, None, case.product(x))
