"""How this package talks to the Hub: huggingface_hub's own session, headers and tokens, with bounded waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, TypeVar

from huggingface_hub import HfApi, hf_hub_url

from espalier_format.hub.failures import Retry, translate
from espalier_format.hub.library import build_hf_headers

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY: Final = "espalier-format"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubClient:
    """Where the Hub is, who asks, and how long to be patient.

    ``endpoint`` None means HF_ENDPOINT or huggingface.co, ``token`` None the one that huggingface_hub finds
    (HF_TOKEN, or what ``hf auth login`` stored), False none. A request that fails in passing (network, 429, 5xx) is
    tried ``attempts`` times in all; the pauses double from ``first_pause`` seconds on. A ``Retry-After`` is obeyed
    up to ``longest_pause`` seconds; what asks for more is given up. ``timeout`` bounds each wait for the network.
    """

    endpoint: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    attempts: int = 4
    first_pause: float = 0.5
    longest_pause: float = 60.0
    timeout: float = 20.0

    def api(self) -> HfApi:
        """Return huggingface_hub's API for this endpoint and token."""
        return HfApi(endpoint=self.endpoint, token=self.token, library_name=_LIBRARY, library_version=version(_LIBRARY))

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for a file. They hold the token: never show or log them."""
        headers: dict[str, str] = build_hf_headers(
            token=self.token, library_name=_LIBRARY, library_version=version(_LIBRARY)
        )
        return headers

    def url(self, repo_id: str, name: str, commit: str) -> str:
        """Return where a file of a repository is."""
        return hf_hub_url(repo_id, name, revision=commit, endpoint=self.endpoint)

    def patiently(self, subject: object, request: Callable[[], T], *, repeat: bool = True) -> T:
        """Return the result of ``request``, repeated after failures that pass.

        ``subject`` names what is asked for, in messages. With ``repeat`` False, for a request that must not
        be sent twice, the first failure counts.

        Raises:
            HubError: the Hub refuses; UnreachableError: it cannot be reached.
        """
        pause = self.first_pause
        attempts = self.attempts if repeat else 1
        for attempt in range(1, attempts + 1):
            try:
                return request()
            except Exception as error:
                failure = translate(error, subject, self.token)
                if failure is error:
                    raise
                if not isinstance(failure, Retry):
                    raise failure from None
                wait = pause if failure.after is None else failure.after
                if attempt == attempts or wait > self.longest_pause:
                    raise failure.error from None
            time.sleep(wait)
            pause *= 2
        raise AssertionError  # the last attempt returns or raises
