"""What went wrong with a request to the Hub, as an error of this library: one line, no token, no signed URL."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from espalier_format.errors import EspalierError, HubError, UnreachableError
from espalier_format.hub.library import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{6,}\b|(?<=Bearer )\S+")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]*")
_LONGEST_MESSAGE: Final = 300


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure that may pass: ask again ``after`` seconds (None: the server did not say); else it is ``error``."""

    error: HubError | UnreachableError
    after: float | None = None


def translate(error: Exception, subject: object, token: str | bool | None = None) -> Exception | Retry:
    """Return what to raise for an exception of a request, or that it may be repeated.

    An exception that is none of huggingface_hub's and of its HTTP library's is returned as it is.
    """
    if isinstance(error, EspalierError):
        return error
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        # huggingface_hub wraps the failure of one upload among several.
        return translate(error.__cause__, subject, token)
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError("HF_HUB_OFFLINE is set, and this needs the Hub", path=str(subject))
    if isinstance(error, HFValidationError):
        return HubError("this is no valid repository name", path=str(subject))
    if isinstance(error, GatedRepoError):
        return _refused(
            "is gated: accept its conditions on its page, and log in with `hf auth login`", error, subject, token
        )
    if isinstance(error, RevisionNotFoundError):
        return _refused("has no such revision", error, subject, token)
    if isinstance(error, RepositoryNotFoundError):
        text = "there is no such repository, or it is private and the token (HF_TOKEN, `hf auth login`) may not see it"
        return _refused(text, error, subject, token)
    if isinstance(error, HfHubHTTPError):
        return _by_status(error, subject, token)
    if isinstance(error, httpx.HTTPError):
        kind = "does not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        detail = redact(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, token)
        failure = UnreachableError(f"the Hub {kind} ({detail})", path=str(subject))
        # A host that does not even accept a connection in time will not soon.
        return failure if isinstance(error, httpx.ConnectTimeout) else Retry(failure)
    if isinstance(error, json.JSONDecodeError):
        return HubError("the Hub's answer is no JSON", path=str(subject))
    if isinstance(error, (ValueError, RuntimeError)):
        # Metadata that the Hub rejects, answers that huggingface_hub does not accept, failures of the Xet protocol.
        return HubError(f"refused: {redact(str(error), token)}", path=str(subject))
    return error


def redact(text: str, token: str | bool | None = None) -> str:
    """Return `text` without tokens and without the queries of URLs, which may be signed; cut if it is very long."""
    for secret in (token, get_token()):
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "<token>")
    text = " ".join(_QUERY.sub(r"\1?…", _TOKEN.sub("<token>", text)).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def _by_status(error: Any, subject: object, token: str | bool | None) -> Exception | Retry:
    response = error.response
    status = 0 if response is None else response.status_code
    if status == 401:
        return _refused("the Hub does not accept the token (HF_TOKEN, `hf auth login`)", error, subject, token)
    if status == 403:
        return _refused("the token may not do this", error, subject, token)
    if status == 404:
        return _refused("is not there", error, subject, token)
    if status == 412:
        return _refused(
            "was changed by somebody else meanwhile; look at it, then run this again", error, subject, token
        )
    if status == 429:
        after = retry_after(response.headers)
        hint = "" if after is None else f"; it asks to wait {after:g} s"
        return Retry(_refused(f"too many requests{hint}", error, subject, token), after)
    if status in _PASSING:
        down = _refused("the Hub is out of order", error, subject, token, UnreachableError)
        return Retry(down, retry_after(response.headers))
    return _refused("the Hub refuses", error, subject, token)


def _refused(
    text: str,
    error: Any,
    subject: object,
    token: str | bool | None,
    kind: type[HubError | UnreachableError] = HubError,
) -> HubError | UnreachableError:
    response = error.response
    status = None if response is None else response.status_code
    said = redact(getattr(error, "server_message", None) or "", token)
    detail = f"HTTP {status}" + (f": {said}" if said else "")
    return kind(f"{text} ({detail})", path=str(subject))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header; a date, which the Hub does not send, counts as none."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else None
