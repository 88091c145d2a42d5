"""Whether a source that has a manifest is complete, before it is converted or quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.container.names import MANIFEST_NAME
from espalier_format.errors import EspalierError

if TYPE_CHECKING:
    from espalier_format.container.folder import CheckpointFolder


def check_against_manifest(folder: CheckpointFolder) -> tuple[str, ...]:
    """Refuse a source that lacks a file of its manifest, or holds one of another size, and return warnings.

    Hashes are not compared: that takes as long as a conversion, and is what ``verify`` is for. A manifest that cannot
    be read is one of the warnings.

    Raises:
        DigestError: a file is missing, or has another size.
        PathError, MissingFileError: a listed name leads out of the folder, or nowhere.
    """
    if not folder.has(MANIFEST_NAME):
        return ()
    from espalier_format.operations.verify_files import check_sizes, read_manifest  # noqa: PLC0415 - only where used

    try:
        manifest = read_manifest(folder)
    except EspalierError as error:
        return (f"{error}; the sizes of the source's files have not been checked",)
    problems = {} if manifest is None else check_sizes(folder, manifest)
    for name in sorted(problems):
        raise _with_remedy(problems[name])
    return ()


def _with_remedy(error: EspalierError) -> EspalierError:
    """Return the error with what a person can do who has changed the folder on purpose."""
    message = f"{error.message}; if the folder was changed on purpose, delete {MANIFEST_NAME}"
    return type(error)(message, path=error.path, tensor=error.tensor, expected=error.expected, got=error.got)
