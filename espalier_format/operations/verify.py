"""``verify``: everything about a checkpoint that can be checked, every finding reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from espalier_format.checkpoint import open_checkpoint
from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.names import MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.container.regular_file import is_regular, read_regular
from espalier_format.errors import EspalierError, InconsistentError, UsageError
from espalier_format.limits import MAX_JSON_BYTES
from espalier_format.operations.record_digests import record_digests
from espalier_format.operations.verify_digests import check_digests
from espalier_format.operations.verify_files import check_files, read_manifest
from espalier_format.operations.verify_report import Check, VerifyReport, counted, judged, passed, skipped
from espalier_format.operations.verify_signature import signature_check
from espalier_format.operations.verify_tensors import check_bits, check_index, check_scales, check_second_reader
from espalier_format.progress import NullProgress

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.hub.signing import TrustedKey
    from espalier_format.operations.compressed_tensors_findings import Contradictions
    from espalier_format.progress import Progress
    from espalier_format.schema.manifest import Manifest


def verify_checkpoint(
    path: str | Path,
    *,
    deep: bool = False,
    record: bool = False,
    trusted: TrustedKey | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a checkpoint of any kind and return all findings; only a path with nothing there raises.

    The checks, each of which reports everything it finds: *structure* (what opening checks), *safetensors* (every
    shard read by the safetensors library too), *index*, *bits*, *scales*, *manifest* (sizes, hashes, missing and
    extra files) and, with ``deep``, *digests*: every module is decoded and compared with the manifest. Of a
    compressed-tensors checkpoint also *groups* (config, index and tensors against each other) and *packed* (scales,
    orders and shapes; with ``deep`` all weights) and, with ``deep`` where its package is installed, *library*. With
    ``trusted``, *signature*: the manifest is signed by that key. ``record`` writes the digests into a manifest that
    has none or not all, atomically, if nothing was found wrong; a signature of the manifest before is removed. A
    check that does not apply is skipped and says why. Memory is bounded; nothing is changed but by ``record``.

    Raises:
        UsageError: ``record`` without ``deep``, or for something else than an Espalier folder with a manifest.
        MissingFileError: there is nothing at ``path``.
        WriteError: the manifest cannot be replaced.

    >>> from importlib.resources import files
    >>> report = verify_checkpoint(str(files("espalier_format") / "demo_data" / "llama-3.0-mcg"))
    >>> report.exit_code, [check.name for check in report.checks][:3]
    (0, ['structure', 'safetensors', 'index'])
    """
    if record and not deep:
        raise UsageError("record needs deep: the digests come from decoding every module")
    location = Path(path)
    shown = NullProgress() if progress is None else progress
    folder = None if is_regular(location) else CheckpointFolder(location)
    manifest, manifest_problem = _manifest(folder)
    try:
        checkpoint = open_checkpoint(location)
    except EspalierError as error:
        checks = [judged("structure", _why_refused(error), [error])]
        checks.append(_check_manifest(folder, manifest, manifest_problem, shown))
        checks += _check_signature(location, folder, trusted)
        return VerifyReport(str(path), None, tuple(checks), ())
    with checkpoint:
        if record and (checkpoint.format != "espalier" or manifest is None):
            what = f"has no {MANIFEST_NAME}" if checkpoint.format == "espalier" else f"is {checkpoint.format}"
            text = f"record needs an Espalier folder with a manifest, as convert writes it, and this one {what}"
            raise UsageError(text, path=location)
        contradictions = _contradictions(checkpoint)
        checks = [
            passed("structure", structure_counts(checkpoint)),
            check_second_reader(checkpoint),
            check_index(checkpoint, folder),
            check_bits(checkpoint),
            check_scales(checkpoint, shown),
            *_check_packed(checkpoint, contradictions, shown, deep=deep),
            _check_manifest(folder, manifest, manifest_problem, shown),
            *_check_signature(location, folder, trusted),
        ]
        recorded = 0
        if deep:
            check, digests = check_digests(checkpoint, manifest, shown, record=record)
            checks.append(check)
            if record and folder is not None and manifest is not None and not any(c.findings for c in checks):
                recorded = record_digests(folder, manifest, digests)
            if record and not recorded:
                why = "nothing recorded" if any(c.findings for c in checks) else "nothing to record"
                checks[-1] = replace(check, detail=f"{check.detail}; {why}")
        warnings = [*checkpoint.warnings, *(() if contradictions is None else contradictions.warnings)]
        if folder is not None and manifest is None and manifest_problem is None:
            warnings.append("there is no manifest, so file sizes and hashes could not be checked")
        if recorded and folder is not None and folder.has(SIGNATURE_NAME):
            (folder.root / SIGNATURE_NAME).unlink()
            warnings.append("the manifest has changed, so its signature has been removed: sign it again")
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


def _contradictions(checkpoint: Checkpoint) -> Contradictions | None:
    if checkpoint.format != "compressed-tensors":
        return None
    from espalier_format.operations.compressed_tensors_findings import (  # noqa: PLC0415 - only what is needed
        find_contradictions,
    )

    return find_contradictions(checkpoint)


def _check_packed(
    checkpoint: Checkpoint, contradictions: Contradictions | None, progress: Progress, *, deep: bool
) -> list[Check]:
    if contradictions is None:
        return []
    from espalier_format.operations.verify_packed import check_library, check_packed  # noqa: PLC0415 - as above

    checks = [contradictions.check(), check_packed(checkpoint, progress, deep=deep)]
    return [*checks, check_library(checkpoint, progress)] if deep else checks


def _check_signature(location: Path, folder: CheckpointFolder | None, trusted: TrustedKey | None) -> list[Check]:
    if trusted is None:
        return []
    manifest = signature = None
    if folder is not None and folder.has(MANIFEST_NAME):
        manifest = read_regular(folder.path_of(MANIFEST_NAME), MAX_JSON_BYTES)
    if folder is not None and folder.has(SIGNATURE_NAME):
        signature = read_regular(folder.path_of(SIGNATURE_NAME), MAX_JSON_BYTES)
    return [signature_check(manifest, signature, trusted, location)]


def structure_counts(checkpoint: Checkpoint) -> str:
    """Return how many modules, tensors and shards there are, in words."""
    counts = (
        (len(checkpoint.modules) + len(checkpoint.packed), "quantized module"),
        (len(checkpoint.tensors), "tensor"),
        (len(checkpoint.shards), "shard"),
    )
    return ", ".join(counted(number, noun) for number, noun in counts)


def _why_refused(error: EspalierError) -> str:
    return "contradicts itself" if isinstance(error, InconsistentError) else "refused"
