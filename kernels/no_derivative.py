"""Operators that have no derivative: what they say when they are asked for it, and how they are called past it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from espalier_format.errors import UsageError


def refuse_derivative(name: str, library: Any) -> None:
    """Let an operator of a library raise UsageError where a gradient is to flow back through it, on every device.

    Its result then needs a gradient if an argument does. Without this, torch would follow what runs inside, which on a
    CPU has a derivative and in a kernel none: the gradient would be missing there without a word.
    """

    def backward(*_: Any) -> NoReturn:
        raise UsageError(f"{name} of compressed weights is for inference: it has no derivative")

    torch.library.register_autograd(f"espalier_format::{name}", backward, lib=library)


# Private, but what torch's own operators use in this place.
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)  # noqa: SLF001


def call_operator(operator: Any, *arguments: Any) -> torch.Tensor:
    """Call an operator, past its derivative where no argument needs a gradient.

    To look takes torch as long as the rest of a call. In inference mode it does not look itself.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and _needs_gradient(arguments)):
        result: torch.Tensor = operator(*arguments)
    else:
        with _below_autograd():
            result = operator(*arguments)
    return result


def _needs_gradient(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)
