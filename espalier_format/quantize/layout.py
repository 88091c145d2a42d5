"""Which tensors each shard of the output holds: known before anything is encoded, but for the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from espalier_format.checkpoint.espalier import ESP_PREFIX, VERSION_KEY
from espalier_format.codec.codebook import EXL3_MARKERS
from espalier_format.codec.rotation import padded
from espalier_format.container.header import serialise_header
from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.converters.espalier_shards import cropped_bias, espalier_items
from espalier_format.converters.exl3_config import marker_of
from espalier_format.converters.exl3_modules import ImportedModule
from espalier_format.converters.exl3_shards import exl3_items, padded_bias
from espalier_format.converters.shard_rewrite import Item, ItemReader, Kept, in_file_order
from espalier_format.errors import LimitError, UnexpectedTensorError
from espalier_format.quantize.matrices import row_slices
from espalier_format.schema.config import FORMAT_VERSION

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.container.hashing import Buffer
    from espalier_format.container.shard import Shard
    from espalier_format.converters.espalier_block import OutputModule
    from espalier_format.quantize.linear import Linear

ReadResult = Callable[[str, str], Iterator[bytes]]
"""(module, "trellis" or "suh" or "svh") to its bytes, once the module is finished."""


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A shard to write; an unchanged one is copied byte for byte."""

    shard: Shard
    tensors: tuple[PlannedTensor, ...]
    metadata: Mapping[str, str] | None
    changed: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    source: Checkpoint
    exl3: bool
    read: ReadResult
    encoded: Mapping[str, OutputModule]
    replaced: Mapping[str, Sequence[Linear]]
    """Stored tensor to the modules that it holds, where one of them is encoded; empty where it just goes."""
    translated: Mapping[str, Sequence[Item]]
    """Stored tensor to what becomes of it: of kept modules that change the format, and of biases."""
    added: Mapping[str, Linear]
    """Embedding to the head that was tied to it."""
    reader: ItemReader
    """One for all shards: it keeps a block of the one that it read last."""


def plan_shards(
    source: Checkpoint,
    linears: Iterable[Linear],
    encoded: Mapping[str, OutputModule],
    kept: Mapping[str, ImportedModule],
    read: ReadResult,
    *,
    exl3: bool,
) -> list[OutputShard]:
    """Return all shards of the output, named and grouped as in the source, without those that would be empty.

    ``encoded`` are the modules that are encoded anew, ``kept`` the quantized ones that are not.
    """
    layout = _Layout(
        source,
        exl3,
        read,
        encoded,
        _replaced(linears, encoded),
        {**_translated_modules(source, kept, exl3=exl3), **_translated_biases(linears, encoded, exl3=exl3)},
        {linear.anchor: linear for linear in linears if linear.tied and linear.name in encoded},
        ItemReader(),
    )
    planned = (_plan_shard(layout, shard) for shard in source.shards)
    return [shard for shard in planned if shard.tensors or not shard.changed]


def check_headers(shards: Iterable[OutputShard], *, exl3: bool) -> None:
    """Raise LimitError, MalformedError or DtypeError for a shard whose header cannot be written.

    UnexpectedTensorError for a tensor of the source whose name the output needs for another one.
    """
    names: set[str] = set()
    for output in shards:
        for tensor in output.tensors:
            if tensor.name in names:
                raise UnexpectedTensorError(
                    "the output would hold two tensors of this name", path=output.shard.path, tensor=tensor.name
                )
            names.add(tensor.name)
        if not output.changed:
            continue
        entries = ((tensor.name, tensor.dtype, tensor.shape) for tensor in output.tensors)
        try:
            serialise_header(entries, output.metadata, pad=not exl3)
        except LimitError as error:
            raise LimitError(
                f"{error.message}: {output.shard.name} would hold too many tensors; split it", path=output.shard.path
            ) from error


def _plan_shard(layout: _Layout, shard: Shard) -> OutputShard:
    tensors: list[PlannedTensor] = []
    changed = False
    for info in in_file_order(shard):
        name = info.name
        if layout.source.tensors[name].shard is not shard:
            changed = True  # a repeated tensor
        elif name in layout.replaced:
            changed = True
            for linear in layout.replaced[name]:
                tensors.extend(_module_tensors(layout, linear))
        elif name in layout.translated:
            changed = True
            tensors.extend(layout.reader.planned(shard, item) for item in layout.translated[name])
        else:
            tensors.append(layout.reader.planned(shard, Kept(name, info)))
        if name in layout.added:
            changed = True
            tensors.extend(_module_tensors(layout, layout.added[name]))
    metadata = dict(shard.header.metadata)
    if layout.exl3:
        if metadata.pop(VERSION_KEY, None) is not None or changed:
            metadata.pop("format", None)
    elif any(tensor.name.rpartition(".")[2].startswith(ESP_PREFIX) for tensor in tensors):
        metadata |= {"format": "pt", VERSION_KEY: str(FORMAT_VERSION)}
    return OutputShard(shard, tuple(tensors), metadata or None, changed)


def _replaced(linears: Iterable[Linear], encoded: Mapping[str, OutputModule]) -> dict[str, list[Linear]]:
    """Return the stored tensors that go, with the modules whose tensors take their place.

    Those of a module that is kept and cannot stay as it is are replaced by a plain weight.
    """
    replaced: dict[str, list[Linear]] = {}
    fused: dict[str, list[Linear]] = {}
    for linear in linears:
        if linear.fused:
            fused.setdefault(linear.anchor, []).append(linear)
        elif linear.name in encoded or linear.decoded:
            replaced.update((name, []) for name in linear.replaces)
            if not linear.tied:
                replaced[linear.anchor] = [linear]
    changed = {name: parts for name, parts in fused.items() if any(part.name in encoded for part in parts)}
    return replaced | changed


def _module_tensors(layout: _Layout, linear: Linear) -> Iterator[PlannedTensor]:
    module = layout.encoded.get(linear.name)
    if module is None:
        matrix = linear.matrix
        yield PlannedTensor(
            f"{linear.name}.weight",
            matrix.dtype,
            matrix.shape,
            lambda: (matrix.stored_rows(start, stop) for start, stop in row_slices(matrix)),
        )
        return
    inputs = padded(module.in_features, module.rotation[0])
    outputs = padded(module.out_features, module.rotation[1])
    prefix = f"{linear.name}." if layout.exl3 else f"{linear.name}.{ESP_PREFIX}"

    def reader(kind: str) -> Callable[[], Iterable[Buffer]]:
        return lambda: layout.read(linear.name, kind)

    yield PlannedTensor(f"{prefix}suh", "F16", (inputs,), reader("suh"))
    yield PlannedTensor(f"{prefix}svh", "F16", (outputs,), reader("svh"))
    marker = marker_of(module.codebook.family)
    if layout.exl3 and marker is not None:
        value = EXL3_MARKERS[marker].to_bytes(4, "little")
        yield PlannedTensor(f"{linear.name}.{marker}", "I32", (), lambda: (value,))
    shape = (inputs // 16, outputs // 16, module.codebook.halfwords_per_tile)
    yield PlannedTensor(f"{prefix}trellis", "I16", shape, reader("trellis"))


def _translated_modules(
    source: Checkpoint, kept: Mapping[str, ImportedModule], *, exl3: bool
) -> dict[str, Sequence[Item]]:
    """Return what becomes of the tensors of kept modules, where the output has another format than the source."""
    translated: dict[str, Sequence[Item]] = {}
    for imported in kept.values():
        if source.format == "exl3" and not exl3:
            items = espalier_items(imported)
            translated.update((name, () if item is None else (item,)) for name, item in items.items())
        elif source.format == "espalier" and exl3:
            translated.update(exl3_items(imported.module, set(), set(), keep_bias_dtype=False))
    return translated


def _translated_biases(
    linears: Iterable[Linear], encoded: Mapping[str, OutputModule], *, exl3: bool
) -> dict[str, Sequence[Item]]:
    """Return the biases of encoded modules that get another size: EXL3 pads them, Espalier does not."""
    translated: dict[str, Sequence[Item]] = {}
    for linear in linears:
        bias = linear.bias
        if bias is None or linear.name not in encoded:
            continue
        size = padded(linear.out_features, encoded[linear.name].rotation[1]) if exl3 else linear.out_features
        widened = exl3 and bias.dtype == "BF16"
        if size > bias.shape[0] or widened:
            translated[bias.name] = (padded_bias(bias, size, widened=widened),)
        elif size < bias.shape[0]:
            translated[bias.name] = (cropped_bias(bias, size),)
    return translated
