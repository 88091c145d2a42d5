"""Open an EXL3 checkpoint (spec/exl3.md): the shards are right, whatever else is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from espalier_format.checkpoint.base import Checkpoint
from espalier_format.checkpoint.derived_banks import BankMember, derive_banks
from espalier_format.checkpoint.exl3_names import MODULE_KINDS, SCALE_KINDS
from espalier_format.checkpoint.files import ShardCheck, check_shards, other_files
from espalier_format.checkpoint.module import Blocks, QuantizedModule
from espalier_format.checkpoint.plain_copies import copy_warnings
from espalier_format.checkpoint.storage_claims import storage_warnings
from espalier_format.checkpoint.tensors import FLOATING, LazyMapping, TensorTable
from espalier_format.checkpoint.true_sizes import TrueSize, resolve_true_sizes, size_warnings
from espalier_format.codec.codebook import EXL3_MARKERS, Codebook, exl3_codebook
from espalier_format.codec.rotation import EXL3_BLOCK
from espalier_format.errors import (
    CodebookError,
    DtypeError,
    EspalierError,
    MissingTensorError,
    ShapeError,
    UnexpectedTensorError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.header import TensorInfo
    from espalier_format.container.shard import Shard


class _Parts(NamedTuple):
    """The tensors of one module, checked."""

    codebook: Codebook
    trellis: str
    suh: str
    svh: str
    bias: str | None
    marker: str | None
    stored: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.suh, self.svh, self.bias, self.marker, self.trellis) if name is not None)


def has_exl3_modules(table: TensorTable) -> bool:
    """Tell whether any tensor is a rank-3 ``.trellis`` with an EXL3 scale vector beside it."""
    return any(
        name.endswith(".trellis")
        and len(info.shape) == 3
        and any(f"{name[: -len('trellis')]}{kind}" in table.infos for kind in SCALE_KINDS)
        for name, info in table.infos.items()
    )


def open_exl3(
    folder: CheckpointFolder, config: Mapping[str, Any], shards: tuple[Shard, ...], table: TensorTable, *, lone: bool
) -> Checkpoint:
    """Check an EXL3 checkpoint and return it; of the tensor data only codebook markers are read.

    ``lone`` says that a single file was given: then nothing else in its folder belongs to the checkpoint.
    A wrong index and quantization_config.json only lead to warnings, unless a shard is missing.

    Raises:
        MissingFileError: a shard is missing, by its numbered peers or because the index lists a trellis of it.
        CodebookError: a marker holds another value than its constant, both markers are there, or the rate
            needs another codebook.
        MissingTensorError, UnexpectedTensorError, DtypeError, ShapeError: the tensors of a module do not
            fit together.
        DuplicateTensorError: two shards hold different tensors of one name.
    """
    duplicates = table.check_duplicates()
    listed = ShardCheck(()) if lone else check_shards(folder, shards, table.infos, quantized=True)
    warnings = [*duplicates, *listed.warnings]
    parts = _collect(table)
    warnings.extend(_check_markers(parts, table))
    claimed = {tensor for module in parts.values() for tensor in module.names}
    plain = tuple(name for name in table.infos if name not in claimed)
    sizes = resolve_true_sizes(
        config,
        {name: module.stored for name, module in parts.items()},
        {name: table.infos[name].shape for name in plain},
    )
    for name, module in parts.items():
        _check_bias(module, sizes[name], table)
    warnings.extend(size_warnings(sizes))
    warnings.extend(copy_warnings(plain, parts, table.infos))
    if not lone:
        warnings.extend(storage_warnings(folder, table))

    def make(name: str) -> QuantizedModule:
        module, size = parts[name], sizes[name]
        return QuantizedModule(
            name=name,
            codebook=module.codebook,
            in_features=size.in_features,
            out_features=size.out_features,
            rotation=Blocks(EXL3_BLOCK, EXL3_BLOCK),
            size_source=size.source,
            trellis=table.ref(module.trellis),
            suh=table.ref(module.suh),
            svh=table.ref(module.svh),
            bias=None if module.bias is None else table.ref(module.bias),
            marker=None if module.marker is None else table.ref(module.marker),
            packed_su=module.suh.endswith(".su"),
            packed_sv=module.svh.endswith(".sv"),
            size_how=size.how,
        )

    return Checkpoint(
        folder=folder,
        format="exl3",
        config=config,
        quantization=None,
        shards=shards,
        tensors=table.refs(),
        modules=LazyMapping(tuple(parts), make),
        expert_banks=derive_banks(
            {
                name: BankMember(module.codebook, size.in_features, size.out_features, size.source)
                for name, module in parts.items()
                for size in (sizes[name],)
            },
            {name: table.infos[name].shape for name in plain},
        ),
        plain=table.refs(plain),
        other_files=() if lone else other_files(folder, shards),
        warnings=tuple(warnings),
        missing=listed.missing,
    )


def _collect(table: TensorTable) -> dict[str, _Parts]:
    """Group the tensors by module and check each group; modules are in the order of their trellis tensors."""
    kinds: dict[str, dict[str, TensorInfo]] = {}
    for name, info in table.infos.items():
        module, dot, kind = name.rpartition(".")
        if dot and kind in MODULE_KINDS:
            kinds.setdefault(module, {})[kind] = info
    modules = {}
    for name, info in table.infos.items():
        if name.endswith(".trellis"):
            module = name[: -len(".trellis")]
            if len(info.shape) == 3:
                modules[module] = _module(module, kinds.pop(module), table)
            elif len(info.shape) == 2:
                # A row table (of an embedding): another codec, which is carried as it is.
                del kinds[module]
            else:
                raise _refuse(
                    ShapeError, "a trellis has three dimensions, a row table two", info, table, got=list(info.shape)
                )
    for module, found in kinds.items():
        orphan = next((found[kind] for kind in SCALE_KINDS if kind in found), None)
        if orphan is not None:
            raise _refuse(MissingTensorError, f"there is no {module}.trellis for this tensor", orphan, table)
    return modules


def _module(name: str, found: Mapping[str, TensorInfo], table: TensorTable) -> _Parts:
    trellis = found["trellis"]
    if trellis.dtype != "I16":
        raise _refuse(DtypeError, "wrong dtype", trellis, table, expected="I16", got=trellis.dtype)
    rows, columns = 16 * trellis.shape[0], 16 * trellis.shape[1]
    if rows == 0 or columns == 0 or rows % EXL3_BLOCK or columns % EXL3_BLOCK:
        raise _refuse(
            ShapeError, f"both sides must be multiples of {EXL3_BLOCK}", trellis, table, got=f"{rows} x {columns}"
        )
    if "scale" in found:
        raise _refuse(UnexpectedTensorError, "no version of EXL3 has this tensor", found["scale"], table)
    suh = _scale(trellis, found, ("suh", "su"), rows, table)
    svh = _scale(trellis, found, ("svh", "sv"), columns, table)
    markers = [found[marker] for marker in EXL3_MARKERS if marker in found]
    if len(markers) > 1:
        raise _refuse(CodebookError, f"{name} has the markers of two codebooks", markers[1], table)
    marker = markers[0] if markers else None
    if marker is not None:
        if marker.dtype != "I32":
            raise _refuse(DtypeError, "wrong dtype", marker, table, expected="I32", got=marker.dtype)
        if marker.shape != ():
            raise _refuse(ShapeError, "wrong shape", marker, table, expected="no dimensions", got=list(marker.shape))
    try:
        codebook = exl3_codebook(None if marker is None else marker.name.rpartition(".")[2], trellis.shape[2])
    except (CodebookError, ShapeError) as error:
        raise _refuse(type(error), error.message, trellis, table, expected=error.expected, got=error.got) from None
    bias = table.infos.get(f"{name}.bias")
    return _Parts(
        codebook=codebook,
        trellis=trellis.name,
        suh=suh.name,
        svh=svh.name,
        bias=None if bias is None else bias.name,
        marker=None if marker is None else marker.name,
        stored=(rows, columns),
    )


def _scale(
    trellis: TensorInfo, found: Mapping[str, TensorInfo], kinds: tuple[str, str], size: int, table: TensorTable
) -> TensorInfo:
    """Return the scale vector of one side: float16, or the legacy packed signs."""
    full, packed = (found.get(kind) for kind in kinds)
    scale = full or packed
    if scale is None:
        raise _refuse(MissingTensorError, f"the module has neither {kinds[0]} nor {kinds[1]}", trellis, table)
    if full is not None and packed is not None:
        raise _refuse(UnexpectedTensorError, f"the module has both {kinds[0]} and {kinds[1]}", packed, table)
    dtype, shape = ("I16", (size // 16,)) if full is None else ("F16", (size,))
    if scale.dtype != dtype:
        raise _refuse(DtypeError, "wrong dtype", scale, table, expected=dtype, got=scale.dtype)
    if scale.shape != shape:
        raise _refuse(ShapeError, "wrong shape", scale, table, expected=list(shape), got=list(scale.shape))
    return scale


def _check_bias(module: _Parts, size: TrueSize, table: TensorTable) -> None:
    if module.bias is None:
        return
    bias = table.infos[module.bias]
    if bias.dtype not in FLOATING:
        raise _refuse(DtypeError, "a bias must be floating-point", bias, table, got=bias.dtype)
    if bias.shape not in ((module.stored[1],), (size.out_features,)):
        raise _refuse(ShapeError, "wrong shape", bias, table, expected=[module.stored[1]], got=list(bias.shape))


def _check_markers(modules: Mapping[str, _Parts], table: TensorTable) -> tuple[str, ...]:
    """Raise ``CodebookError`` unless every marker holds the constant of its codebook.

    The markers of a remote checkpoint cannot be read: that they are there names the codebook, and a warning says so.
    """
    by_shard: dict[str, list[TensorInfo]] = {}
    for module in modules.values():
        if module.marker is not None:
            by_shard.setdefault(table.shards[module.marker].name, []).append(table.infos[module.marker])
    unread = 0
    for markers in by_shard.values():
        shard = table.shards[markers[0].name]
        if not shard.has_data:
            unread += len(markers)
            continue
        shard.expect(markers)
        for marker in markers:
            value, constant = int.from_bytes(shard.read(marker), "little"), EXL3_MARKERS[marker.name.rpartition(".")[2]]
            if value != constant:
                raise _refuse(
                    CodebookError,
                    "the codebook has another multiplier (experimental versions of EXL3 wrote such files)",
                    marker,
                    table,
                    expected=f"0x{constant:08X}",
                    got=f"0x{value:08X}",
                )
    if not unread:
        return ()
    return (f"{unread:,} codebook markers are not read from afar: that they are there names the codebook",)


def _refuse(
    kind: type[EspalierError],
    message: str,
    info: TensorInfo,
    table: TensorTable,
    *,
    expected: object = None,
    got: object = None,
) -> EspalierError:
    return kind(message, path=table.shards[info.name].path, tensor=info.name, expected=expected, got=got)
