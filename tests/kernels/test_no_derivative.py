"""The operators are for inference: a gradient through them is refused, and nothing is lost without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from espalier_format.codec.codebook import get_codebook  # noqa: E402
from espalier_format.errors import UsageError  # noqa: E402
from espalier_format.kernels import ops  # noqa: E402
from espalier_format.kernels.no_derivative import call_operator  # noqa: E402

BOOK = get_codebook("e2m1@2")
NAMES = ("gate_proj", "up_proj", "down_proj")


def scales() -> Any:
    return torch.linspace(0.5, 1.5, 64).half().requires_grad_()


def trellis() -> Any:
    return torch.arange(16 * BOOK.halfwords_per_tile, dtype=torch.int16).view(4, 4, -1)


def product() -> Any:
    x = torch.ones(3, 64, requires_grad=True)
    return ops.linear(x, ops.LinearOperand(trellis(), scales().detach(), scales().detach(), BOOK, 32, 32, 64, 64))


def product_by_a_scale() -> Any:
    return ops.matmul(torch.ones(3, 64), trellis(), scales(), scales(), None, BOOK, 32, 32, 64, 64)


def weight() -> Any:
    return ops.decode_weight(trellis(), scales(), scales(), BOOK, 32, 32, 64, 64, torch.float32)


def experts() -> Any:
    expert = (trellis(), scales().detach(), scales().detach(), BOOK)
    bank = ops.ExpertBankOperand.from_experts(
        {name: [expert] for name in NAMES}, hidden=64, intermediate=64, rotations=dict.fromkeys(NAMES, (32, 32))
    )
    x, weights = torch.ones(2, 64, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    return ops.expert_bank(x, torch.zeros(2, 1, dtype=torch.int64), weights, bank)


OPERATIONS = [product, product_by_a_scale, weight, experts]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_gradient_flows_back(operation: Callable[[], Any]) -> None:
    """On a CPU what runs inside has one, which must not be found there alone."""
    result = operation()
    assert result.requires_grad
    with pytest.raises(UsageError, match="for inference"):
        result.sum().backward()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_without_a_gradient_are_the_same(operation: Callable[[], Any]) -> None:
    expected = operation().detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            result = operation()
        assert not result.requires_grad
        assert torch.equal(result, expected)
        assert result.is_inference() is (context is torch.inference_mode)


@pytest.mark.parametrize(("enabled", "needed"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_derivative_that_nobody_needs_is_not_looked_at(enabled: bool, needed: bool) -> None:
    """That would take as long as the rest of a call."""

    def operator(*arguments: Any) -> Any:
        return torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradFunctionality")

    with torch.set_grad_enabled(enabled):
        past = call_operator(operator, torch.ones(2), None, torch.ones(2, requires_grad=needed), "a", 1)
    assert past is not (enabled and needed)


def test_torch_finds_nothing_wrong() -> None:
    suh, svh = scales().detach(), scales().detach()
    sides = (trellis(), suh, svh)
    sizes = (BOOK.name, 32, 32, 64, 64)
    torch.library.opcheck(torch.ops.espalier_format.matmul.default, (torch.ones(3, 64), *sides, None, *sizes))
    torch.library.opcheck(torch.ops.espalier_format.decode_weight.default, (*sides, *sizes, torch.float32))
    torch.library.opcheck(torch.ops.espalier_format.decode_codes.default, (trellis(), BOOK.name))
