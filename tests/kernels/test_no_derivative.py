"""The operators are for inference: a gradient through them is refused, and nothing is lost without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402

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


OPERAND = ops.LinearOperand(trellis(), scales().detach(), scales().detach(), BOOK, 32, 32, 64, 64)


def multiply(x: Any) -> Any:
    return ops.linear(x, OPERAND)


def multiply_by_the_operator(x: Any) -> Any:
    operands = (OPERAND.trellis, OPERAND.suh, OPERAND.svh, None)
    return torch.ops.espalier_format.matmul(x, *operands, BOOK.name, 32, 32, 64, 64)


def product() -> Any:
    return multiply(torch.ones(3, 64, requires_grad=True))


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


MULTIPLICATIONS = [multiply, multiply_by_the_operator]
QUIET = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, within torch


@QUIET
@pytest.mark.parametrize("multiplication", MULTIPLICATIONS)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_no_tangent_is_lost(multiplication: Callable[[Any], Any], context: Callable[[], Any]) -> None:
    """torch keeps tangents under no_grad, too. What has none is multiplied beside them."""
    x = torch.ones(3, 64)
    expected = multiplication(x)
    with forward_ad.dual_level(), context():
        with pytest.raises(UsageError, match="for inference"):
            multiplication(forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(multiplication(x), expected)


def jvp(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: torch.func.jvp(function, (x,), (x,))[1]


def vjp(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: torch.func.vjp(function, x)[1](x)[0]


TRANSFORMS = [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.func.hessian, jvp, vjp]


@QUIET
@pytest.mark.parametrize("multiplication", MULTIPLICATIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: Callable[..., Any], multiplication: Callable[[Any], Any]) -> None:
    def total(x: Any) -> Any:
        return multiplication(x).sum(dim=(0, 1))

    function = multiplication if transform is vjp else total
    with pytest.raises(UsageError, match="for inference"):
        transform(function)(torch.ones(3, 64))


@QUIET
@pytest.mark.parametrize("multiplication", MULTIPLICATIONS)
@pytest.mark.parametrize("transform", [torch.func.grad, jvp])
def test_transforms_of_something_else(transform: Callable[..., Any], multiplication: Callable[[Any], Any]) -> None:
    """Nothing flows through the product, a constant factor of what they derive."""
    x = torch.ones(3, 64)
    factor = multiplication(x)
    expected = factor if transform is torch.func.grad else factor.sum()
    assert torch.allclose(transform(lambda y: (y * multiplication(x)).sum())(x), expected)


def test_batched_gradients_are_refused() -> None:
    x = torch.ones(3, 64)
    with pytest.raises(UsageError, match="for inference"):
        torch.autograd.functional.jacobian(multiply, x, vectorize=True)


@QUIET
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("multiplication", MULTIPLICATIONS)
def test_what_nobody_runs_backward_is_compiled(multiplication: Callable[[Any], Any], dynamic: bool) -> None:
    """A layer before the product may be trainable: only going back through it raises, as without compiling."""
    embedding = torch.nn.Embedding(5, 64)

    def model(tokens: Any) -> Any:
        return multiplication(embedding(tokens))

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    tokens = torch.tensor([1, 4, 2])
    result = compiled(tokens)
    assert result.requires_grad
    assert torch.allclose(result, model(tokens))
    with pytest.raises(UsageError, match=r"matmul.*for inference"):
        result.sum().backward()
    with torch.no_grad():
        assert torch.allclose(compiled(tokens), result)


def test_torch_finds_nothing_wrong() -> None:
    suh, svh = scales().detach(), scales().detach()
    sides = (trellis(), suh, svh)
    sizes = (BOOK.name, 32, 32, 64, 64)
    torch.library.opcheck(torch.ops.espalier_format.matmul.default, (torch.ones(3, 64), *sides, None, *sizes))
    torch.library.opcheck(torch.ops.espalier_format.decode_weight.default, (*sides, *sizes, torch.float32))
    torch.library.opcheck(torch.ops.espalier_format.decode_codes.default, (trellis(), BOOK.name))


def test_the_gradient_that_is_compiled_has_a_shape() -> None:
    """It is never computed."""
    like = ((2, 5), torch.float16, "matmul")
    result = torch.ops.espalier_format.no_derivative(torch.ones(3, device="meta"), *like)
    assert (tuple(result.shape), result.dtype, result.device.type) == ((2, 5), torch.float16, "meta")
    with pytest.raises(UsageError, match=r"matmul.*for inference"):
        torch.ops.espalier_format.no_derivative(torch.ones(3), *like)
