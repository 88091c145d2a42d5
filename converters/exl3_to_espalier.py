"""EXL3 to Espalier, without losing a bit (spec/exl3.md §5): trellis and scales keep their bytes, a config is added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import Component
from espalier_format.checkpoint.files import refuse_single_file
from espalier_format.checkpoint.storage_claims import STORAGE_NAME
from espalier_format.container.index import INDEX_NAME, Index
from espalier_format.container.json_document import JsonStyle, parse_json
from espalier_format.container.names import CONFIG_NAME, SIGNATURE_NAME
from espalier_format.container.writer import CheckpointWriter
from espalier_format.converters.config_edit import BLOCK, untie, with_block
from espalier_format.converters.espalier_block import (
    check_block,
    check_module_names,
    espalier_block,
    plain_linear_modules,
)
from espalier_format.converters.espalier_shards import plan_espalier_shards
from espalier_format.converters.exl3_listing import index_describes, tensor_list_sha256
from espalier_format.converters.exl3_modules import import_modules
from espalier_format.converters.output import Meter, manifest_bytes
from espalier_format.converters.report import ConversionReport
from espalier_format.converters.shard_rewrite import ShardPlan, planned_tensors
from espalier_format.converters.source_state import describe_conversion
from espalier_format.errors import MalformedError, SchemaError, SourceError
from espalier_format.kernels.ordered_map import in_order, processors
from espalier_format.schema.config import Source

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.converters.exl3_modules import ImportedModule
    from espalier_format.progress import Progress

_CARRIED_PREFIX: Final = "exl3_"


def exl3_to_espalier(
    source: Checkpoint,
    destination: Path,
    *,
    force: bool = False,
    digests: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write an open EXL3 checkpoint as Espalier into ``destination``; `espalier_to_exl3` is the exact inverse.

    Shards keep their names and grouping; what is not quantized keeps its bytes. With ``digests`` the
    manifest gets the decode digest of every module. The output appears all at once at the end, or not at
    all; anonymous memory is bounded whatever the size. Converting twice gives the same bytes, and so does
    going on after an interruption: finished files stay in a hidden folder in the destination, and a run with
    ``resume`` takes over those of the same source and options, once it has hashed them.

    Raises:
        SourceError: the source is no EXL3 checkpoint, has no quantized module, or is a single file.
        NonFiniteScaleError: a scale is infinite or NaN; nothing is written.
        SchemaError: a module has a name that a config cannot hold.
        LimitError: a header or config.json would exceed the limits of a reader.
        OutputExistsError, UsageError, WriteError: as `CheckpointWriter`.
    """
    _check_source(source)
    modules, module_warnings = import_modules(source)
    plans, shard_warnings = plan_espalier_shards(source, modules)
    carried, index_warnings = _carried_files(source)
    config = with_block(source.config, {})
    has_head = any(imported.module.component is Component.HEAD for imported in modules.values())
    original_block = source.config.get(BLOCK)
    replaced = untie(config) if has_head else {}
    if BLOCK in source.config and original_block is None:
        replaced[BLOCK] = None
    facts = Source(
        format="exl3",
        quantization_config=original_block,
        packed_signs=tuple(sorted(_packed_signs(modules))),
        unpadded_bias=tuple(sorted(name for name, imported in modules.items() if imported.has_unpadded_bias)),
        replaced_config=replaced,
        carried_files=carried,
        index=source.folder.has(INDEX_NAME),
        tensor_list_sha256=_listing(source, plans),
    )
    check_module_names(modules, source)
    block = espalier_block(
        {name: imported.as_output() for name, imported in modules.items()},
        {name: tensor.shape for name, tensor in source.plain.items()},
        plain_linear_modules(source),
        facts,
    )
    config[BLOCK] = block
    check_block(block)
    config_bytes = _config_style(source).dumps(config)
    # The source's block is two levels deeper now, and may be too deep to be read again.
    parse_json(config_bytes, path=destination / CONFIG_NAME)

    copies = {name: carried.get(name, name) for name in source.other_files if name != SIGNATURE_NAME}
    if INDEX_NAME in carried:
        copies[INDEX_NAME] = carried[INDEX_NAME]
    paths = {name: source.folder.path_of(name) for name in copies}
    bytes_read = sum(plan.shard.header.file_size for plan in plans) + sum(p.stat().st_size for p in paths.values())
    meter = Meter(progress, bytes_read, "converting")
    with CheckpointWriter(
        destination,
        force=force,
        sources=[source.folder.root],
        progress=meter.advance,
        resume=resume,
        job=describe_conversion(source, "espalier"),
    ) as writer:
        for plan in plans:
            if plan.copied:
                writer.add_copy(plan.name, plan.shard.path, header=plan.shard.header)
            else:
                writer.add_shard(plan.name, planned_tensors(plan), plan.metadata)
        for name, new_name in copies.items():
            writer.add_copy(new_name, paths[name])
        writer.add_bytes(CONFIG_NAME, config_bytes)
        meter.finish()
        decode_digests = _digests(source, progress) if digests else {}
        records = writer.finish(index=True, manifest=lambda files: manifest_bytes(files, decode_digests))
    return ConversionReport(
        source=source.folder.root,
        destination=destination,
        source_format="exl3",
        target_format="espalier",
        modules=len(modules),
        bytes_read=bytes_read,
        bytes_written=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        warnings=(*source.warnings, *module_warnings, *index_warnings, *shard_warnings),
        decode_digests=decode_digests,
        resumed=writer.resumed,
    )


def _check_source(source: Checkpoint) -> None:
    if source.format != "exl3":
        raise SourceError(f"not an EXL3 checkpoint, but {source.format}", path=source.folder.root)
    if not source.modules:
        raise SourceError("the checkpoint has no quantized module", path=source.folder.root)
    refuse_single_file(source)


def _packed_signs(modules: Mapping[str, ImportedModule]) -> list[str]:
    return [
        scale.name
        for imported in modules.values()
        for scale, packed in (
            (imported.module.suh, imported.module.packed_su),
            (imported.module.svh, imported.module.packed_sv),
        )
        if packed
    ]


def _listing(source: Checkpoint, plans: list[ShardPlan]) -> str:
    """Return the digest of the list of tensors that the way back gives: the source's, repeated ones once."""
    return tensor_list_sha256(
        (plan.name, info.name, info.dtype, info.shape)
        for plan in plans
        for info in plan.shard.header.tensors.values()
        if source.tensors[info.name].shard is plan.shard
    )


def _carried_files(source: Checkpoint) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return which files get another name here, since they describe EXL3 tensors: original name to new name.

    The index is carried only where it is right; one that is not is left behind, and made anew on the way back.
    """
    carried = [STORAGE_NAME] if STORAGE_NAME in source.other_files else []
    warnings: tuple[str, ...] = ()
    if source.folder.has(INDEX_NAME):
        if _index_is_right(source):
            carried.append(INDEX_NAME)
        else:
            warnings = (
                f"{INDEX_NAME} is not carried over, since it disagrees with the shards or has repeated tensors",
            )
    taken = {CONFIG_NAME, *source.other_files, *(shard.name for shard in source.shards)}
    names: dict[str, str] = {}
    for name in carried:
        new_name = _CARRIED_PREFIX + name
        while new_name in taken:
            new_name = _CARRIED_PREFIX + new_name
        names[name] = new_name
    return names, warnings


def _index_is_right(source: Checkpoint) -> bool:
    shard_of = {name: shard.name for shard in source.shards for name in shard.header.tensors}
    if sum(len(shard.header.tensors) for shard in source.shards) != len(shard_of):
        return False
    try:
        index = Index.read(source.folder)
    except (MalformedError, SchemaError):
        return False
    return index is not None and index_describes(index.weight_map, shard_of)


def _config_style(source: Checkpoint) -> JsonStyle:
    if not source.folder.has(CONFIG_NAME):
        return JsonStyle()
    return JsonStyle.of_file(source.folder.path_of(CONFIG_NAME))


def _digests(source: Checkpoint, progress: Progress | None) -> dict[str, str]:
    meter = Meter(progress, sum(module.trellis_bytes for module in source.modules.values()), "digests")
    digests: dict[str, str] = {}
    for name, digest in zip(source.modules, in_order(source.digest, source.modules, processors()), strict=True):
        digests[name] = digest
        meter.advance(source.modules[name].trellis_bytes)
    meter.finish()
    return digests
