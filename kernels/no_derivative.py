"""Operators that have no derivative: what they say when they are asked for it, and how they are called past it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, NoReturn

import torch
from torch.autograd import forward_ad

from espalier_format.errors import UsageError

_NAME: Final = "no_derivative"

# Private, but what torch's own operators use in this place.
_C: Any = torch._C  # noqa: SLF001
_below_autograd: Any = getattr(_C, "_AutoDispatchBelowAutograd", nullcontext)
_interpreter: Callable[[], object] = _C._functorch.peek_interpreter_stack  # noqa: SLF001
_forward_ad: Any = forward_ad


def register(library: Any) -> None:
    """Define ``no_derivative`` in a library: the gradient of the operators beside it, which raises UsageError.

    As an operator of its own it has a shape, so that ``torch.compile`` can compile what nobody runs backward.
    """
    library.define(f"{_NAME}(Tensor gradient, SymInt[] size, ScalarType dtype, str operator) -> Tensor")
    library.impl(_NAME, _raise, "CompositeExplicitAutograd")
    torch.library.register_fake(f"espalier_format::{_NAME}", _fake, lib=library)


def refuse_derivative(name: str, library: Any) -> None:
    """Let an operator of a library raise UsageError where a derivative is to flow through it, on every device.

    Its result needs a gradient if an argument does, and going back raises. A tangent, and a gradient that a transform
    of ``torch.func`` asks for, raise at once. Without this, torch would follow what runs inside, which on a CPU has a
    derivative and in a kernel none: it would be missing there without a word.
    """
    operator = getattr(torch.ops.espalier_format, name).default

    def derivable(keyset: Any, *arguments: Any) -> torch.Tensor:
        if _has_tangent(arguments):
            _refuse(name)
        if not (torch.is_grad_enabled() and _needs_gradient(arguments)):
            return _past_autograd(operator, keyset, arguments)
        if _interpreter() is not None:  # inside a transform there can be no autograd.Function
            _refuse(name)
        result: torch.Tensor = _NoDerivative.apply(name, operator, keyset, *arguments)  # type: ignore[no-untyped-call]
        return result

    library.impl(name, derivable, "Autograd", with_keyset=True)


def call_operator(operator: Any, *arguments: Any) -> torch.Tensor:
    """Call an operator, past its derivative where nobody can ask for it.

    To look takes torch as long as the rest of a call. In inference mode it does not look itself.
    """
    if (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and _needs_gradient(arguments))
        or _forward_ad._current_level >= 0  # noqa: SLF001 - asking every tensor for its tangent takes long
        or _interpreter() is not None  # tensors may be wrapped by a transform of torch.func
    ):
        result: torch.Tensor = operator(*arguments)
    else:
        with _below_autograd():
            result = operator(*arguments)
    return result


class _NoDerivative(torch.autograd.Function):
    """An operator, called past its derivative, with `register`'s in place of that."""

    @staticmethod
    def forward(ctx: Any, name: str, operator: Any, keyset: Any, *arguments: Any) -> torch.Tensor:
        ctx.name = name
        given = (name, operator, keyset, *arguments)
        ctx.like = [(value.shape, value.dtype) if isinstance(value, torch.Tensor) else () for value in given]
        return _past_autograd(operator, keyset, arguments)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _interpreter() is not None:  # vmap would warn of the operator first
            _refuse(ctx.name)
        return tuple(
            torch.ops.espalier_format.no_derivative(gradient, *like, ctx.name) if needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def _past_autograd(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    with _below_autograd():
        result: torch.Tensor = operator.redispatch(keyset & _C._after_autograd_keyset, *arguments)  # noqa: SLF001
    return result


def _needs_gradient(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)


def _has_tangent(arguments: tuple[Any, ...]) -> bool:
    return _forward_ad._current_level >= 0 and any(  # noqa: SLF001 - see above
        isinstance(argument, torch.Tensor) and _forward_ad.unpack_dual(argument).tangent is not None
        for argument in arguments
    )


def _refuse(operator: str) -> NoReturn:
    raise UsageError(f"{operator} of compressed weights is for inference: it has no derivative")


def _raise(_gradient: torch.Tensor, _size: list[int], _dtype: torch.dtype, operator: str) -> NoReturn:
    _refuse(operator)


def _fake(gradient: torch.Tensor, size: list[int], dtype: torch.dtype, operator: str) -> torch.Tensor:  # noqa: ARG001
    return gradient.new_empty(size, dtype=dtype)
