"""What :func:`espalier_format.operations.inspect.inspect_checkpoint` finds out, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PLAIN_WIDTH = "plain"
"""The key under which experts that are stored plain are counted in a width histogram."""


def ratio(bit_count: int, weights: int) -> float | None:
    """Return bits per weight rounded to six decimals, from exact integers; None without weights."""
    return None if weights == 0 else float(round(Fraction(bit_count, weights), 6))


@dataclass(frozen=True, slots=True)
class Storage:
    """All weights of one component that are stored in one way: with one codebook, or plain in one dtype.

    ``modules`` counts quantized modules, and is 0 for a plain dtype. ``weights`` are true in_features x out_features
    for a codebook, tensor elements for a dtype. ``code_bytes`` are the trellis, or the plain tensors themselves;
    ``scale_bytes`` are suh and svh (or su and sv). ``marker_bytes`` are EXL3's codebook markers.
    """

    name: str
    quantized: bool
    modules: int
    tensors: int
    weights: int
    code_bytes: int
    scale_bytes: int
    marker_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on disk without headers."""
        return self.code_bytes + self.scale_bytes + self.marker_bytes

    @property
    def bits(self) -> float | None:
        """Bits per true weight of the codes alone, padding included."""
        return ratio(8 * self.code_bytes, self.weights)

    @property
    def bits_with_scales(self) -> float | None:
        """Bits per true weight of codes and scales."""
        return ratio(8 * (self.code_bytes + self.scale_bytes), self.weights)

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``storage`` in the report."""
        return {"name": self.name, "quantized": self.quantized, **_numbers(self)}


@dataclass(frozen=True, slots=True)
class ComponentReport:
    """One part of the model (experts, attention, …), summed over its quantized and its plain storage apart."""

    name: str
    storage: tuple[Storage, ...]

    @property
    def quantized(self) -> Storage:
        """Sum over the quantized storage."""
        return merge("quantized", True, (part for part in self.storage if part.quantized))

    @property
    def plain(self) -> Storage:
        """Sum over the plain storage."""
        return merge("plain", False, (part for part in self.storage if not part.quantized))

    @property
    def bytes(self) -> int:
        """Bytes on disk without headers."""
        return sum(part.bytes for part in self.storage)

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``components`` in the report."""
        return {
            "component": self.name,
            "bytes": self.bytes,
            "quantized": _numbers(self.quantized),
            "plain": _numbers(self.plain),
            "storage": [part.to_json() for part in self.storage],
        }


@dataclass(frozen=True, slots=True)
class ExpertBankReport:
    """How many experts of one bank have which width: projection → width ("1", "2.5", "plain") → count."""

    name: str
    component: str
    num_experts: int
    widths: Mapping[str, Mapping[str, int]]

    def __post_init__(self) -> None:
        widths: dict[str, Mapping[str, int]] = {name: ReadOnlyDict(counts) for name, counts in self.widths.items()}
        object.__setattr__(self, "widths", ReadOnlyDict(widths))

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``expert_banks`` in the report."""
        return {
            "bank": self.name,
            "component": self.component,
            "num_experts": self.num_experts,
            "widths": {projection: dict(counts) for projection, counts in self.widths.items()},
        }


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of the folder: its relative name, its size in bytes, and shard, index, config, manifest or other."""

    name: str
    size: int
    kind: str

    def to_json(self) -> dict[str, object]:
        """Return the entry of ``files`` in the report."""
        return {"name": self.name, "size": self.size, "kind": self.kind}


@dataclass(frozen=True, slots=True)
class InspectReport:
    """Everything ``espalier-format inspect`` shows, from headers and configs alone.

    ``format`` is "espalier", "exl3", "compressed-tensors" or "plain"; ``quant_method`` what config.json states, if
    anything. ``bits`` and
    ``head_bits`` are computed from the modules as spec/config.md defines them, rounded to six decimals, and None
    where nothing is quantized; ``stated_bits`` and ``stated_head_bits`` are what the config says. ``padding_note``
    explains, to a person, why they are more than the codebooks say.
    """

    path: str
    format: str
    format_version: int | None
    quant_method: str | None
    producer: str | None
    architecture: str | None
    model_type: str | None
    bits: float | None
    bits_with_scales: float | None
    head_bits: float | None
    stated_bits: float | None
    stated_head_bits: float | None
    components: tuple[ComponentReport, ...]
    expert_banks: tuple[ExpertBankReport, ...]
    files: tuple[FileReport, ...]
    padded_modules: tuple[str, ...]
    warnings: tuple[str, ...]
    padding_note: str | None = None

    @property
    def total(self) -> ComponentReport:
        """All components together, storage of one name merged."""
        parts: dict[tuple[str, bool], list[Storage]] = {}
        for component in self.components:
            for part in component.storage:
                parts.setdefault((part.name, part.quantized), []).append(part)
        return ComponentReport(
            "total", tuple(merge(name, quantized, group) for (name, quantized), group in parts.items())
        )

    @property
    def expert_widths(self) -> dict[str, dict[str, dict[str, int]]]:
        """The width histogram over all banks: component → projection → width → count, widths ascending, plain last."""
        total: dict[str, dict[str, dict[str, int]]] = {}
        for bank in self.expert_banks:
            for projection, counts in bank.widths.items():
                sums = total.setdefault(bank.component, {}).setdefault(projection, {})
                for width, number in counts.items():
                    sums[width] = sums.get(width, 0) + number
        return {
            component: {
                projection: {width: sums[width] for width in sorted(sums, key=width_key)}
                for projection, sums in projections.items()
            }
            for component, projections in total.items()
        }

    def to_json(self) -> dict[str, object]:
        """Return the stable document of ``inspect --json`` (its keys are pinned by tests/cli)."""
        return {
            "path": self.path,
            "format": self.format,
            "format_version": self.format_version,
            "quant_method": self.quant_method,
            "producer": self.producer,
            "architecture": self.architecture,
            "model_type": self.model_type,
            "bits": self.bits,
            "bits_with_scales": self.bits_with_scales,
            "head_bits": self.head_bits,
            "stated_bits": self.stated_bits,
            "stated_head_bits": self.stated_head_bits,
            "components": [component.to_json() for component in self.components],
            "total": self.total.to_json(),
            "expert_widths": self.expert_widths,
            "expert_banks": [bank.to_json() for bank in self.expert_banks],
            "files": [file.to_json() for file in self.files],
            "padded_modules": list(self.padded_modules),
            "warnings": list(self.warnings),
        }


def width_key(width: str) -> float:
    """Order widths by their number of bits, with plain last."""
    return float("inf") if width == PLAIN_WIDTH else float(width)


def merge(name: str, quantized: bool, parts: Iterable[Storage]) -> Storage:
    """Add up storage under a new name."""
    modules = tensors = weights = code_bytes = scale_bytes = marker_bytes = 0
    for part in parts:
        modules += part.modules
        tensors += part.tensors
        weights += part.weights
        code_bytes += part.code_bytes
        scale_bytes += part.scale_bytes
        marker_bytes += part.marker_bytes
    return Storage(name, quantized, modules, tensors, weights, code_bytes, scale_bytes, marker_bytes)


def _numbers(part: Storage) -> dict[str, object]:
    return {
        "modules": part.modules,
        "tensors": part.tensors,
        "weights": part.weights,
        "bits": part.bits,
        "bits_with_scales": part.bits_with_scales,
        "code_bytes": part.code_bytes,
        "scale_bytes": part.scale_bytes,
        "bytes": part.bytes,
    }
