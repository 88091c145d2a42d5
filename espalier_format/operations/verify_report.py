"""What ``verify`` found, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from espalier_format.errors import RefusedError
from espalier_format.operations.error_document import error_document

if TYPE_CHECKING:
    from espalier_format.errors import EspalierError

Outcome = Literal["passed", "failed", "skipped"]


def counted(number: int, noun: str) -> str:
    """Return how many there are, in words: ``1 module``, ``30,720 modules``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it looked at in ``detail``, and everything it found wrong in ``findings``."""

    name: str
    outcome: Outcome
    detail: str
    findings: tuple[EspalierError, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``checks`` in the report; findings are listed apart."""
        return {"check": self.name, "outcome": self.outcome, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of one checkpoint. ``recorded`` counts the decode digests added to its manifest."""

    path: str
    format: str | None
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]
    recorded: int = 0

    @property
    def findings(self) -> tuple[EspalierError, ...]:
        """Everything found wrong, in the order of the checks."""
        return tuple(finding for check in self.checks for finding in check.findings)

    @property
    def exit_code(self) -> int:
        """0 nothing is wrong, 1 readable but wrong, 2 a finding means that it must not be read."""
        if not self.findings:
            return 0
        return 2 if any(isinstance(finding, RefusedError) for finding in self.findings) else 1

    def to_json(self) -> dict[str, object]:
        """Return the stable document of ``verify --json`` (its keys are pinned by tests/cli)."""
        return {
            "path": self.path,
            "format": self.format,
            "ok": not self.findings,
            "checks": [check.to_json() for check in self.checks],
            "findings": [error_document(finding) for finding in self.findings],
            "recorded_digests": self.recorded,
            "warnings": list(self.warnings),
        }


def passed(name: str, detail: str) -> Check:
    """Return a check that found nothing."""
    return Check(name, "passed", detail)


def skipped(name: str, why: str) -> Check:
    """Return a check that does not apply."""
    return Check(name, "skipped", why)


def judged(name: str, detail: str, findings: list[EspalierError]) -> Check:
    """Return a check that passed or failed according to its findings."""
    return Check(name, "failed" if findings else "passed", detail, tuple(findings))
