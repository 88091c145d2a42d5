"""Checks of files against the manifest (spec/manifest.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.files import MANIFEST_NAME
from espalier_format.container.hashing import FileRecord, hash_file
from espalier_format.container.json_document import read_json
from espalier_format.errors import DigestError, EspalierError
from espalier_format.operations.parallel import map_in_threads
from espalier_format.operations.verify_report import Check, judged
from espalier_format.schema.manifest import UNLISTED_FILES, FileEntry, Manifest, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.progress import Progress


def read_manifest(folder: CheckpointFolder) -> Manifest | None:
    """Return the manifest of a folder, None if it has none.

    Raises:
        FormatVersionError, SchemaError, PathError: as ``parse_manifest``.
        MalformedError, LimitError: it is no JSON within the limits.
    """
    if not folder.has(MANIFEST_NAME):
        return None
    return parse_manifest(read_json(folder.resolve(MANIFEST_NAME)), folder.root / MANIFEST_NAME)


def check_files(folder: CheckpointFolder, manifest: Manifest, progress: Progress) -> Check:
    """Compare size, SHA-256 and git blob SHA-1 of every listed file, and look for missing and extra files.

    A missing, extra or differing file is a ``DigestError`` finding each. A file of the wrong size is not read.
    """
    problems: dict[str, list[EspalierError]] = {}
    try:
        extra = set(folder.files()) - manifest.files.keys() - UNLISTED_FILES
    except EspalierError as error:  # a link that leads away, say; the listed files can be checked all the same
        problems[""] = [error]
        extra = set()
    to_hash: list[str] = []
    for name, entry in manifest.files.items():
        try:
            size = folder.resolve(name).stat().st_size if folder.has(name) else None
        except EspalierError as error:
            problems[name] = [error]
            continue
        if size is None:
            problems[name] = [_problem(folder, name, "the manifest lists this file, but it is not there")]
        elif size != entry.size:
            problems[name] = [_problem(folder, name, "another size than in the manifest", entry.size, size)]
        else:
            to_hash.append(name)
    for name in extra:
        problems[name] = [_problem(folder, name, "the manifest does not list this file")]

    def record(name: str, report: Callable[[int], object]) -> FileRecord | EspalierError:
        try:
            return hash_file(folder.resolve(name), report)
        except EspalierError as error:
            return error

    # The largest first, so that no thread is left alone with it at the end.
    to_hash.sort(key=lambda name: -manifest.files[name].size)
    total = sum(manifest.files[name].size for name in to_hash)
    progress.start(total, "hashing files")
    for name, result in map_in_threads(record, to_hash, progress):
        if isinstance(result, EspalierError):
            problems[name] = [result]
        else:
            problems[name] = _compare(folder, name, manifest.files[name], result)
    progress.finish()
    findings = [problem for name in sorted(problems) for problem in problems[name]]
    return judged("manifest", f"{len(manifest.files):,} files, {total:,} bytes hashed", findings)


def _compare(folder: CheckpointFolder, name: str, entry: FileEntry, found: FileRecord) -> list[EspalierError]:
    problems: list[EspalierError] = []
    if found.sha256 != entry.sha256:
        problems.append(_problem(folder, name, "another SHA-256 than in the manifest", entry.sha256, found.sha256))
    if entry.git_blob_sha1 is not None and found.git_blob_sha1 != entry.git_blob_sha1:
        text = "another git blob SHA-1 than in the manifest"
        problems.append(_problem(folder, name, text, entry.git_blob_sha1, found.git_blob_sha1))
    return problems


def _problem(
    folder: CheckpointFolder, name: str, text: str, expected: object = None, got: object = None
) -> DigestError:
    return DigestError(text, path=folder.root / name, expected=expected, got=got)
