"""``inspect``: what a checkpoint holds, from its headers and configs alone; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.components import NOT_DECODER, Component, component_of
from espalier_format.checkpoint.stated_quantization import stated_quantization
from espalier_format.codec.codebook import get_codebook
from espalier_format.container.header import DTYPE_BITS
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import HubError
from espalier_format.hub.address import SCHEME, locate
from espalier_format.operations.inspect_report import (
    PLAIN_WIDTH,
    ComponentReport,
    ExpertBankReport,
    FileReport,
    InspectReport,
    Storage,
    merge,
    width_key,
)
from espalier_format.operations.module_groups import groups_of_config, groups_of_modules
from espalier_format.operations.packed_groups import packed_groups
from espalier_format.operations.padding_note import padding_note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.container.header import TensorInfo
    from espalier_format.schema.expert_bank import Projection

_MANIFEST_KINDS: Final = {MANIFEST_NAME: "manifest", SIGNATURE_NAME: "signature"}
_FILE_KINDS: Final = {CONFIG_NAME: "config", INDEX_NAME: "index", **_MANIFEST_KINDS}

_SENSIBLE_BITS: Final = 1000

# Storage as lists while it is counted: modules, tensors, weights, code bytes, scale bytes, marker bytes.
_Counts = dict[tuple[Component, str, bool], list[int]]


def inspect_checkpoint(path: str | Path) -> InspectReport:
    """Open a checkpoint of any kind (Espalier, EXL3, plain safetensors, a lone shard) and describe it.

    ``path`` may also be a repository on the Hub, "org/name", "org/name@revision" or "hf://org/name": then configs
    and shard headers are read by range requests, and nothing is stored.

    Raises whatever :func:`espalier_format.checkpoint.open_checkpoint` raises: a checkpoint that opens can be
    described. Time and memory grow with the number of tensors, not with their size.

    >>> from importlib.resources import files
    >>> report = inspect_checkpoint(str(files("espalier_format") / "demo_data" / "llama-3.0-mcg"))
    >>> report.format, report.architecture, report.bits, report.head_bits
    ('exl3', 'LlamaForCausalLM', 3.0, 7.2)
    """
    with _open(path) as checkpoint:
        return describe(checkpoint, str(path), lone=Path(path).is_file())


def describe(checkpoint: Checkpoint, path: str, *, lone: bool = False) -> InspectReport:
    """Describe an open checkpoint; ``lone`` says that it is a single file, ``path`` is what the report calls it."""
    components = _components(checkpoint)
    decoder = _quantized(components, frozenset(Component) - NOT_DECODER)
    head = _quantized(components, frozenset({Component.HEAD}))
    found = stated_quantization(checkpoint.config)
    stated = {} if found is None else found.block
    quantization = checkpoint.quantization
    return InspectReport(
        path=path,
        format=checkpoint.format,
        format_version=None if quantization is None else quantization.format_version,
        quant_method=_text(stated.get("quant_method")),
        producer=_producer(checkpoint, stated),
        architecture=_architecture(checkpoint.config),
        model_type=_text(checkpoint.config.get("model_type")),
        bits=decoder.bits,
        bits_with_scales=decoder.bits_with_scales,
        head_bits=head.bits,
        stated_bits=_number(stated.get("bits")),
        stated_head_bits=_number(stated.get("head_bits")),
        components=components,
        expert_banks=tuple(_expert_banks(checkpoint)),
        files=tuple(_files(checkpoint, lone=lone)),
        padded_modules=tuple(_padded(checkpoint)),
        warnings=(*checkpoint.warnings, *_contradictions(checkpoint)),
        padding_note=padding_note(checkpoint, components),
    )


def _contradictions(checkpoint: Checkpoint) -> tuple[str, ...]:
    if checkpoint.format != "compressed-tensors":
        return ()
    from espalier_format.operations.compressed_tensors_findings import find_contradictions  # noqa: PLC0415 - as needed

    found = find_contradictions(checkpoint)
    return (*(str(finding) for finding in found.findings), *found.warnings)


def _open(source: str | Path) -> Checkpoint:
    place = locate(source)
    if isinstance(place, Path):
        return open_checkpoint(place)
    from espalier_format.hub.opening import open_remote  # noqa: PLC0415 - imports the HTTP client

    try:
        return open_remote(place)
    except HubError as error:
        if str(source).startswith(SCHEME):
            raise
        raise HubError(f"{error.message}; there is no path of this name either", path=error.path) from None


def _components(checkpoint: Checkpoint) -> tuple[ComponentReport, ...]:
    counts: _Counts = {}
    bits: dict[str, float] = {}
    quantization = checkpoint.quantization
    groups = groups_of_modules(checkpoint.modules.values()) if quantization is None else groups_of_config(quantization)
    for group in groups:
        bits[group.codebook.name] = group.codebook.bits
        entry = counts.setdefault((group.component, group.codebook.name, True), [0] * 6)
        for position, number in enumerate(group.numbers):
            entry[position] += number
    for component, label, width, numbers in packed_groups(checkpoint.packed.values()):
        bits[label] = width
        entry = counts.setdefault((component, label, True), [0] * 6)
        for position, number in enumerate(numbers):
            entry[position] += number
    for tensor in _plain_tensors(checkpoint):
        entry = counts.setdefault((component_of(tensor.name), tensor.dtype, False), [0] * 6)
        entry[1] += 1
        entry[2] += 8 * tensor.nbytes // DTYPE_BITS[tensor.dtype]
        entry[3] += tensor.nbytes
    # Codebooks first, narrow to wide, then plain dtypes, the largest part first.
    order = sorted(counts, key=lambda key: (not key[2], bits.get(key[1], 0.0), -counts[key][3], key[1]))
    found: dict[Component, list[Storage]] = {}
    for component, name, quantized in order:
        found.setdefault(component, []).append(Storage(name, quantized, *counts[component, name, quantized]))
    return tuple(ComponentReport(part.value, tuple(found[part])) for part in Component if part in found)


def _plain_tensors(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """Yield the tensors that hold plain numbers: those of no quantized module, and the biases of all modules."""
    seen: set[str] = set()
    for shard in checkpoint.shards:
        for name, info in shard.header.tensors.items():
            module = name.removesuffix(".bias")
            is_bias = module != name and (module in checkpoint.modules or module in checkpoint.packed)
            # Copies of a tensor in a second shard are warned of and not counted.
            if (is_bias or name in checkpoint.plain) and name not in seen:
                seen.add(name)
                yield info


def _quantized(components: tuple[ComponentReport, ...], wanted: frozenset[Component]) -> Storage:
    names = {component.value for component in wanted}
    return merge("quantized", True, (component.quantized for component in components if component.name in names))


def _expert_banks(checkpoint: Checkpoint) -> Iterator[ExpertBankReport]:
    quantization = checkpoint.quantization
    if quantization is not None:
        for name, bank in quantization.expert_banks.items():
            yield _bank(name, bank.num_experts, {key: _widths(value) for key, value in bank.projections.items()})
        return
    for view in checkpoint.expert_banks.values():
        widths: dict[str, dict[str, int]] = {}
        for projection, experts in view.projections.items():
            counts = widths.setdefault(projection, {})
            for expert in experts:
                width = PLAIN_WIDTH if expert is None else _expert_width(checkpoint, expert)
                counts[width] = counts.get(width, 0) + 1
        yield _bank(view.name, view.num_experts, widths)


def _expert_width(checkpoint: Checkpoint, expert: str) -> str:
    packed = checkpoint.packed.get(expert)
    return checkpoint.modules[expert].codebook.width if packed is None else str(packed.scheme.bits)


def _bank(name: str, num_experts: int, widths: Mapping[str, Mapping[str, int]]) -> ExpertBankReport:
    ordered = {
        projection: {width: counts[width] for width in sorted(counts, key=width_key)}
        for projection, counts in widths.items()
    }
    return ExpertBankReport(name, component_of(name).value, num_experts, ordered)


def _widths(projection: Projection) -> dict[str, int]:
    counts: dict[str, int] = {}
    per_codebook = projection.experts_per_codebook()
    for codebook, experts in per_codebook.items():
        width = get_codebook(codebook).width
        counts[width] = counts.get(width, 0) + experts
    plain = len(projection.assignment) - sum(per_codebook.values())
    return {**counts, PLAIN_WIDTH: plain} if plain else counts


def _padded(checkpoint: Checkpoint) -> Iterator[str]:
    quantization = checkpoint.quantization
    if quantization is not None:
        sources = {module.size_source for module in quantization.modules.values()}
        for bank in quantization.expert_banks.values():
            sources |= {projection.size_source for projection in bank.projections.values()}
        if "padded" not in sources:
            return
    yield from (module.name for module in checkpoint.modules.values() if module.size_source == "padded")
    yield from (module.name for module in checkpoint.packed.values() if module.size_source == "padded")


def _files(checkpoint: Checkpoint, *, lone: bool) -> Iterator[FileReport]:
    for shard in checkpoint.shards:
        yield FileReport(shard.name, shard.header.file_size, "shard")
    if lone:  # the other files of its folder do not belong to it
        return
    for name in (*_FILE_KINDS, *checkpoint.other_files):
        if checkpoint.folder.has(name):
            yield FileReport(name, checkpoint.folder.size(name), _FILE_KINDS.get(name, "other"))


def _producer(checkpoint: Checkpoint, stated: Mapping[str, object]) -> str | None:
    if checkpoint.quantization is not None:
        producer = checkpoint.quantization.producer
        return f"{producer.name} {producer.version}"
    version = _text(stated.get("version"))
    writers = {"exl3": "exllamav3", "compressed-tensors": "compressed-tensors"}
    writer = writers.get(checkpoint.format)
    return f"{writer} {version}" if writer is not None and version is not None else None


def _architecture(config: Mapping[str, object]) -> str | None:
    names = config.get("architectures")
    return _text(names[0]) if isinstance(names, list) and names else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # A config may hold NaN, Infinity or an integer of any length; none of them is a number of bits.
    return float(value) if abs(value) < _SENSIBLE_BITS else None
