"""The report of a run: what was tried, what failed, and what it says about the levels of conformance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from espalier_format.conformance.outcome import LEVELS, CaseResult, Kind

Verdict = Literal["passed", "failed", "not tested"]


@dataclass(frozen=True, slots=True)
class KindResult:
    """The result of one callable."""

    kind: Kind
    decoder: str
    """How the callable was named: "module:function"."""
    passed: int
    failed: int
    refuses_at_load: bool = False
    """Whether the callable is declared not to look at values (`at_load.refuses_at_load`)."""
    shows_refusals: bool = False
    """Of the kind "load": whether every case that must be refused was tried, in the wanted formats."""

    @property
    def level(self) -> int:
        """The level of conformance the kind belongs to."""
        return LEVELS[self.kind]


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All results of a run.

    ``skipped`` counts cases of the given kinds that options left out, which a claim has to name; ``claim`` is the level
    that was to be shown, or None.
    """

    results: tuple[CaseResult, ...]
    kinds: tuple[KindResult, ...]
    skipped: int
    claim: int | None

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that failed, in their order."""
        return tuple(result for result in self.results if not result.passed)

    def verdict(self, level: int) -> Verdict:
        """Return what the run shows about a level by itself."""
        found = [kind for kind in self.kinds if kind.level == level and kind.passed + kind.failed]
        if not found:
            return "not tested"
        if any(kind.failed for kind in found):
            return "failed"
        # What one callable leaves to loading, another must show.
        left = any(kind.refuses_at_load for kind in found) and not any(kind.shows_refusals for kind in found)
        return "not tested" if left else "passed"

    @property
    def shown(self) -> int:
        """The highest level of which it and all below were tested and passed; 0 if level 1 was not."""
        level = 0
        while level < max(LEVELS.values()) and self.verdict(level + 1) == "passed":
            level += 1
        return level

    @property
    def exit_code(self) -> int:
        """0 if everything passed, and the claimed level is shown where one was claimed; else 1."""
        return 1 if self.failures or (self.claim is not None and self.shown < self.claim) else 0

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON; of cases that passed only the number."""
        return {
            "format_version": 1,
            "levels": {str(level): self.verdict(level) for level in sorted(set(LEVELS.values()))},
            "level_shown": self.shown,
            "level_claimed": self.claim,
            "conforms": self.exit_code == 0,
            "decoders": [
                {
                    "kind": kind.kind,
                    "level": kind.level,
                    "decoder": kind.decoder,
                    "passed": kind.passed,
                    "failed": kind.failed,
                    "refuses_at_load": kind.refuses_at_load,
                }
                for kind in self.kinds
            ],
            "cases": len(self.results),
            "skipped": self.skipped,
            "failures": [result.to_json() for result in self.failures],
        }
