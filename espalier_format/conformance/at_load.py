"""Decoders that do not look at values, since their program did when it loaded the module (spec/rotation.md §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Final, TypeVar, cast

from espalier_format.conformance.attempt import asked

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE: Final = "refuses_at_load"


def refuses_at_load(decoder: F) -> F:
    """Declare of a callable of the kind "weights" that it does not look at values; for use as a decorator.

    The kit then wants to see an infinity or a NaN for every weight that a bad scale makes wrong or that overflows, or a
    refusal, and shows level 2 only where a callable of the kind "load" refuses all that it must. A program without this
    package sets the attribute ``refuses_at_load`` to True. Returns ``decoder`` itself, or for one that takes no
    attributes, such as a bound method, a function around it.
    """
    try:
        setattr(decoder, _ATTRIBUTE, True)
    except (AttributeError, TypeError):  # TypeError: a type of C
        around = update_wrapper(partial(decoder), decoder)
        setattr(around, _ATTRIBUTE, True)
        return cast("F", around)
    return decoder


def is_declared(decoder: object) -> bool:
    """Tell whether a callable is declared so."""
    return asked(lambda: getattr(decoder, _ATTRIBUTE, False) is True, otherwise=False)
