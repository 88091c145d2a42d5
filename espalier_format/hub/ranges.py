"""Reading parts of remote files: exactly the bytes asked for, in bounded time, whatever the server sends."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from espalier_format.errors import HubError, TruncatedError, UnreachableError
from espalier_format.hub.library import get_session, hf_raise_for_status, httpx

if TYPE_CHECKING:
    from espalier_format.hub.client import HubClient
    from espalier_format.hub.repository import RemoteFile, RemoteRepository

SLOWEST_RATE: Final = 50_000
"""Bytes per second that a transfer must reach on average, after the first `timeout` seconds."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(frozen=True, slots=True)
class RemoteReader:
    """Reads ranges of one file of a repository at its commit."""

    client: HubClient
    repository: RemoteRepository
    file: RemoteFile

    def read(self, start: int, length: int) -> bytes:
        """Return bytes [start, start + length) of the file, with one request unless it fails in passing.

        Not more than these bytes are taken from the network, also of a server that ignores ranges; redirects are
        followed, the token goes to the Hub only.

        Raises:
            HubError: refused, or the file is not as large as the Hub's records say.
            UnreachableError: the network fails, or is slower than `SLOWEST_RATE`.
        """
        if length == 0:
            return b""
        return self.client.patiently(self._label, lambda: self._request(start, length))

    @property
    def _label(self) -> str:
        return str(self.repository.address.root / self.file.name)

    def _request(self, start: int, length: int) -> bytes:
        url = self.client.url(self.repository.address.repo_id, self.file.name, self.repository.commit)
        # Compressed, a range would be one of the compressed bytes.
        headers = self.client.headers() | {
            "Range": f"bytes={start}-{start + length - 1}",
            "Accept-Encoding": "identity",
        }
        deadline = time.monotonic() + self.client.timeout + length / SLOWEST_RATE
        session = get_session()
        with session.stream(
            "GET", url, headers=headers, timeout=self.client.timeout, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            self._check(response, start, length)
            return self._take(response, length, deadline)

    def _check(self, response: Any, start: int, length: int) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HubError("the server compresses a part of the file", path=self._label)
        if response.status_code == 200 and start == 0:
            # Ranges are ignored: the first bytes of the whole file are the ones asked for.
            self._check_size(response.headers.get("content-length", str(self.file.size)))
            return
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code != 206 or match is None:
            raise HubError(f"the server does not send parts of files (HTTP {response.status_code})", path=self._label)
        self._check_size(match[3])
        first, last = int(match[1]), int(match[2])
        if (first, last) != (start, start + length - 1):
            raise HubError(
                "the server sends another part of the file than was asked for",
                path=self._label,
                expected=f"{start}-{start + length - 1}",
                got=f"{first}-{last}",
            )

    def _check_size(self, stated: str) -> None:
        if stated != str(self.file.size):
            text = "the file has another size than the Hub's records say"
            raise TruncatedError(text, path=self._label, expected=self.file.size, got=stated[:40])

    def _take(self, response: Any, length: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        missing = length
        for part in response.iter_raw():
            parts.append(part[:missing])
            missing -= len(parts[-1])
            if missing == 0:
                return b"".join(parts)  # leaving the stream closes the connection: the rest is never received
            if time.monotonic() > deadline:
                raise UnreachableError("the server sends too slowly", path=self._label)
        # As the HTTP library reports it where the length was announced; it may pass.
        raise httpx.RemoteProtocolError(f"the transfer ended after {length - missing} of {length} bytes")
