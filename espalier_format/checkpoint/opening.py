"""``open_checkpoint``: find out what a path holds, and open it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier_format.checkpoint.files import read_config
from espalier_format.checkpoint.stated_quantization import stated_quantization
from espalier_format.checkpoint.tensors import TensorTable
from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.names import CONFIG_NAME, PROGRESS_NAME, SHARD_SUFFIX
from espalier_format.container.regular_file import is_regular
from espalier_format.container.shard import Shard
from espalier_format.errors import FormatVersionError, MissingFileError, SchemaError, SourceError, UsageError

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint, after checking everything that can be checked without reading tensor data.

    ``path`` is a folder of safetensors files with a config.json, or one ``.safetensors`` file. Of an
    Espalier checkpoint (``quantization_config.quant_method`` "espalier") config, index and shard headers
    must agree exactly. An EXL3 checkpoint is known by its method or, where none is stated, by its tensors;
    a compressed-tensors checkpoint by its method, without which packed weights are refused; anything else is "plain".
    A single file cannot be part of an Espalier checkpoint: the config is missing.

    The result holds file handles; use it as a context manager, or call ``close``.

    Raises:
        RefusedError: one of its subclasses; nothing that is wrong is skipped (``spec/errors.md``).
        InconsistentError: one of its subclasses; the checkpoint contradicts itself.

    >>> from importlib.resources import files
    >>> folder = str(files("espalier_format") / "demo_data" / "llama-3.0-mcg")
    >>> with open_checkpoint(folder) as checkpoint:
    ...     print(checkpoint.format, len(checkpoint.modules), checkpoint.modules["lm_head"].codebook.name)
    exl3 15 exl3-mcg@6
    """
    location = Path(path)
    if str(path) == "":
        raise UsageError('the path of the checkpoint is empty; the current folder is "."')
    return _open_file(location) if is_regular(location) else open_folder(CheckpointFolder(location))


def open_folder(folder: CheckpointFolder) -> Checkpoint:
    """Open the checkpoint in `folder`, which may be a remote one; everything else as ``open_checkpoint``."""
    if not folder.shard_names():
        raise SourceError(f"the folder holds no *{SHARD_SUFFIX}", path=folder.root)
    config = read_config(folder)
    if config is None and folder.unfinished:
        raise MissingFileError(
            f"holds an output that was never finished ({PROGRESS_NAME} is there); go on with --resume, or begin anew "
            "with --force",
            path=folder.root,
        )
    block = None if config is None else config.get("quantization_config")
    if block is not None and not isinstance(block, dict):
        raise SchemaError("quantization_config must be a JSON object", path=folder.root / CONFIG_NAME)
    if isinstance(block, dict) and block.get("quant_method") == "espalier" and config is not None:
        from espalier_format.checkpoint.espalier import open_espalier  # noqa: PLC0415 - imports pydantic

        return open_espalier(folder, config)
    return _open_other(folder, config, folder.open_shards(), lone=False)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix != SHARD_SUFFIX:
        raise SourceError(f"neither a folder nor a {SHARD_SUFFIX} file", path=path)
    return _open_other(CheckpointFolder(path.parent), None, (Shard(path),), lone=True)


def _open_other(
    folder: CheckpointFolder, config: dict[str, Any] | None, shards: tuple[Shard, ...], *, lone: bool
) -> Checkpoint:
    from espalier_format.checkpoint.exl3 import has_exl3_modules, open_exl3  # noqa: PLC0415 - only where needed
    from espalier_format.checkpoint.plain import open_plain  # noqa: PLC0415
    from espalier_format.converters.compressed_tensors_modules import has_packed_tensors  # noqa: PLC0415
    from espalier_format.converters.compressed_tensors_schemes import METHOD  # noqa: PLC0415

    try:
        table = TensorTable(shards)
        _refuse_espalier_tensors(folder, config, table, lone=lone)
        block = (config or {}).get("quantization_config")
        stated = block.get("quant_method") if isinstance(block, dict) else None
        if stated == "exl3" or (stated is None and has_exl3_modules(table)):
            return open_exl3(folder, config or {}, shards, table, lone=lone)
        quantization = stated_quantization(config)
        stated = None if quantization is None else quantization.method
        if not lone and (stated == METHOD or (stated is None and has_packed_tensors(table))):
            from espalier_format.checkpoint.compressed_tensors import open_compressed_tensors  # noqa: PLC0415

            return open_compressed_tensors(folder, config or {}, shards, table)
        return open_plain(folder, config or {}, shards, table, lone=lone)
    except BaseException:
        for shard in shards:
            shard.close()
        raise


def _refuse_espalier_tensors(
    folder: CheckpointFolder, config: dict[str, Any] | None, table: TensorTable, *, lone: bool
) -> None:
    """Refuse shards of an Espalier checkpoint whose config is missing: the format version is unknown then."""
    found = next((n for n in table.infos if "esp_" in n and n.rpartition(".")[2].startswith("esp_")), None)
    if found is None:
        return
    if lone or config is None:
        raise MissingFileError(
            f"{found} belongs to an Espalier checkpoint, which cannot be read without its {CONFIG_NAME}"
            + ("; open the folder instead" if lone and (folder.root / CONFIG_NAME).exists() else ""),
            path=table.shards[found].path,
        )
    raise FormatVersionError(
        f"{found} belongs to an Espalier checkpoint, but {CONFIG_NAME} has no quantization_config of quant_method "
        '"espalier", so the format version is unknown',
        path=table.shards[found].path,
    )
