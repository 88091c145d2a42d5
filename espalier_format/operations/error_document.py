"""The JSON form of an error, the same for a command that fails and for a finding of ``verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier_format.errors import EspalierError


def error_document(error: EspalierError) -> dict[str, object]:
    """Return code, message, path, tensor, expected and got, with null where the error says nothing."""
    return {
        "code": error.code,
        "message": str(error),
        "path": error.path,
        "tensor": error.tensor,
        "expected": _plain(error.expected),
        "got": _plain(error.got),
    }


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
