"""Calling a runtime's callable, whatever it does: a result, a refusal with a code, or a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from espalier_format.conformance.outcome import Mismatch

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a call did: ``result``, or ``code`` of a refusal, or the text of another exception in ``crash``."""

    result: object = None
    code: str | None = None
    crash: str | None = None

    def refusal_of(self, code: str) -> Mismatch | None:
        """Return what is wrong unless the call refused with this code."""
        if self.code == code:
            return None
        if self.crash is not None:
            text = f"raised {self.crash}, which has no error code; expected a refusal with {code}"
            return Mismatch(text, None, code, self.crash)
        if self.code is not None:
            return Mismatch(f"refused with {self.code}, expected {code}", None, code, self.code)
        return Mismatch(f"accepted, but must be refused with {code}", None, code, "accepted")

    def failure(self) -> Mismatch | None:
        """Return what is wrong unless the call gave a result."""
        if self.crash is not None:
            return Mismatch(f"raised {self.crash}", None, "a result", self.crash)
        if self.code is not None:
            return Mismatch(f"refused with {self.code}, but must be accepted", None, "accepted", self.code)
        return None


def attempt(call: Callable[[], object]) -> Attempt:
    """Call, and return what came of it.

    An exception with a string ``code`` is a refusal (every error of `espalier_format.errors` is one), any other a
    crash, that of ``sys.exit`` and one that cannot be asked for its code or text too. Interrupts pass through.
    """
    try:
        return Attempt(result=call())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a foreign program may raise anything
        code = _code_of(error)
        return Attempt(code=code) if code else Attempt(crash=described(error))


def asked(question: Callable[[], T], otherwise: D) -> T | D:
    """Return what foreign code answers, or ``otherwise`` where it raises anything but an interrupt."""
    try:
        return question()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - properties and methods of foreign objects may raise anything, too
        return otherwise


def described(error: BaseException) -> str:
    """Return an exception as one line, whatever its ``__str__`` does."""
    line = asked(lambda: " ".join(str(error).split()), "")
    name = type(error).__name__
    return f"{name}: {line}" if line else name


def _code_of(error: BaseException) -> str | None:
    return asked(lambda: _text(getattr(error, "code", None)), None)


def _text(value: object) -> str | None:
    # A string of a class of its own could compare equal to every code.
    return str.__str__(value) if isinstance(value, str) else None


def attempt_folder(call: Callable[[], object]) -> Attempt:
    """Call what opens or verifies a folder: as `attempt`, but a result that is a string is the code of a refusal.

    Any other result means that the folder was accepted; it is closed if it can be.
    """
    done = attempt(call)
    code = asked(lambda: _text(done.result), None)
    if code is not None:
        return Attempt(code=code)
    asked(lambda: _close(done.result), None)
    return done


def _close(opened: object) -> None:
    close = getattr(opened, "close", None)
    if callable(close):
        close()
