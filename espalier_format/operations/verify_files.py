"""Checks of files against the manifest (spec/manifest.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.container.hashing import FileRecord, hash_file
from espalier_format.container.json_document import read_json
from espalier_format.container.names import MANIFEST_NAME
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
    return parse_manifest(read_json(folder.path_of(MANIFEST_NAME)), folder.root / MANIFEST_NAME)


def check_files(folder: CheckpointFolder, manifest: Manifest, progress: Progress) -> Check:
    """Compare size, SHA-256 and git blob SHA-1 of every listed file, and look for missing and extra files.

    A missing, extra or differing file is one ``DigestError`` finding. A file of the wrong size is not read.
    """
    problems = check_sizes(folder, manifest)

    def record(name: str, report: Callable[[int], object]) -> FileRecord | EspalierError:
        try:
            return hash_file(folder.path_of(name), report)
        except EspalierError as error:
            return error

    # The largest first, so that no thread is left alone with it at the end.
    to_hash = sorted(manifest.files.keys() - problems.keys(), key=lambda name: (-manifest.files[name].size, name))
    total = sum(manifest.files[name].size for name in to_hash)
    progress.start(total, "hashing files")
    for name, result in map_in_threads(record, to_hash, progress):
        problem = result if isinstance(result, EspalierError) else _compare(folder, name, manifest.files[name], result)
        if problem is not None:
            problems[name] = problem
    progress.finish()
    listed, wrong = len(manifest.files), len(manifest.files.keys() & problems.keys())
    detail = f"{wrong:,} of {listed:,} files wrong" if wrong else f"{listed:,} files, {total:,} bytes hashed"
    try:
        extra = set(folder.files()) - manifest.files.keys() - UNLISTED_FILES
    except EspalierError as error:  # a link that leads away, say; the listed files can be checked all the same
        if error.path not in {problem.path for problem in problems.values()}:
            problems[""] = error
    else:
        problems.update({name: _problem(folder, name, "the manifest does not list this file") for name in extra})
        detail += f"; {len(extra):,} not listed" if extra else ""
    return judged("manifest", detail, [problems[name] for name in sorted(problems)])


def check_sizes(folder: CheckpointFolder, manifest: Manifest) -> dict[str, EspalierError]:
    """Return what is wrong with listed files that can be told without reading them: missing, or of another size."""
    problems: dict[str, EspalierError] = {}
    for name, entry in manifest.files.items():
        try:
            size = folder.size(name) if folder.has(name) else None
        except EspalierError as error:
            problems[name] = error
            continue
        if size is None:
            problems[name] = _problem(folder, name, "the manifest lists this file, but it is not there")
        elif size != entry.size:
            problems[name] = _problem(folder, name, "size differs from the manifest", entry.size, size)
    return problems


def _compare(folder: CheckpointFolder, name: str, entry: FileEntry, found: FileRecord) -> EspalierError | None:
    if found.sha256 != entry.sha256:
        return _problem(folder, name, "SHA-256 differs from the manifest", entry.sha256, found.sha256)
    if entry.git_blob_sha1 is not None and found.git_blob_sha1 != entry.git_blob_sha1:
        text = "git blob SHA-1 differs from the manifest"
        return _problem(folder, name, text, entry.git_blob_sha1, found.git_blob_sha1)
    return None


def _problem(
    folder: CheckpointFolder, name: str, text: str, expected: object = None, got: object = None
) -> DigestError:
    return DigestError(text, path=folder.root / name, expected=expected, got=got)
