"""Decoders that do not look at values, since their program did when it loaded the module (spec/rotation.md §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from espalier_format.conformance.attempt import asked

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE: Final = "refuses_at_load"


def refuses_at_load(decoder: F) -> F:
    """Declare of a callable of the kind "weights" that it does not look at values; for use as a decorator.

    The kit then wants to see an infinity or a NaN for every weight that a bad scale makes wrong or that overflows, or a
    refusal, and shows no level without a callable of the kind "load", which must refuse. A program without this
    package sets the attribute ``refuses_at_load`` to True.
    """
    setattr(decoder, _ATTRIBUTE, True)
    return decoder


def is_declared(decoder: object) -> bool:
    """Tell whether a callable is declared so."""
    return asked(lambda: getattr(decoder, _ATTRIBUTE, False) is True, otherwise=False)
