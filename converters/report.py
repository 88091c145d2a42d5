"""What a conversion did, for a person and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The outcome of one finished conversion.

    ``source_format`` is "exl3", "espalier" or "compressed-tensors", ``target_format`` one of the first two or "hf".
    ``modules`` counts quantized linear modules, experts one by one. ``bytes_read`` is the size of the source's files
    that went into the output, ``bytes_written`` the size of all output files with the manifest. ``files`` are the
    output's file names, sorted. ``decode_digests`` maps module names to decode digests, and is empty
    unless they were asked for. ``resumed`` counts the files that an earlier, interrupted run had finished.
    """

    source: Path
    destination: Path
    source_format: str
    target_format: str
    modules: int
    bytes_read: int
    bytes_written: int
    files: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    decode_digests: Mapping[str, str] = field(default_factory=dict)
    resumed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode_digests", ReadOnlyDict(self.decode_digests))

    def to_json(self) -> dict[str, object]:
        """Return the JSON object that ``espalier-format convert --json`` prints; keys are only ever added."""
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "source_format": self.source_format,
            "target_format": self.target_format,
            "modules": self.modules,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "files": list(self.files),
            "warnings": list(self.warnings),
            "decode_digests": dict(self.decode_digests),
            "resumed": self.resumed,
        }
