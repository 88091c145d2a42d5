"""``verify``: everything about a checkpoint that can be checked, every finding reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from espalier_format.checkpoint import open_checkpoint
from espalier_format.container.folder import CheckpointFolder
from espalier_format.errors import EspalierError, InconsistentError, MissingFileError, UsageError
from espalier_format.operations.record_digests import record_digests
from espalier_format.operations.verify_digests import check_digests
from espalier_format.operations.verify_files import check_files, read_manifest
from espalier_format.operations.verify_report import Check, VerifyReport, judged, passed, skipped
from espalier_format.operations.verify_tensors import check_bits, check_index, check_scales, check_second_reader
from espalier_format.progress import NullProgress

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.progress import Progress
    from espalier_format.schema.manifest import Manifest


def verify_checkpoint(
    path: str | Path, *, deep: bool = False, record: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Check a checkpoint of any kind and return all findings; only a path with nothing there raises.

    The checks, each of which reports everything it finds: *structure* (what opening checks), *safetensors* (every
    shard read by the safetensors library too), *index*, *bits*, *scales*, *manifest* (sizes, hashes, missing and
    extra files) and, with ``deep``, *digests*: every module is decoded and compared with the manifest. ``record``
    writes the digests into a manifest that has none or not all, atomically, if nothing was found wrong. A check that
    does not apply is skipped and says why. Memory is bounded; nothing is changed but by ``record``.

    Raises:
        UsageError: ``record`` without ``deep``, or for something else than an Espalier folder with a manifest.
        MissingFileError: there is nothing at ``path``.
        WriteError: the manifest cannot be replaced.
    """
    if record and not deep:
        raise UsageError("--record needs --deep")
    location = Path(path)
    if not location.exists():
        raise MissingFileError("there is no such file or folder", path=location)
    shown = NullProgress() if progress is None else progress
    folder = CheckpointFolder.open(location) if location.is_dir() else None
    manifest, manifest_problem = _manifest(folder)
    try:
        checkpoint = open_checkpoint(location)
    except EspalierError as error:
        checks = [judged("structure", _why_refused(error), [error])]
        checks.append(_check_manifest(folder, manifest, manifest_problem, shown))
        return VerifyReport(str(path), None, tuple(checks), ())
    with checkpoint:
        if record and (checkpoint.format != "espalier" or manifest is None):
            raise UsageError("--record needs an Espalier folder with a manifest", path=location)
        checks = [
            passed("structure", _structure(checkpoint)),
            check_second_reader(checkpoint),
            check_index(checkpoint, folder),
            check_bits(checkpoint),
            check_scales(checkpoint, shown),
            _check_manifest(folder, manifest, manifest_problem, shown),
        ]
        recorded = 0
        if deep:
            check, digests = check_digests(checkpoint, manifest, shown)
            checks.append(check)
            if record and folder is not None and manifest is not None and not any(c.findings for c in checks):
                recorded = record_digests(folder, manifest, digests)
        warnings = list(checkpoint.warnings)
        if folder is not None and manifest is None and manifest_problem is None:
            warnings.append("there is no manifest, so file sizes and hashes could not be checked")
        return VerifyReport(str(path), checkpoint.format, tuple(checks), tuple(warnings), recorded)


def _manifest(folder: CheckpointFolder | None) -> tuple[Manifest | None, EspalierError | None]:
    if folder is None:
        return None, None
    try:
        return read_manifest(folder), None
    except EspalierError as error:
        return None, error


def _check_manifest(
    folder: CheckpointFolder | None, manifest: Manifest | None, problem: EspalierError | None, progress: Progress
) -> Check:
    if problem is not None:
        return judged("manifest", "cannot be read", [problem])
    if folder is None or manifest is None:
        return skipped("manifest", "there is none")
    return check_files(folder, manifest, progress)


def _structure(checkpoint: Checkpoint) -> str:
    counts = (
        (len(checkpoint.modules), "quantized module"),
        (len(checkpoint.tensors), "tensor"),
        (len(checkpoint.shards), "shard"),
    )
    return ", ".join(f"{number:,} {noun}{'' if number == 1 else 's'}" for number, noun in counts)


def _why_refused(error: EspalierError) -> str:
    return "contradicts itself" if isinstance(error, InconsistentError) else "refused"
