"""EXL3, Espalier or compressed-tensors to a plain Hugging Face checkpoint: every weight decoded, at its true size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.files import refuse_missing_tensors
from espalier_format.codec.dtype_names import parse_choice
from espalier_format.container.header import tensor_bytes
from espalier_format.container.json_document import JsonStyle
from espalier_format.container.names import CONFIG_NAME, SIGNATURE_NAME
from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.container.writer import CheckpointWriter
from espalier_format.converters.exl3_modules import import_modules
from espalier_format.converters.hf_config import hf_config, target_dtype
from espalier_format.converters.hf_layout import plan_hf_layout, refuse_inexpressible
from espalier_format.converters.hf_stream import stream_tensor, written_dtype
from espalier_format.converters.hf_tensors import StoredModule
from espalier_format.converters.output import Meter, manifest_bytes
from espalier_format.converters.report import ConversionReport
from espalier_format.converters.source_state import describe_conversion
from espalier_format.errors import MissingFileError, SourceError, UnknownSizeError, UsageError
from espalier_format.kernels.ordered_map import processors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.codec.dtype_names import DtypeChoice
    from espalier_format.converters.hf_tensors import HfTensor
    from espalier_format.progress import Progress

MAX_SHARD_BYTES: Final = 5_000_000_000
"""Default limit of one output file, the Hugging Face convention."""

_MAX_THREADS: Final = 8
_METADATA: Final = {"format": "pt"}
_DESCRIBES_QUANTIZATION: Final = frozenset({"quantization_config.json", SIGNATURE_NAME})


@dataclass(frozen=True, slots=True)
class Written:
    """A planned tensor and the safetensors dtype that it is written in."""

    tensor: HfTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.dtype, self.tensor.shape)


def to_hf(
    source: Checkpoint,
    destination: Path,
    *,
    dtype: DtypeChoice = "source",
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int | None = None,
) -> ConversionReport:
    """Write a checkpoint that the architecture's own loader reads; needs neither torch nor transformers.

    ``dtype`` "source" is what config.json states (BF16 where it states none), the others name a dtype. Of a
    compressed-tensors checkpoint "source" is the dtype that compressed-tensors gives each weight, its scale's, and all
    other tensors are copied; another dtype is a cast of that weight.

    * Quantized weights: rounded once, to nearest even, from the exact value (spec/rotation.md); shape (out, in)
      without padding.
    * Plain F16 and BF16 tensors are cast to that dtype too, rounded once, to nearest even. Plain F32 and F64 tensors
      keep their dtype, since what is stored so needs it (``A_log``, correction biases), and so do integers and the
      rest: these bytes are copied.
    * Names are what the architecture's loader expects (`hf_layout`): q, k, v joined to ``attn.qkv`` in place of the
      plain copy that EXL3 keeps, slices joined, and so on. ``mtp.*`` tensors are written as stored; transformers
      ignores them. For an architecture that is not known, names stay as stored, and the report warns.
    * config.json loses ``quantization_config``, states an explicit ``dtype``, and unties a head that has a tensor.
      Other files are copied byte for byte, except what only describes the quantization.

    Shards hold at most ``max_shard_bytes`` of tensors, or one tensor; an index is written if there is more than one.
    The result is the same for any number of ``threads`` (all cores, at most 8, by default). Memory is bounded,
    whatever the size of the model. Durability and ``resume`` as `exl3_to_espalier`.

    Raises:
        UnknownSizeError: the true size of a module is not known, or its EXL3 tensors go beyond the one that is
            stated; nothing has been written.
        SourceError: the checkpoint is not quantized, or holds something that plain weights cannot express: a scale
            baked in by exllamav3, a row table, parts that do not fit together; nothing has been written.
        IndexMismatchError: the index of a compressed-tensors checkpoint names a tensor that no shard holds.
        ShapeError: a compressed-tensors module contradicts itself.
        MissingFileError: there is no config.json.
        ScaleOverflowError: a finite value is too large for the dtype; the tensor is named.
        NonFiniteScaleError: a scale is infinite or NaN.
        OutputExistsError, UsageError, WriteError: as `CheckpointWriter`.
    """
    dtype = parse_choice(dtype)
    if source.format == "plain":
        raise SourceError("the checkpoint is not quantized: there is nothing to decode", path=source.folder.root)
    if not source.config:
        message = "config.json is needed: it says how large the weights are and what the model's loader expects"
        raise MissingFileError(message, path=source.folder.root / CONFIG_NAME)
    if max_shard_bytes < 1:
        raise UsageError("the shard limit must be positive", got=max_shard_bytes)
    refuse_inexpressible(source.config, source.modules, source.plain, from_exl3=source.was_exl3)
    _refuse_padded(source)
    _refuse_contradicted(source)
    if source.packed:
        refuse_missing_tensors(source)
    stored: Mapping[str, QuantizedModule | PackedModule] = {**source.modules, **source.packed}
    modules = {
        name: StoredModule(module.in_features, module.out_features, None if module.bias is None else module.bias.name)
        for name, module in stored.items()
    }
    plain = {name: tensor.shape for name, tensor in source.plain.items()}
    layout = plan_hf_layout(source.config, modules, plain)
    target = None if source.packed and dtype == "source" else target_dtype(source.config, dtype)
    tensors = [
        Written(tensor, written_dtype(source, tensor, target)) for tensor in _in_source_order(source, layout.tensors)
    ]
    config = _config_bytes(source, tensors, None if dtype == "source" else target)

    meter = Meter(progress, sum(written.nbytes for written in tensors), "to Hugging Face")
    threads = threads or min(processors(), _MAX_THREADS)
    copied = _copied_files(source)
    with CheckpointWriter(
        destination,
        force=force,
        sources=[source.folder.root],
        progress=meter.advance,
        resume=resume,
        job=describe_conversion(source, "hf", dtype=dtype, shard_size=max_shard_bytes),
    ) as writer:
        shards = _shards(tensors, max_shard_bytes)
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            writer.add_shard(name, [_planned(source, tensor, threads) for tensor in shard], _METADATA)
        for name in copied:
            writer.add_copy(name, source.folder.path_of(name))
        writer.add_bytes(CONFIG_NAME, config)
        records = writer.finish(index=len(shards) > 1, manifest=manifest_bytes)
    meter.finish()
    return ConversionReport(
        source=source.folder.root,
        destination=destination,
        source_format=source.format,
        target_format="hf",
        modules=len(source.modules) + len(source.packed),
        bytes_read=_bytes_read(source, copied),
        bytes_written=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        warnings=(*source.warnings, *layout.warnings),
        resumed=writer.resumed,
    )


def _refuse_padded(source: Checkpoint) -> None:
    padded = [module for module in source.modules.values() if module.size_source == "padded"]
    if not padded:
        return
    shown = ", ".join(module.name for module in padded[:3])
    more = f" and {len(padded) - 3} more" if len(padded) > 3 else ""
    reasons = sorted({module.size_how for module in padded if module.size_how})
    why = f": {reasons[0]}" if reasons else ""
    raise UnknownSizeError(
        f"the true size of {shown}{more} is not known, only the padded one, and plain weights need it{why}",
        path=source.folder.root,
        tensor=padded[0].name,
    )


def _refuse_contradicted(source: Checkpoint) -> None:
    """Refuse to cut off what is no padding: EXL3 tensors that hold more than config.json says."""
    if source.format != "exl3":
        return
    imported, _ = import_modules(source)
    doubtful = [(name, sizes.doubtful) for name, sizes in imported.items() if sizes.doubtful is not None]
    if doubtful:
        name, kind = doubtful[0]
        more = f", and the same is so of {len(doubtful) - 1} more" if len(doubtful) > 1 else ""
        raise UnknownSizeError(
            f"the {kind} of {name} is not zero beyond the true size{more}: it may be larger than it is said to be, "
            "and plain weights need it",
            path=source.folder.root,
            tensor=name,
        )


def _in_source_order(source: Checkpoint, tensors: Iterable[HfTensor]) -> list[HfTensor]:
    """Sort so that each tensor stands where the first of its parts stands in the source."""
    position = {name: number for number, name in enumerate(source.tensors)}

    def first(tensor: HfTensor) -> tuple[int, str]:
        stored = (_weight_name(source, s.name) if s.quantized else s.name for s in tensor.sources())
        return min(position[name] for name in stored), tensor.name

    return sorted(tensors, key=first)


def _weight_name(source: Checkpoint, module: str) -> str:
    return source.packed[module].weight.name if module in source.packed else source.modules[module].trellis.name


def _config_bytes(source: Checkpoint, tensors: Iterable[Written], explicit: str | None) -> bytes:
    names = (written.tensor.name for written in tensors)
    has_head = any(name.endswith(".weight") and component_of(name) is Component.HEAD for name in names)
    style = JsonStyle.of_file(source.folder.path_of(CONFIG_NAME))
    return style.dumps(hf_config(source.config, explicit_dtype=explicit, has_head=has_head))


def _copied_files(source: Checkpoint) -> tuple[str, ...]:
    """Return the files that go into the output as they are: not those which describe the quantization."""
    origin = None if source.quantization is None else source.quantization.source
    carried = set() if origin is None else set(origin.carried_files.values())
    return tuple(name for name in source.other_files if name not in carried | _DESCRIBES_QUANTIZATION)


def _bytes_read(source: Checkpoint, copied: Sequence[str]) -> int:
    names = (CONFIG_NAME, *copied)
    return sum(shard.header.file_size for shard in source.shards) + sum(
        source.folder.path_of(name).stat().st_size for name in names
    )


def _shards(tensors: Iterable[Written], limit: int) -> list[list[Written]]:
    """Cut the tensors, in order, into groups of at most ``limit`` bytes; a larger tensor is a group of its own."""
    shards: list[list[Written]] = [[]]
    size = 0
    for written in tensors:
        if shards[-1] and size + written.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(written)
        size += written.nbytes
    return shards


def _planned(source: Checkpoint, written: Written, threads: int) -> PlannedTensor:
    def chunks() -> Iterator[memoryview]:
        return stream_tensor(source, written.tensor, written.dtype, threads=threads)

    return PlannedTensor(written.tensor.name, written.dtype, written.tensor.shape, chunks)
