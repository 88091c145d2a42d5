"""The signature check of ``verify``, the same for a folder and for a repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.container.names import MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import DependencyError, EspalierError, SignatureError, UsageError
from espalier_format.operations.verify_report import Check, judged

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.hub.signing import TrustedKey


def signature_check(manifest: bytes | None, signature: bytes | None, trusted: TrustedKey, root: Path) -> Check:
    """Check the signature of a manifest; either is None where it is missing, which is a ``SignatureError`` finding.

    Raises:
        UsageError, DependencyError: as ``check_signature``.
    """
    from espalier_format.hub.signing import check_signature  # noqa: PLC0415 - only where it is asked for

    path = root / SIGNATURE_NAME
    if manifest is None:
        return judged("signature", "missing", [SignatureError(f"there is no {MANIFEST_NAME} to be signed", path=root)])
    if signature is None:
        return judged("signature", "missing", [SignatureError("the manifest is not signed", path=path)])
    try:
        check_signature(manifest, signature, trusted, path)
    except (UsageError, DependencyError):
        raise
    except EspalierError as error:
        return judged("signature", "not by the given key", [error])
    return judged("signature", "of the manifest, by the given key", [])
