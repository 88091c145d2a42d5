"""Convert a checkpoint from one format to another, whichever the source is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import SourceError, UsageError

if TYPE_CHECKING:
    from espalier_format.checkpoint import Checkpoint
    from espalier_format.converters.report import ConversionReport
    from espalier_format.progress import Progress

TARGETS = ("espalier", "exl3", "hf")
_NAMES = {"espalier": "an Espalier checkpoint", "exl3": "an EXL3 checkpoint", "plain": "not quantized"}


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Literal["espalier", "exl3", "hf"],
    dtype: Literal["source", "bf16", "fp16", "fp32"] | None = None,
    force: bool = False,
    digests: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint folder ``source`` to the format ``to`` in the folder ``destination``.

    EXL3 to Espalier and back loses no bit. "hf" writes plain weights in ``dtype`` ("source" if None) from
    either. ``digests`` adds decode digests to the manifest of an Espalier output; ``force`` replaces a
    destination that holds an earlier output.

    Raises:
        UsageError: options that do not go together, or a source that has the wanted format already.
        SourceError: the source is not of a format that can be converted to ``to``.
        LossyError: an Espalier checkpoint that EXL3 cannot hold.
        EspalierError: as `open_checkpoint`, `exl3_to_espalier`, `espalier_to_exl3` and `to_hf`.
    """
    if to not in TARGETS:
        raise UsageError(f"cannot convert to {to!r}; the targets are {', '.join(TARGETS)}")
    if dtype is not None and to != "hf":
        raise UsageError("--dtype goes with --to hf only: the other conversions change no number")
    if digests and to != "espalier":
        raise UsageError("--digests goes with --to espalier only")
    if Path(source).is_file():
        raise SourceError("a single file is no checkpoint; give the folder", path=source)
    with open_checkpoint(source) as checkpoint:
        _check_pair(checkpoint, to)
        target = Path(destination)
        if to == "hf":
            from espalier_format.converters.to_hf import to_hf  # noqa: PLC0415 - only what is needed

            return to_hf(checkpoint, target, dtype=dtype or "source", force=force, progress=progress)
        if to == "espalier":
            from espalier_format.converters.exl3_to_espalier import exl3_to_espalier  # noqa: PLC0415

            return exl3_to_espalier(checkpoint, target, force=force, digests=digests, progress=progress)
        from espalier_format.converters.espalier_to_exl3 import espalier_to_exl3  # noqa: PLC0415

        return espalier_to_exl3(checkpoint, target, force=force, progress=progress)


def _check_pair(checkpoint: Checkpoint, to: str) -> None:
    if checkpoint.format == "plain":
        raise SourceError(
            "the checkpoint is not quantized in a format that this library reads; only Espalier and EXL3 "
            "checkpoints can be converted",
            path=checkpoint.folder.root,
        )
    if checkpoint.format == to:
        raise UsageError(f"the source is {_NAMES[to]} already", path=checkpoint.folder.root)
