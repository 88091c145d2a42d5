"""Convert a checkpoint from one format to another, whichever the source is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.quantized_tensors import quantized_tensor
from espalier_format.checkpoint.stated_quantization import stated_quantization
from espalier_format.codec.dtype_names import parse_choice
from espalier_format.errors import SourceError, UsageError
from espalier_format.operations.compressed_tensors_findings import contradictions_in_words
from espalier_format.operations.places import folders
from espalier_format.operations.source_manifest import check_against_manifest

if TYPE_CHECKING:
    from espalier_format.checkpoint import Checkpoint
    from espalier_format.codec.dtype_names import DtypeChoice
    from espalier_format.converters.report import ConversionReport
    from espalier_format.progress import Progress

TARGETS = ("espalier", "exl3", "hf")
_NAMES = {"espalier": "an Espalier checkpoint", "exl3": "an EXL3 checkpoint", "plain": "not quantized"}
_REENCODE = "its integers are no trellis codes; to encode them anew: espalier-format quantize"


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    to: Literal["espalier", "exl3", "hf"],
    dtype: DtypeChoice | None = None,
    force: bool = False,
    digests: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint folder ``source`` to the format ``to`` in the folder ``destination``.

    EXL3 to Espalier and back loses no bit. "hf" writes plain weights in ``dtype`` from either, and from
    compressed-tensors: "bfloat16", "float16" or "float32" ("bf16", "fp16" and "fp32" are the same), or "source", as if
    None, for the dtype that config.json states. ``digests`` adds decode digests to the manifest of an Espalier output;
    ``force`` replaces a destination that holds an earlier output.

    An interruption loses no finished file: they lie in a hidden folder in the destination, from where ``resume`` goes
    on, to the same bytes. Without it, an unfinished output is refused unless ``force`` is given.

    Raises:
        UsageError: options that do not go together, a source that has the wanted format already, or an unfinished
            output of another source or with other options.
        SourceError: the source is not of a format that can be converted to ``to``.
        LossyError: an Espalier checkpoint that EXL3 cannot hold.
        DigestError: the source has a manifest, and a file of it is missing or of another size; nothing is written.
        EspalierError: as `open_checkpoint`, `exl3_to_espalier`, `espalier_to_exl3` and `to_hf`.

    >>> import tempfile
    >>> from importlib.resources import files
    >>> source = str(files("espalier_format") / "demo_data" / "llama-3.0-mcg")
    >>> with tempfile.TemporaryDirectory() as scratch:
    ...     there = convert_checkpoint(source, f"{scratch}/espalier", to="espalier")
    ...     back = convert_checkpoint(f"{scratch}/espalier", f"{scratch}/exl3", to="exl3")
    ...     same = Path(scratch, "exl3", "model.safetensors").read_bytes() == Path(
    ...         source, "model.safetensors"
    ...     ).read_bytes()
    >>> there.modules, back.modules, same
    (15, 15, True)
    """
    if to not in TARGETS:
        raise UsageError(f"cannot convert to {to!r}; the targets are {', '.join(TARGETS)}")
    chosen = None if dtype is None else parse_choice(dtype)
    if chosen is not None and to != "hf":
        raise UsageError('a dtype can be chosen for the target "hf" only: the other conversions change no number')
    if digests and to != "espalier":
        raise UsageError('digests can be added for the target "espalier" only')
    source, target = folders(source, destination, "to convert it")
    with open_checkpoint(source) as checkpoint:
        _check_pair(checkpoint, to)
        warnings = (*check_against_manifest(checkpoint.folder), *contradictions_in_words(checkpoint))
        if to == "hf":
            from espalier_format.converters.to_hf import to_hf  # noqa: PLC0415 - only what is needed

            report = to_hf(checkpoint, target, dtype=chosen or "source", force=force, resume=resume, progress=progress)
        elif to == "espalier":
            from espalier_format.converters.exl3_to_espalier import exl3_to_espalier  # noqa: PLC0415

            report = exl3_to_espalier(
                checkpoint, target, force=force, digests=digests, resume=resume, progress=progress
            )
        else:
            from espalier_format.converters.espalier_to_exl3 import espalier_to_exl3  # noqa: PLC0415

            report = espalier_to_exl3(checkpoint, target, force=force, resume=resume, progress=progress)
    return replace(report, warnings=(*warnings, *report.warnings))


def _check_pair(checkpoint: Checkpoint, to: str) -> None:
    if checkpoint.format == "plain":
        only = "only Espalier, EXL3 and compressed-tensors checkpoints can be converted"
        stated = stated_quantization(checkpoint.config)
        is_quantized = stated is not None or quantized_tensor(checkpoint.tensors) is not None
        what = "not quantized in a format that this library reads" if is_quantized else "not quantized"
        how = "" if is_quantized else "; to quantize it: espalier-format quantize"
        raise SourceError(f"the checkpoint is {what}, and {only}{how}", path=checkpoint.folder.root)
    if checkpoint.format == "compressed-tensors" and to != "hf":
        message = f"a compressed-tensors checkpoint converts to hf only: {_REENCODE}"
        raise SourceError(message, path=checkpoint.folder.root)
    if checkpoint.format == to:
        raise UsageError(f"the source is {_NAMES[to]} already", path=checkpoint.folder.root)
