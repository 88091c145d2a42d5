"""What a caller chooses about a quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from espalier_format.encoder.effort import get_effort
from espalier_format.errors import UsageError

SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """See `operations.quantize.quantize_checkpoint`.

    ``threads`` None: all processors. It and ``backend`` do not change the result.
    """

    to: Literal["espalier", "exl3"] = "espalier"
    bits: float | None = None
    seed: int = 0
    hessians: Path | None = None
    effort: str = "thorough"
    threads: int | None = None
    backend: str = "auto"
    resume: bool = False
    force: bool = False
    digests: bool = True

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        if self.to not in ("espalier", "exl3"):
            raise UsageError("quantize writes espalier or exl3", got=self.to)
        if not 0 <= self.seed < SEEDS:
            raise UsageError("a seed is at least 0 and below 2^64", got=self.seed)
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads must be at least 1", got=self.threads)
        get_effort(self.effort)

    @property
    def exl3(self) -> bool:
        """Whether the output is EXL3."""
        return self.to == "exl3"
