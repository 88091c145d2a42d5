"""Espalier to EXL3 (spec/exl3.md §6): the exact inverse of `exl3_to_espalier`, and EXL3 files from any other source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.storage_claims import STORAGE_NAME
from espalier_format.container.folder import is_reserved
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.json_document import JsonStyle, read_json_object
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.container.writer import CheckpointWriter
from espalier_format.converters.config_edit import is_replaceable, restore, with_block, without_block
from espalier_format.converters.exl3_config import exl3_block, tensor_storage
from espalier_format.converters.exl3_limits import check_lossless, check_names, loading_warnings
from espalier_format.converters.exl3_listing import index_describes, tensor_list_sha256
from espalier_format.converters.exl3_shards import plan_exl3_shards
from espalier_format.converters.output import Meter, manifest_bytes
from espalier_format.converters.report import ConversionReport
from espalier_format.converters.shard_rewrite import planned_tensors
from espalier_format.converters.source_state import describe_conversion
from espalier_format.errors import MalformedError, SchemaError, SourceError
from espalier_format.schema.config import Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.progress import Progress

_Listing = list[tuple[str, str, str, tuple[int, ...]]]
"""(shard, name, dtype, shape) of every tensor of the output."""

_NOT_BORN_FROM_EXL3: Final = Source(format="none")


def espalier_to_exl3(
    source: Checkpoint,
    destination: Path,
    *,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write an open Espalier checkpoint as EXL3 into ``destination``.

    A checkpoint that was EXL3 before becomes what it was: the same tensors, bit for bit, and equal config
    values; shards, config.json and other files of exllamav3 come back byte for byte. If its tensors have
    been changed since, documents that describe them are made anew, with a warning. Any other checkpoint
    becomes one by the rules of EXL3 as exllamav3 1.6.5 writes it. Memory, durability and ``resume`` as
    `exl3_to_espalier`.

    Raises:
        LossyError: a module has a grid codebook, or rotation blocks other than 128; nothing is written.
        SourceError: the source is no Espalier checkpoint, or has no quantized module.
        UnexpectedTensorError: a plain tensor has a name that EXL3 gives to a part of a module.
        NonFiniteScaleError: a scale is infinite or NaN; nothing is written.
        SchemaError: ``source.carried_files`` restores a file to the name of another one.
        OutputExistsError, UsageError, WriteError: as `CheckpointWriter`.
    """
    quantization = source.quantization
    if source.format != "espalier" or quantization is None:
        raise SourceError(f"not an Espalier checkpoint, but {source.format}", path=source.folder.root)
    if not source.modules:
        raise SourceError("the checkpoint has no quantized module", path=source.folder.root)
    check_lossless(source)
    check_names(source.plain.values(), source.modules)
    stated = quantization.source
    # With a seed it was encoded anew since: nothing of the EXL3 checkpoint is left that could come back.
    born = stated is not None and stated.format == "exl3" and stated.seed is None
    origin = stated if born and stated is not None else _NOT_BORN_FROM_EXL3
    plans, warnings = plan_exl3_shards(source, origin)
    listing = [(plan.name, item.name, item.dtype, item.shape) for plan in plans for item in plan.items]
    unchanged = born and tensor_list_sha256(listing) == origin.tensor_list_sha256
    if born and not unchanged:
        warnings.append("the tensors are not those of the EXL3 checkpoint that this one came from")

    _check_origin(origin, source.folder.root / CONFIG_NAME)
    block = None if born else exl3_block(source)
    if origin.quantization_config is not None:
        block = dict(origin.quantization_config)
    replaced = origin.replaced_config
    config = without_block(source.config, replaced) if block is None else with_block(source.config, block)
    restore(config, replaced)
    config_bytes = JsonStyle.of_file(source.folder.path_of(CONFIG_NAME)).dumps(config) if config else None
    made_anew = _documents(source, origin, listing, unchanged=unchanged)
    copies = _copies(source, origin, set(made_anew))
    if INDEX_NAME in copies and not _index_fits(source.folder.path_of(copies[INDEX_NAME]), listing):
        del copies[INDEX_NAME]
        warnings.append(f"{INDEX_NAME} is made anew to describe the tensors")
    if born:
        warnings.extend(f"{name} is made anew to describe the tensors" for name in sorted(made_anew))
        warnings.extend(_lost(source, origin))
    warnings.extend(loading_warnings(source))

    paths = {name: source.folder.path_of(stored) for name, stored in copies.items()}
    bytes_read = sum(plan.shard.header.file_size for plan in plans) + sum(p.stat().st_size for p in paths.values())
    wants_index = INDEX_NAME not in copies and bool(origin.index if born else len(plans) > 1)
    meter = Meter(progress, bytes_read, "converting")
    with CheckpointWriter(
        destination,
        force=force,
        sources=[source.folder.root],
        progress=meter.advance,
        resume=resume,
        job=describe_conversion(source, "exl3"),
    ) as writer:
        for plan in plans:
            if plan.copied:
                writer.add_copy(plan.name, plan.shard.path, header=plan.shard.header)
            else:
                writer.add_shard(plan.name, planned_tensors(plan), plan.metadata, pad=False)
        for name, path in paths.items():
            writer.add_copy(name, path)
        for name, data in made_anew.items():
            writer.add_bytes(name, data)
        if config_bytes is not None:
            writer.add_bytes(CONFIG_NAME, config_bytes)
        meter.finish()
        records = writer.finish(index=wants_index, manifest=manifest_bytes)
    return ConversionReport(
        source=source.folder.root,
        destination=destination,
        source_format="espalier",
        target_format="exl3",
        modules=len(source.modules),
        bytes_read=bytes_read,
        bytes_written=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        warnings=(*source.warnings, *warnings),
        resumed=writer.resumed,
    )


def _check_origin(origin: Source, path: Path) -> None:
    """Refuse to restore what no EXL3 checkpoint can have had: the config has come from somebody else since.

    Raises:
        SchemaError: ``source`` holds a block of another method, or a replaced value that is none of those we replace.
    """
    method = (origin.quantization_config or {}).get("quant_method")
    if method not in (None, "exl3"):
        raise SchemaError("quantization_config.source.quantization_config is not that of EXL3", path=path)
    wrong = next((key for key, value in origin.replaced_config.items() if not is_replaceable(key, value)), None)
    if wrong is not None:
        raise SchemaError(f"quantization_config.source.replaced_config: {wrong} cannot have had this value", path=path)


def _documents(
    source: Checkpoint,
    origin: Source,
    listing: _Listing,
    *,
    unchanged: bool,
) -> dict[str, bytes]:
    """Return quantization_config.json where the original is missing or describes other tensors."""
    born = origin.format == "exl3"
    if born and (unchanged or STORAGE_NAME not in origin.carried_files):
        return {}
    block: dict[str, Any] = dict(origin.quantization_config or {})
    if not block:
        block = exl3_block(source)
    block["tensor_storage"] = tensor_storage((name, dtype, shape) for _, name, dtype, shape in listing)
    return {STORAGE_NAME: json.dumps(block, indent=4).encode("ascii")}


def _index_fits(path: Path, listing: _Listing) -> bool:
    """Tell whether an index that was carried along still says where the tensors are."""
    try:
        document = read_json_object(path)
    except (MalformedError, SchemaError):
        return False
    return index_describes(document.get("weight_map"), {name: shard for shard, name, _, _ in listing})


def _copies(source: Checkpoint, origin: Source, made_anew: set[str]) -> dict[str, str]:
    """Return the files to copy: name in the output to name here.

    Raises:
        SchemaError: a file would be restored to the name of another one.
    """
    names = {CONFIG_NAME, MANIFEST_NAME, SIGNATURE_NAME, *source.other_files}
    # Case does not tell files apart everywhere.
    taken = {name.casefold() for name in names}
    for original in origin.carried_files:
        folded = original.casefold()
        if folded in taken or is_reserved(original):
            raise SchemaError(
                f"quantization_config.source.carried_files: {original} is the name of another file, or reserved",
                path=source.folder.root / CONFIG_NAME,
            )
        taken.add(folded)
    original_names = {stored: original for original, stored in origin.carried_files.items()}
    copies: dict[str, str] = {}
    for stored in source.other_files:
        name = original_names.get(stored, stored)
        if stored != SIGNATURE_NAME and name not in made_anew:
            copies[name] = stored
    return copies


def _lost(source: Checkpoint, origin: Source) -> Iterator[str]:
    for name, stored in origin.carried_files.items():
        if stored not in source.other_files:
            yield f"{name} cannot be restored: {stored} is missing"
