"""What is checked once at load in place of operators that do not look at values (spec/rotation.md §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.codec.magnitude import FLOAT16_OVERFLOW, largest_value, may_overflow_float16, weight_limit
from espalier_format.conformance.tolerance import LARGEST_VALUE
from espalier_format.errors import NonFiniteScaleError, ScaleOverflowError, UsageError
from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import load_checks  # noqa: E402
from espalier_format.kernels.expert_bank import ExpertBankOperand  # noqa: E402
from espalier_format.kernels.linear import LinearOperand  # noqa: E402
from espalier_format.kernels.load_checks import check_bank_scales, check_scales  # noqa: E402

Maker = Callable[..., Any]
ROTATIONS = ((0, 0), (32, 0), (0, 256), (64, 32), (128, 128), (256, 256))


def operand_of(module: Any) -> LinearOperand:
    arrays = (torch.from_numpy(array.copy()) for array in (module.trellis, module.suh, module.svh))
    return LinearOperand(*arrays, module.codebook, *module.rotation, module.in_features, module.out_features)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_the_largest_value_is_that_of_the_specification(name: str) -> None:
    """G of spec/rotation.md §6 is that of a family; a width need not reach it."""
    largest = LARGEST_VALUE[CODEBOOKS[name].family]
    assert 0.5 * largest < largest_value(CODEBOOKS[name]) <= largest


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("name", ["e2m1@1", "int8@6", "exl3-mul1@3"])
def test_no_weight_exceeds_the_limit(name: str, rotation: tuple[int, int], random_module: Maker) -> None:
    module = random_module(name, rotation, 100, 70, seed=5)
    weight = np.abs(reference.decode_weight(*module.operands())[:100, :70])
    largest = (float(np.abs(side).max()) for side in (module.suh[:100], module.svh[:70]))
    limit = weight_limit(module.codebook, *rotation, *largest)
    assert 0 < weight.max() <= limit


def signs(block: int, row: int, size: int) -> np.ndarray[Any, Any]:
    """A row of the Hadamard matrices of the specification, which are on the diagonal: (-1)^popcount(i AND j)."""
    return np.array([(-1.0) ** (row & place % block if block else 0).bit_count() for place in range(size)])


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("name", "largest"), [("e2m1@2", 6), ("int6@4", 30), ("int8@6", 123)])
def test_the_limit_is_reached(
    name: str, largest: float, rotation: tuple[int, int], random_module: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By values that are the largest and have the signs of a row on either side: where the rows meet, all add up."""
    module = random_module(name, rotation, 300, 200)
    size_in, size_out = len(module.suh), len(module.svh)
    module.suh[:], module.svh[:] = 0.5, 0.25
    module.suh[19], module.svh[6] = -300, 7.25
    values = largest * np.outer(signs(rotation[0], 19, size_in), signs(rotation[1], 6, size_out))
    monkeypatch.setattr(reference, "decode_codes", lambda *_: values / module.codebook.value_scale)
    weight = np.abs(reference.decode_weight(*module.operands()))
    limit = weight_limit(module.codebook, *rotation, 300.0, 7.25)
    assert weight[19, 6] == weight.max() == pytest.approx(limit, rel=1e-12)


def test_where_float16_overflows() -> None:
    """e2m1 unrotated has the values 0 to 6: the first limit that is refused is 65520 itself."""
    codebook = get_codebook("e2m1@2")
    assert may_overflow_float16(codebook, 0, 0, 10920.0, 1.0)
    assert FLOAT16_OVERFLOW == 6 * 10920.0
    assert not may_overflow_float16(codebook, 0, 0, 10912.0, 1.0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("side", "place"), [("suh", 0), ("suh", 63), ("svh", 59), ("svh", 63)])
def test_scales_that_are_not_finite(bad: float, side: str, place: int, random_module: Maker) -> None:
    """In the padding as well: 50 and 60 are the true sizes, 64 both padded ones."""
    operand = operand_of(random_module("int6@4", (32, 64), 50, 60))
    check_scales(operand, torch.float16)
    getattr(operand, side)[place] = bad
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with pytest.raises(NonFiniteScaleError, match=rf"layers\.0\.esp_{side}"):
            check_scales(operand, dtype, "layers.0")
    with pytest.raises(NonFiniteScaleError, match=f"esp_{side}"):
        check_scales(operand, torch.float32)


@pytest.mark.parametrize("rotation", [(0, 0), (128, 32)])
def test_a_weight_that_overflows(rotation: tuple[int, int], random_module: Maker) -> None:
    module = random_module("int8@5", rotation, 90, 60)
    module.suh[:90], module.svh[:60] = 300, 300
    assert np.abs(reference.decode_weight(*module.operands())[:90, :60]).max() > 70000
    operand = operand_of(module)
    with pytest.raises(ScaleOverflowError, match=r"up_proj.*float16"):
        check_scales(operand, torch.float16, "up_proj")
    check_scales(operand, torch.bfloat16)
    check_scales(operand, torch.float32)


def test_a_limit_that_no_weight_comes_near(random_module: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one weight where the largest scales meet is small: it takes decoding to tell, and elsewhere it does not."""
    module = random_module("int6@4", (0, 0), 64, 64)
    module.suh[:], module.svh[:] = 2.0**-7, 2.0**-7
    module.suh[3], module.svh[5] = 60000, 2.0**-4
    decoded: list[slice] = []
    decode_rows = load_checks.decode_rows

    def counted(operand: Any, dtype: Any, rows: slice) -> Any:
        decoded.append(rows)
        return decode_rows(operand, dtype, rows)

    monkeypatch.setattr(load_checks, "decode_rows", counted)
    weight = np.abs(reference.decode_weight(*module.operands()))
    assert 6e4 * 2.0**-4 * 30 > FLOAT16_OVERFLOW > 2 * weight[3, np.arange(64) != 5].max()
    module.trellis[:] = _of_small_code(module, weight)
    check_scales(operand_of(module), torch.float16)
    assert decoded
    decoded.clear()
    module.suh[3] = 1
    check_scales(operand_of(module), torch.float16)
    assert not decoded


def _of_small_code(module: Any, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The trellis, or where its weight [3, 5] is too large, one with another number there."""
    trellis = module.trellis.copy()
    for seed in range(100):
        if np.abs(reference.decode_weight(trellis, *module.operands()[1:])[3, 5]) < 60000:
            return trellis
        trellis = np.random.default_rng(seed).integers(-32768, 32768, trellis.shape).astype(np.int16)
    raise AssertionError("no such trellis")


def test_numbers_in_the_padding_do_not_count(random_module: Maker) -> None:
    module = random_module("int6@4", (128, 128), 100, 100)
    module.suh[100:], module.svh[100:] = 60000, 60000
    check_scales(operand_of(module), torch.float16)


def bank_of(random_module: Maker) -> ExpertBankOperand:
    sizes = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    made: dict[str, list[Any]] = {
        name: [random_module("e2m1@1", (0, 32), *pair, seed=expert) for expert in range(2)]
        for name, pair in sizes.items()
    }
    experts = {
        name: [
            (*(torch.from_numpy(a.copy()) for a in (module.trellis, module.suh, module.svh)), module.codebook)
            for module in modules
        ]
        for name, modules in made.items()
    }
    experts["up_proj"][0] = torch.ones(32, 48)
    rotations = dict.fromkeys(sizes, (0, 32))
    return ExpertBankOperand.from_experts(experts, hidden=48, intermediate=32, rotations=rotations)


def test_a_bank(random_module: Maker) -> None:
    """Every quantized expert of every projection; plain ones have no scales."""
    bank = bank_of(random_module)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_bank_scales(bank, dtype, "mlp.experts")
    for projection, expert in (("gate_proj", 0), ("up_proj", 1), ("down_proj", 1)):
        scales = bank.scales.clone()
        spoilt = replace(bank, scales=scales)
        _, suh, svh = bank.layout.views({"trellis": bank.trellis, "scales": scales}, projection, expert)
        suh[:], svh[:] = 300, 300
        with pytest.raises(ScaleOverflowError, match=f"{projection} of expert {expert} of mlp.experts"):
            check_bank_scales(spoilt, torch.float16, "mlp.experts")
        check_bank_scales(spoilt, torch.bfloat16)
        svh[-1] = torch.nan
        with pytest.raises(NonFiniteScaleError, match=r"mlp\.experts"):
            check_bank_scales(spoilt, torch.bfloat16, "mlp.experts")


def test_names_of_dtypes(random_module: Maker) -> None:
    """As everywhere: a name is not another dtype that needs no check."""
    module = random_module("int8@5", (0, 0), 90, 60)
    module.suh[:90], module.svh[:60] = 300, 300
    operand = operand_of(module)
    for name in ("float16", "fp16", torch.float16):
        with pytest.raises(ScaleOverflowError):
            check_scales(operand, name)
    check_scales(operand, "bfloat16")
    with pytest.raises(UsageError, match="dtype"):
        check_scales(operand, torch.float64)
