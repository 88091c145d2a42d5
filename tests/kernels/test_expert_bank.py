"""The packed expert bank and its forward pass on the CPU, against one float64 computation from exact weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from espalier_format.errors import (  # noqa: E402
    CodebookError,
    DtypeError,
    EspalierError,
    NonFiniteScaleError,
    ShapeError,
    UsageError,
)
from espalier_format.kernels import reference  # noqa: E402
from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank  # noqa: E402
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, BankGeometry, ExpertBankLayout  # noqa: E402

HIDDEN, INTERMEDIATE = 100, 49
ROTATIONS = {"gate_proj": (64, 0), "up_proj": (0, 32), "down_proj": (32, 128)}
BOOKS = {
    "gate_proj": ["e2m1@1", "int5@3", None, "exl3-mul1@2.5", "e2m1@2"],
    "up_proj": ["e2m1@1.5", "int6@4", "e2m1@1", None, "exl3-mcg@2"],
    "down_proj": ["exl3-3inst@1", "int8@6", "e2m1@2", "e2m1@1", None],
}
# What the products' dtype costs: three chained products of at most 128 terms. The bound is the error that two roundings
# of every intermediate to the dtype can make, times ten for cancellation in sums that are smaller than their terms.
RELATIVE_RMS = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}


class Bank:
    """A random bank, as operand and as exact float64 weights."""

    def __init__(self, make: Callable[..., Any], books: dict[str, list[str | None]], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        experts: dict[str, list[Any]] = {}
        self.weights: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name in PROJECTIONS:
            size_in, size_out = (INTERMEDIATE, HIDDEN) if name == "down_proj" else (HIDDEN, INTERMEDIATE)
            experts[name], self.weights[name] = [], []
            for number, book in enumerate(books[name]):
                if book is None:
                    weight = rng.standard_normal((size_out, size_in)).astype(np.float32) * 0.1
                    experts[name].append(torch.from_numpy(weight))
                    self.weights[name].append(weight.astype(np.float64))
                    continue
                module = make(book, ROTATIONS[name], size_in, size_out, seed=seed + 100 * number + len(name))
                exact = reference.decode_weight(*module.operands())
                tensors = (torch.from_numpy(each) for each in (module.trellis, module.suh, module.svh))
                experts[name].append((*tensors, module.codebook if number % 2 else book))
                self.weights[name].append(exact[:size_in, :size_out].T)
        self.experts = experts
        self.operand = ExpertBankOperand.from_experts(
            experts, hidden=HIDDEN, intermediate=INTERMEDIATE, rotations=ROTATIONS
        )

    def exact(self, x: Any, ids: Any, weights: Any) -> np.ndarray[Any, Any]:
        """The forward pass in float64."""
        rows = x.double().numpy()
        result = np.zeros(rows.shape)
        for token in range(rows.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if expert >= 0:
                    gate, up, down = (self.weights[name][expert] for name in PROJECTIONS)
                    inner = gate @ rows[token]
                    inner = inner / (1 + np.exp(-inner)) * (up @ rows[token])
                    result[token] += weight * (down @ inner)
        return result


@pytest.fixture(scope="module")
def bank(random_module: Callable[..., Any]) -> Bank:
    return Bank(random_module, BOOKS)


def _routing(rng: np.random.Generator, tokens: int, k: int, num_experts: int) -> tuple[Any, Any]:
    ids = torch.from_numpy(rng.integers(-1, num_experts, (tokens, k)))
    return ids, torch.from_numpy(rng.random((tokens, k)).astype(np.float32))


@pytest.mark.parametrize("dtype", list(RELATIVE_RMS))
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (7, 3), (33, 2)])
@pytest.mark.capability("torch decoder", "experts of mixed width")
def test_result_is_that_of_exact_weights(bank: Bank, dtype: str, tokens: int, k: int) -> None:
    """Includes experts named twice by a token, -1, and plain experts; the dtype's own rounding is what remains."""
    rng = np.random.default_rng(tokens)
    x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN))).to(getattr(torch, dtype))
    ids, weights = _routing(rng, tokens, k, 5)
    ids[0, 0] = 3
    weights = weights.masked_fill(ids < 0, torch.nan)  # that of no expert is not looked at
    result = expert_bank(x, ids.to(torch.int32) if k == 2 else ids, weights, bank.operand)
    exact = bank.exact(x, ids, weights)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    error = result.double().numpy() - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < RELATIVE_RMS[dtype]


def test_no_token_and_no_expert(bank: Bank) -> None:
    assert expert_bank(
        torch.ones(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int64), torch.ones(0, 2), bank.operand
    ).shape == (
        0,
        HIDDEN,
    )
    x = torch.full((2, HIDDEN), torch.inf)
    assert not expert_bank(x, torch.full((2, 3), -1), torch.ones(2, 3), bank.operand).any()
    assert not expert_bank(x, torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, 0), bank.operand).any()


def test_only_routed_experts_are_decoded(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier_format.kernels import torch_decoder

    decoded = []
    original = torch_decoder.decode_weight

    def spy(trellis: Any, *rest: Any) -> Any:
        decoded.append(rest[2].name)
        return original(trellis, *rest)

    monkeypatch.setattr(torch_decoder, "decode_weight", spy)
    expert_bank(torch.ones(3, HIDDEN), torch.tensor([[1, 1], [1, -1], [1, 1]]), torch.ones(3, 2), bank.operand)
    assert decoded == ["int5@3", "int6@4", "int8@6"]


def test_nothing_is_padded_to_the_widest(bank: Bank) -> None:
    """The packed trellis is as long as the experts' own, apart from alignment to 64 halfwords."""
    own = [item[0].numel() for items in bank.experts.values() for item in items if isinstance(item, tuple)]
    assert 0 <= bank.operand.trellis.numel() - sum(own) < 64 * len(own)
    layout = bank.operand.layout
    for name in PROJECTIONS:
        for expert, item in enumerate(bank.experts[name]):
            if isinstance(item, tuple):
                for view, tensor in zip(layout.views(bank.operand.tensors(), name, expert), item[:3], strict=True):
                    assert torch.equal(view, tensor)


def test_tensors_survive_a_torch_module(bank: Bank) -> None:
    module = torch.nn.Module()
    for name, tensor in bank.operand.tensors().items():
        module.register_buffer(name, tensor)
    again = bank.operand.with_tensors(dict(module.named_buffers()))
    assert again.nbytes == bank.operand.nbytes
    meta = bank.operand.to("meta")
    assert meta.trellis.device.type == "meta"
    assert meta.layout is bank.operand.layout
    with pytest.raises(UsageError):
        bank.operand.with_tensors({"trellis": bank.operand.trellis})


def test_spelling_is_read_back(bank: Bank) -> None:
    layout = bank.operand.layout
    geometry = BankGeometry.read(layout.spelling)
    assert (geometry.hidden, geometry.intermediate) == (HIDDEN, INTERMEDIATE)
    assert geometry.blocks == (64, 0, 0, 32, 32, 128)
    assert tuple(book.name for book in geometry.codebooks) == layout.codebook_names
    for number, projection in enumerate(layout.projections.values()):
        assert geometry.padded_sizes(number) == (projection.padded_in, projection.padded_out)
    for spelling in ("", "1,2;e2m1@1", "1,2,3,4,5,6,7,8", "a,2,0,0,0,0,0,0;"):
        with pytest.raises(UsageError):
            BankGeometry.read(spelling)


def test_traced_as_one_operator(quantized: Bank) -> None:
    def forward(x: Any, ids: Any, weights: Any) -> Any:
        return expert_bank(x, ids, weights, quantized.operand)

    whole = torch.compile(forward, backend="eager", fullgraph=True)
    assert torch.equal(whole(*_arguments()), forward(*_arguments()))


def _arguments() -> tuple[Any, ...]:
    return torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x, ids, w: (x.double(), ids, w), DtypeError),
        (lambda x, ids, w: (x, ids.short(), w), DtypeError),
        (lambda x, ids, w: (x, ids, w.long()), DtypeError),
        (lambda x, ids, w: (x[:, 1:], ids, w), ShapeError),
        (lambda x, ids, w: (x[0], ids, w), ShapeError),
        (lambda x, ids, w: (x, ids[:1], w), ShapeError),
        (lambda x, ids, w: (x, ids, w[:, :0]), ShapeError),
        (lambda x, ids, w: (x, ids + 5, w), UsageError),
        (lambda x, ids, w: (x, ids - 2, w), UsageError),
        (lambda x, ids, w: (x.to("meta"), ids, w), UsageError),
    ],
)
def test_arguments_are_checked(bank: Bank, change: Callable[..., Any], error: type[EspalierError]) -> None:
    with pytest.raises(error):
        expert_bank(*change(*_arguments()), bank.operand)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda o: replace(o, trellis=o.trellis[1:]), ShapeError),
        (lambda o: replace(o, trellis=o.trellis.int()), DtypeError),
        (lambda o: replace(o, scales=o.scales.float()), DtypeError),
        (lambda o: replace(o, scales=o.scales.to("meta")), UsageError),
        (lambda o: replace(o, scales=o.scales.repeat_interleave(2)[::2]), ShapeError),
        (lambda o: replace(o, plain={}), UsageError),
        (lambda o: replace(o, plain={key: value.T for key, value in o.plain.items()}), ShapeError),
        (lambda o: replace(o, plain={key: value.long() for key, value in o.plain.items()}), DtypeError),
        (lambda o: replace(o, plain={key: value.to("meta") for key, value in o.plain.items()}), UsageError),
    ],
)
def test_operands_are_checked(bank: Bank, change: Callable[..., Any], error: type[EspalierError]) -> None:
    with pytest.raises(error):
        change(bank.operand)


def test_an_operand_makes_its_tables_itself(bank: Bank) -> None:
    """They are those of the layout, and nobody can give others."""
    operand, layout = bank.operand, bank.operand.layout
    assert operand.offsets.tolist() == [list(layout.offsets[name]) for name in PROJECTIONS]
    index = {name: number for number, name in enumerate(layout.codebook_names)} | {None: -1}
    assert operand.codebook_index.tolist() == [[index[book] for book in BOOKS[name]] for name in PROJECTIONS]
    assert (operand.offsets.dtype, operand.codebook_index.dtype) == (torch.int64, torch.int32)
    given: dict[str, Any] = {"trellis": operand.trellis, "scales": operand.scales, "plain": operand.plain}
    for name in ("offsets", "codebook_index"):
        with pytest.raises(TypeError):
            ExpertBankOperand(layout, **given, **{name: getattr(operand, name)})
        assert name not in operand.tensors()
        with pytest.raises(UsageError):
            operand.with_tensors({**operand.tensors(), name: getattr(operand, name)})
    assert operand.to("meta").offsets.device.type == "meta"


@pytest.fixture(scope="module")
def quantized(random_module: Callable[..., Any]) -> Bank:
    """Without plain experts, which the operator itself does not take."""
    return Bank(random_module, {name: [book or "int5@3" for book in BOOKS[name]] for name in PROJECTIONS})


def _raw(bank: Bank, **changes: Any) -> Any:
    operand = bank.operand
    named = {name: getattr(operand, name) for name in ("trellis", "scales", "offsets", "codebook_index")}
    arguments = {**named, "spelling": operand.layout.spelling, **changes}
    return torch.ops.espalier_format.expert_bank(*_arguments(), *arguments.values())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda o: {"trellis": o.trellis[1:]}, ShapeError),
        (lambda o: {"trellis": o.trellis[:64].clone()}, ShapeError),
        (lambda o: {"trellis": o.trellis.repeat(64)}, ShapeError),
        (lambda o: {"trellis": o.trellis.repeat_interleave(2)[::2]}, ShapeError),
        (lambda o: {"trellis": o.trellis.int()}, DtypeError),
        (lambda o: {"scales": o.scales[1:]}, ShapeError),
        (lambda o: {"offsets": o.offsets.int()}, DtypeError),
        (lambda o: {"offsets": o.offsets[:, 1:].contiguous()}, ShapeError),
        (lambda o: {"offsets": o.offsets[:, :0], "codebook_index": o.codebook_index[:, :0]}, EspalierError),
        (lambda o: {"codebook_index": o.codebook_index.long()}, DtypeError),
        (lambda o: {"codebook_index": o.codebook_index.T.contiguous().T}, ShapeError),
        (lambda o: {"spelling": o.layout.spelling.partition(";")[0] + ";"}, UsageError),
        # Values, which are looked at where that does not wait for a device.
        (lambda o: {"offsets": o.offsets + 1}, UsageError),
        (lambda o: {"offsets": torch.full_like(o.offsets, -1)}, UsageError),
        (lambda o: {"offsets": o.offsets + o.trellis.numel()}, UsageError),
        (lambda o: {"codebook_index": o.codebook_index + 64}, UsageError),
        (lambda o: {"codebook_index": torch.full_like(o.codebook_index, -1)}, UsageError),
    ],
)
def test_the_operator_checks_a_bank(quantized: Bank, change: Callable[..., Any], error: type[EspalierError]) -> None:
    assert _raw(quantized).shape == (2, HIDDEN)
    with pytest.raises(error):
        _raw(quantized, **change(quantized.operand))


def test_a_launch_is_refused_before_it_is_made(quantized: Bank) -> None:
    """What the device code relies on, checked on the host, without a device."""
    from espalier_format.kernels.cuda.expert_bank import launch_expert_bank

    operand = quantized.operand
    x, ids, weights = _arguments()
    for change, words in (
        ({"trellis": torch.cat([operand.trellis, operand.trellis[:1]])[1:]}, "trellis must begin"),
        ({"scales": torch.cat([operand.scales, operand.scales[:1]])[1:]}, "scales must begin"),
        ({"offsets": torch.zeros(3, 32768, dtype=torch.int64)}, "too many experts of one bank"),
    ):
        with pytest.raises(UsageError, match=words):
            launch_expert_bank(x.half(), ids, weights, replace(operand.bank, **change))


def test_experts_are_checked(bank: Bank) -> None:
    def pack(**changes: Any) -> ExpertBankOperand:
        arguments: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "rotations": ROTATIONS}
        return ExpertBankOperand.from_experts(**({"projections": bank.experts} | arguments | changes))

    trellis, suh, svh, _ = bank.experts["gate_proj"][0]
    for expert, error in (
        ((trellis, suh, svh, "e2m1@9"), CodebookError),
        ((trellis, suh, svh, "e2m1@2"), ShapeError),
        ((trellis, suh.float(), svh, "e2m1@1"), DtypeError),
        ((trellis, suh * torch.inf, svh, "e2m1@1"), NonFiniteScaleError),
        (torch.ones(HIDDEN, INTERMEDIATE), ShapeError),
    ):
        with pytest.raises(error):
            pack(projections={**bank.experts, "gate_proj": [expert, *bank.experts["gate_proj"][1:]]})
    with pytest.raises(UsageError):
        pack(projections={"gate_proj": []})
    with pytest.raises(ShapeError):
        pack(projections={**bank.experts, "up_proj": bank.experts["up_proj"][1:]})
    with pytest.raises(UsageError):
        pack(rotations={**ROTATIONS, "up_proj": (0, 16)})
    books = {name: ["e2m1@1"] for name in PROJECTIONS}
    with pytest.raises(ShapeError):
        ExpertBankLayout.of(0, 4, books, ROTATIONS)
