"""The expert bank on a GPU, against a float64 computation from the decoded weights.

The bounds are on the root mean square of the error over that of the result. Rotated activations are rounded to float16
twice (before gate and up, before down), each time with an error of at most 2^-11 of the value, 2^-11 / sqrt(3) in the
mean square; gate and up meet in a product. The result is rounded to its dtype: half an ulp, 2^-11 or 2^-8. Together at
most sqrt(1 + 1 + 1 + 1) 2^-11 and 2^-8 (1 + 1/16); the activation's slope is at most 1.1. Doubled, for small samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from espalier_format.codec.codebook import CODEBOOKS, get_codebook  # noqa: E402
from espalier_format.errors import DtypeError, EspalierError, ShapeError, UsageError  # noqa: E402
from espalier_format.kernels import torch_decoder  # noqa: E402
from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank  # noqa: E402
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, ExpertBankLayout  # noqa: E402

pytestmark = pytest.mark.gpu

BOUND = {"float16": 2 * 2.0**-10 * 1.1, "bfloat16": 2 * 2.0**-8 * 1.1}
MIXED = ("e2m1@1", "e2m1@2", "int5@3")
FAMILIES = ("e2m1", "int5", "int6", "int8", "exl3-3inst", "exl3-mcg", "exl3-mul1")


class Bank:
    """A random bank on the GPU and its decoded weights, also on the GPU."""

    def __init__(
        self,
        books: Sequence[str],
        hidden: int,
        intermediate: int,
        rotations: Sequence[tuple[int, int]] = ((128, 128),) * 3,
        experts: int = 8,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        assigned = {name: [books[(number * 5 + place) % len(books)] for number in range(experts)]
                    for place, name in enumerate(PROJECTIONS)}  # fmt: skip
        self.hidden, self.experts, self.rng = hidden, experts, rng
        layout = ExpertBankLayout.of(hidden, intermediate, assigned, dict(zip(PROJECTIONS, rotations, strict=True)))
        buffers = layout.empty_buffers("cpu")
        self.weights: dict[str, list[Any]] = {name: [] for name in PROJECTIONS}
        for name, projection in layout.projections.items():
            for number in range(experts):
                trellis, suh, svh = layout.views(buffers, name, number)
                trellis.copy_(torch.from_numpy(rng.integers(-32768, 32768, trellis.shape).astype(np.int16)))
                # Padding is not zero: it must not matter.
                spread = 1 / np.sqrt(projection.in_features)
                suh.copy_(torch.from_numpy(rng.standard_normal(suh.shape) * spread))
                svh.copy_(torch.from_numpy(rng.standard_normal(svh.shape) * 0.5))
        self.operand = ExpertBankOperand(layout, **buffers).to("cuda")
        for name, projection in layout.projections.items():
            for number in range(experts):
                views = layout.views(self.operand.tensors(), name, number)
                # Within half an ulp of float32, by other code than the kernel's (tests/kernels/test_torch_decoder.py).
                weight = torch_decoder.decode_weight(
                    *views, get_codebook(assigned[name][number]), projection.rotation_in, projection.rotation_out,
                    projection.in_features, projection.out_features, "float32",
                )  # fmt: skip
                self.weights[name].append(weight.double())

    def exact(self, x: Any, ids: Any, weights: Any) -> Any:
        result = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for token, (experts, factors) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            row = x[token].double()
            for expert, factor in zip(experts, factors, strict=True):
                if 0 <= expert < self.experts:
                    gate, up, down = (self.weights[name][expert] for name in PROJECTIONS)
                    result[token] += factor * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
        return result

    def inputs(self, tokens: int, k: int, dtype: str = "float16") -> tuple[Any, Any, Any]:
        """Tokens of magnitude 1 or so; experts may repeat within a token, and -1 occurs."""
        x = torch.from_numpy(self.rng.standard_normal((tokens, self.hidden))).to("cuda", getattr(torch, dtype))
        ids = torch.from_numpy(self.rng.integers(-1, self.experts, (tokens, k))).cuda()
        return x, ids, torch.from_numpy(self.rng.random((tokens, k)).astype(np.float32)).cuda()

    def check(self, x: Any, ids: Any, weights: Any) -> Any:
        weights = weights.masked_fill(ids < 0, torch.nan)  # the weight of no expert is not looked at
        result = expert_bank(x, ids, weights, self.operand)
        assert result.dtype == x.dtype
        assert result.shape == x.shape
        exact = self.exact(x, ids, weights)
        error = (result.double() - exact).pow(2).mean().sqrt()
        assert float(error) <= BOUND[str(x.dtype).removeprefix("torch.")] * float(exact.pow(2).mean().sqrt())
        return result


@pytest.fixture(scope="module")
def mixed(cuda: str) -> Bank:
    """Three codebooks of three widths, whole blocks."""
    return Bank(MIXED, 512, 256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 8), (2, 3), (8, 8), (33, 4), (64, 8)])
def test_result_is_that_of_exact_weights(mixed: Bank, poisoned: None, tokens: int, k: int, dtype: str) -> None:
    mixed.check(*mixed.inputs(tokens, k, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_codebook(cuda: str, poisoned: None, family: str) -> None:
    bank = Bank([name for name in CODEBOOKS if name.startswith(f"{family}@")], 256, 128, seed=2)
    bank.check(*bank.inputs(9, 3))


@pytest.mark.parametrize(
    ("rotations", "hidden", "intermediate"),
    [
        (((0, 0), (0, 0), (0, 0)), 113, 51),
        (((32, 64), (64, 32), (32, 32)), 100, 49),
        (((256, 256), (256, 256), (256, 256)), 300, 257),
        (((0, 32), (256, 64), (64, 0)), 330, 100),
        (((128, 0), (32, 256), (0, 128)), 1040, 640),
    ],
)
def test_every_rotation_block_and_odd_sizes(
    cuda: str, poisoned: None, rotations: Any, hidden: int, intermediate: int
) -> None:
    bank = Bank(("e2m1@1.5", "exl3-mul1@2"), hidden, intermediate, rotations, seed=3)
    for tokens, k in ((1, 4), (20, 2)):
        bank.check(*bank.inputs(tokens, k, "bfloat16"))


def test_large_sizes_are_cut_into_slices(cuda: str, poisoned: None) -> None:
    """More inputs than a task takes at once."""
    bank = Bank(("int5@2.5", "int6@3.5", "int8@5"), 2304, 1152, experts=2)
    for tokens in (1, 9):
        bank.check(*bank.inputs(tokens, 2))


def test_one_expert_for_all_tokens(mixed: Bank, poisoned: None) -> None:
    """Groups of eight tokens, the last one of one; all other experts are never routed."""
    x, ids, weights = mixed.inputs(57, 1)
    mixed.check(x, torch.full_like(ids, 5), weights)


def test_an_expert_named_twice_counts_twice(mixed: Bank) -> None:
    x, _, weights = mixed.inputs(1, 2)
    ids = torch.full((1, 2), 3, device="cuda")
    mixed.check(x, ids, weights)


def test_numbers_without_expert_count_for_nothing(mixed: Bank, poisoned: None) -> None:
    x, ids, weights = mixed.inputs(4, 3)
    ids[:, 1] = torch.tensor([-1, 8, -(1 << 40), 1 << 40], device="cuda")
    mixed.check(x, ids, weights)
    assert not expert_bank(x, torch.full_like(ids, -1), weights, mixed.operand).any()


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("weights_dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_of_the_routing(mixed: Bank, ids_dtype: str, weights_dtype: str) -> None:
    x, ids, weights = mixed.inputs(3, 4)
    mixed.check(x, ids.to(getattr(torch, ids_dtype)), weights.to(getattr(torch, weights_dtype)))


def test_more_tokens_than_one_launch_takes(mixed: Bank, poisoned: None) -> None:
    mixed.check(*mixed.inputs(131, 8))


def test_no_tokens_and_no_experts(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(3, 2)
    assert expert_bank(x[:0], ids[:0], weights[:0], mixed.operand).shape == (0, mixed.hidden)
    assert not expert_bank(x, ids[:, :0], weights[:, :0], mixed.operand).any()


def test_strides_of_arguments_do_not_matter(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(6, 4)
    expected = expert_bank(x, ids, weights, mixed.operand)
    spread = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in (x, ids, weights)]
    assert not any(tensor.is_contiguous() for tensor in spread)
    assert torch.equal(expert_bank(*spread, mixed.operand), expected)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # not aligned to 16 bytes
    assert torch.equal(expert_bank(shifted, ids, weights, mixed.operand), expected)


def test_tokens_do_not_disturb_each_other(mixed: Bank) -> None:
    """Very small, very large, zero and infinite tokens beside ordinary ones."""
    x, ids, weights = mixed.inputs(8, 3, "bfloat16")
    factors = torch.tensor([1, 1e-18, 0, 1e9, 1, 1e-9, 1, 1], device="cuda")
    x *= factors.to(torch.bfloat16)[:, None]
    x[6] = torch.inf
    x[7, :256] *= 1e-12
    result = expert_bank(x, ids, weights, mixed.operand)
    exact = mixed.exact(x, ids, weights)
    for token in (0, 1, 2, 3, 4, 5, 7):
        error = (result[token].double() - exact[token]).pow(2).sum().sqrt()
        # Halving of small numbers ends at the smallest of bfloat16 and of float32 sums.
        assert float(error) <= BOUND["bfloat16"] * float(exact[token].pow(2).sum().sqrt()) + 1e-36, token


def test_the_same_in_every_run(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(64, 8)
    first = expert_bank(x, ids, weights, mixed.operand)
    for _ in range(20):
        assert torch.equal(expert_bank(x, ids, weights, mixed.operand), first)


def test_streams_do_not_disturb_each_other(mixed: Bank) -> None:
    inputs = [mixed.inputs(16, 8) for _ in range(4)]
    expected = [expert_bank(*each, mixed.operand) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in inputs]
    for _ in range(10):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[number].append(expert_bank(*inputs[number], mixed.operand))
    torch.cuda.synchronize()
    for number, each in enumerate(results):
        assert all(torch.equal(result, expected[number]) for result in each)


def test_a_graph_follows_the_routing(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(5, 4)
    expert_bank(x, ids, weights, mixed.operand)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = expert_bank(x, ids, weights, mixed.operand)
        again = expert_bank(result, ids, weights, mixed.operand)
    for _ in range(3):
        for target, source in zip((x, ids, weights), mixed.inputs(5, 4), strict=True):
            target.copy_(source)
        graph.replay()
        expected = expert_bank(x, ids, weights, mixed.operand)
        assert torch.equal(result, expected)
        assert torch.equal(again, expert_bank(expected, ids, weights, mixed.operand))


@pytest.mark.parametrize(("tokens", "k"), [(1, 4), (1, 8), (3, 8), (8, 8), (40, 8)])
def test_operands_may_be_written_right_before(cuda: str, tokens: int, k: int) -> None:
    """A launch reads what the copies before it have written, and not what a cache still holds of the launch before.

    Two banks that differ in every operand, the places and codebooks of experts too, share the memory of all of them.
    Memory is not poisoned here: that would put other kernels between the copies and the launch.
    """
    banks = [Bank(books, 512, 256, seed=seed) for seed, books in enumerate((MIXED, MIXED[::-1]))]
    operands, expected = [], []
    for bank in banks:
        inputs = bank.inputs(tokens, k)
        expected.append(bank.check(*inputs))
        packed = bank.operand
        operands.append((*inputs, packed.trellis, packed.scales, packed.offsets, packed.codebook_index))
    assert all(not torch.equal(one, other) for one, other in zip(*operands, strict=True))
    spelling = banks[0].operand.layout.spelling
    assert spelling == banks[1].operand.layout.spelling
    # What lies spread in memory is copied by a kernel, everything else by the driver.
    spread = [[torch.stack([tensor, tensor], -1)[..., 0] for tensor in each] for each in operands]
    shared = [torch.empty_like(tensor) for tensor in operands[0]]
    results: list[tuple[int, Any]] = []
    torch.cuda.synchronize()
    for turn in range(140):
        which = turn * turn // 3 % 2
        source = (operands if turn % 4 < 2 else spread)[which]
        for number in range(turn, turn + len(shared)):  # what is written last is another operand each time
            shared[number % len(shared)].copy_(source[number % len(shared)])
        results.append((which, torch.ops.espalier_format.expert_bank(*shared, spelling)))
    assert {which for which, _ in results} == {0, 1}
    for which, result in results:
        assert torch.equal(result, expected[which])


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_a_bank_of_what_a_bank_has_made(mixed: Bank, tokens: int) -> None:
    """Each launch takes the result of the one before, which is still being written when it starts.

    Memory is not poisoned here: that would put other kernels between the launches.
    """
    x, ids, weights = mixed.inputs(tokens, 8)
    weights /= expert_bank(x, ids, weights, mixed.operand).float().std()  # results are about as large as x

    def chain(wait: bool) -> list[Any]:
        results = [x]
        for _ in range(3):
            results.append(expert_bank(results[-1], ids, weights, mixed.operand))
            if wait:
                torch.cuda.synchronize()
        return results

    expected = chain(wait=True)
    assert 1e-3 < float(expected[-1].float().std()) < 1e3
    for _ in range(30):
        assert all(torch.equal(*pair) for pair in zip(chain(wait=False), expected, strict=True))


def test_nothing_waits_for_the_device(mixed: Bank, no_waiting: Callable[..., Any]) -> None:
    x, ids, weights = mixed.inputs(5, 4)
    expert_bank(x, ids, weights, mixed.operand)
    with no_waiting():
        expert_bank(x, ids, weights, mixed.operand)


def test_operator_is_well_formed(mixed: Bank) -> None:
    operand = mixed.operand
    arguments = (
        *mixed.inputs(3, 2), operand.trellis, operand.scales, operand.offsets, operand.codebook_index,
        operand.layout.spelling,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.espalier_format.expert_bank.default, arguments)


def test_float32_takes_the_torch_path(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(3, 2)
    exact = mixed.exact(x, ids, weights)
    result = expert_bank(x.float(), ids, weights, mixed.operand)
    assert float((result.double() - exact).abs().max()) < 1e-4 * float(exact.abs().max())


def test_plain_experts_take_the_torch_path(mixed: Bank) -> None:
    """Expert 2 is plain in one projection, expert 5 in all; what all others compute stays the same."""
    plain_ones = {("up_proj", 2)} | {(name, 5) for name in PROJECTIONS}
    layout = mixed.operand.layout
    experts: dict[str, list[Any]] = {
        name: [
            mixed.weights[name][number].float()
            if (name, number) in plain_ones
            else (*layout.views(mixed.operand.tensors(), name, number), str(layout.projections[name].codebooks[number]))
            for number in range(mixed.experts)
        ]
        for name in PROJECTIONS
    }
    rotations = {name: (each.rotation_in, each.rotation_out) for name, each in layout.projections.items()}
    operand = ExpertBankOperand.from_experts(
        experts, hidden=mixed.hidden, intermediate=layout.intermediate, rotations=rotations
    )
    assert set(operand.plain) == plain_ones
    assert operand.trellis.device.type == "cuda"
    x, _, weights = mixed.inputs(4, 3)
    ids = torch.tensor([[2, 5, 0], [5, -1, 5], [1, 3, 7], [2, 2, 4]], device="cuda")
    exact = mixed.exact(x, ids, weights)
    result = expert_bank(x.float(), ids, weights, operand)
    assert float((result.double() - exact).abs().max()) < 1e-4 * float(exact.abs().max())
    # Here intermediates are rounded to float16 too, weights as well: a few times the kernel's bound.
    error = (expert_bank(x, ids, weights, operand).double() - exact).pow(2).mean().sqrt()
    assert float(error) <= 3 * BOUND["float16"] * float(exact.pow(2).mean().sqrt())


def test_a_misaligned_bank_is_refused_before_launch(mixed: Bank) -> None:
    operand = mixed.operand
    shifted = torch.cat([operand.trellis, operand.trellis[:1]])[1:]
    with pytest.raises(UsageError, match="must begin"):
        expert_bank(*mixed.inputs(3, 2), replace(operand, trellis=shifted))
    torch.cuda.synchronize()  # nothing was launched that could fail


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": lambda x: x.double()}, DtypeError),
        ({"x": lambda x: x[:, 1:]}, ShapeError),
        ({"x": lambda x: x.cpu()}, UsageError),
        ({"ids": lambda ids: ids.short()}, DtypeError),
        ({"ids": lambda ids: ids.cpu()}, UsageError),
        ({"ids": lambda ids: ids[:1]}, ShapeError),
        ({"weights": lambda weights: weights.double()}, DtypeError),
        ({"weights": lambda weights: weights.cpu()}, UsageError),
    ],
)
def test_wrong_arguments_are_refused_before_launch(
    mixed: Bank, change: Mapping[str, Callable[[Any], Any]], error: type[EspalierError]
) -> None:
    arguments = dict(zip(("x", "ids", "weights"), mixed.inputs(3, 2), strict=True))
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(error):
        expert_bank(*arguments.values(), mixed.operand)
    torch.cuda.synchronize()  # nothing was launched that could fail


def test_too_many_experts_of_a_token(mixed: Bank) -> None:
    x, ids, weights = mixed.inputs(1, 513)
    with pytest.raises(UsageError):
        expert_bank(x, ids, weights, mixed.operand)
