"""What came of one case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["open", "verify", "codes", "weights", "load", "matmul", "experts"]
"""What a callable of a runtime does; `LEVELS` gives the level of conformance it belongs to."""

LEVELS: Final[dict[Kind, int]] = {
    "open": 1,
    "verify": 1,
    "codes": 2,
    "weights": 2,
    "load": 2,
    "matmul": 3,
    "experts": 3,
}
"""Kind of a callable to its level (spec/conformance.md §1)."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a case failed: one sentence, and the first place that is wrong."""

    message: str
    position: tuple[int, ...] | None = None
    """Index of the first wrong element."""
    expected: str | None = None
    got: str | None = None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case; ``mismatch`` is None where it passed."""

    case: str
    """Its name, such as "weights/int6@4/in64-out32/float16"."""
    kind: Kind
    mismatch: Mismatch | None

    @property
    def passed(self) -> bool:
        """Whether the callable did what it had to."""
        return self.mismatch is None

    def to_json(self) -> dict[str, object]:
        """Return a JSON object with the first mismatch, null where there is none."""
        document: dict[str, object] = {"case": self.case, "kind": self.kind, "level": LEVELS[self.kind]}
        if self.mismatch is None:
            return {**document, "passed": True}
        found = self.mismatch
        return {
            **document,
            "passed": False,
            "message": found.message,
            "position": None if found.position is None else list(found.position),
            "expected": found.expected,
            "got": found.got,
        }
