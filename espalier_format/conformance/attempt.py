"""Calling a runtime's callable, whatever it does: a result, a refusal with a code, or a crash."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from espalier_format.conformance.outcome import Mismatch


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
    crash, that of ``sys.exit`` too. Interrupts pass through.
    """
    try:
        return Attempt(result=call())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign program may raise anything
        code = getattr(error, "code", None)
        if isinstance(code, str) and code:
            return Attempt(code=code)
        line = " ".join(str(error).split())
        return Attempt(crash=f"{type(error).__name__}: {line}" if line else type(error).__name__)


def attempt_folder(call: Callable[[], object]) -> Attempt:
    """Call what opens or verifies a folder: as `attempt`, but a result that is a string is the code of a refusal.

    Any other result means that the folder was accepted; it is closed if it can be.
    """
    done = attempt(call)
    if isinstance(done.result, str):
        return Attempt(code=done.result)
    close = getattr(done.result, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            close()
    return done
