"""What a quantization did, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier_format.read_only import ReadOnlyDict


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One encoded module. Errors are relative: squared error ÷ squared weight, 0 is perfect.

    ``measured`` maps each candidate to the error that a sample of tiles promised, where the solver had a choice.
    ``relative_proxy_loss`` is the error as the Hessian weights it, None without one.
    """

    name: str
    codebook: str
    in_features: int
    out_features: int
    rotation: tuple[int, int]
    relative_mse: float
    relative_proxy_loss: float | None
    damping: float | None
    sum_of_squares: float
    measured: Mapping[str, float]
    weight: float
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", ReadOnlyDict(self.measured))

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "codebook": self.codebook,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rotation": {"in": self.rotation[0], "out": self.rotation[1]},
            "relative_mse": self.relative_mse,
            "relative_proxy_loss": self.relative_proxy_loss,
            "damping": self.damping,
            "sum_of_squares": self.sum_of_squares,
            "measured": dict(self.measured),
            "sensitivity": self.weight,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """A quantization that was completed. ``resumed`` is how many modules an earlier run had finished.

    ``source_format`` is as in `Checkpoint.format`, ``target_format`` "espalier" or "exl3".
    """

    source: Path
    destination: Path
    source_format: str
    target_format: str
    recipe: str
    requested_bits: float | None
    bits: float
    head_bits: float | None
    seed: int
    effort: str
    modules: tuple[ModuleReport, ...]
    kept: int
    resumed: int
    seconds: float
    bytes_read: int
    bytes_written: int
    files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def relative_mse(self) -> float:
        """Squared error of all encoded modules ÷ their squared weights; 0.0 where all are zero."""
        total = sum(module.sum_of_squares for module in self.modules)
        return sum(module.relative_mse * module.sum_of_squares for module in self.modules) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--report`` writes and ``--json`` prints; keys are only ever added."""
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "source_format": self.source_format,
            "target_format": self.target_format,
            "recipe": self.recipe,
            "requested_bits": self.requested_bits,
            "bits": self.bits,
            "head_bits": self.head_bits,
            "seed": self.seed,
            "effort": self.effort,
            "relative_mse": self.relative_mse,
            "kept": self.kept,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "files": list(self.files),
            "warnings": list(self.warnings),
            "modules": [module.to_json() for module in self.modules],
        }
