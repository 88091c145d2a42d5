"""A Hub on loopback: what of the Hub's HTTP interface the package and huggingface_hub use, with faults on request.

Two servers on ports of their own: the Hub itself, and the host that large files are stored on and redirected to.
Every request is logged. Nothing here is from the package or from huggingface_hub.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_SecretOfTheTestsDoNotPrint"
SIGNED_QUERY = "X-Amz-Signature=c2lnbmVkU2VjcmV0"
LFS_BYTES = 10 * 1024 * 1024
GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class Request:
    """One request as it came in, and how many bytes of a body went out."""

    host: str
    method: str
    path: str
    query: str
    range: tuple[int, int] | None
    authorized: bool
    headers: dict[str, str]
    body: bytes = b""
    sent: list[int] = field(default_factory=lambda: [0])


@dataclass
class Fault:
    """What to do instead with the next ``times`` requests that match ``method`` and ``path`` (a regular expression)."""

    path: str
    action: Callable[[Handler], bool]
    method: str = "GET"
    times: int = 1
    host: str = "hub"
    skip: int = 0


@dataclass
class Repo:
    """Commits (name → content), branches and pull requests (name → commit), what is stored as large files."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    merged: list[int] = field(default_factory=list)
    history: list[tuple[str, str, str]] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        digest = hashlib.sha1(f"{branch} {len(self.commits)} {message}".encode())
        for name in sorted(files):
            digest.update(name.encode() + hashlib.sha256(files[name]).digest())
        sha = digest.hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        self.history.append((branch, sha, message))
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def head(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


class HubServer:
    """Both servers; use as a context manager. ``endpoint`` is what HF_ENDPOINT would be."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.redirect_large = True
        self._servers = [self._start("hub"), self._start("cdn")]
        hub, cdn = (server.server_address[1] for server in self._servers)
        # Another host by name and port: older clients tell hosts apart by the name alone.
        self.endpoint, self.cdn = f"http://127.0.0.1:{hub}", f"http://localhost:{cdn}"

    def _start(self, host: str) -> ThreadingHTTPServer:
        server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self, "host": host}))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo_id: str, source: Path | dict[str, bytes], **options: Any) -> Repo:
        """Make a repository with the files of a folder."""
        files = source if isinstance(source, dict) else folder_files(source)
        repo = self.repos[repo_id] = Repo(**options)
        repo.large |= {name for name, data in files.items() if is_large(name, len(data))}
        repo.commit("main", files | {".gitattributes": GIT_ATTRIBUTES}, "initial commit")
        return repo

    def of(self, method: str, pattern: str, host: str | None = None) -> list[Request]:
        """Return the logged requests that match."""
        return [
            request
            for request in self.requests
            if request.method == method and re.search(pattern, request.path) and host in (None, request.host)
        ]


def folder_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def is_large(name: str, size: int) -> bool:
    return name.endswith(".safetensors") or size > LFS_BYTES


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients hang up on purpose here."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection, of either host."""

    hub: HubServer
    host: str
    protocol_version = "HTTP/1.1"
    timeout = 60
    entry: Request

    def log_message(self, *_: object) -> None:
        """Log nothing on stderr."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - the names that http.server calls

    def _answer(self) -> None:
        url = urlsplit(self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        self.entry = Request(
            self.host,
            self.command,
            unquote(url.path),
            url.query,
            (int(wanted[1]), int(wanted[2])) if wanted else None,
            "Authorization" in self.headers,
            dict(self.headers),
            body,
        )
        with self.hub.lock:
            self.hub.requests.append(self.entry)
            fault = self._fault()
        if fault is not None and fault.action(self):
            return
        if self.host == "cdn":
            self._storage(url.path)
        elif url.path.startswith("/api/"):
            self._api(url.path, parse_qs(url.query))
        elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]))
        elif match := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", url.path):
            self._batch(match[1])
        else:
            self.error(404, "EntryNotFound")

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _fault(self) -> Fault | None:
        for fault in self.hub.faults:
            matches = fault.method == self.command and fault.host == self.host
            if fault.times and matches and re.search(fault.path, self.entry.path):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    # What is sent

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.entry.sent[0] += len(body)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

    def json(self, document: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": message or code}).encode()
        extra = {"X-Error-Code": code, "X-Error-Message": message or code, "Content-Type": "application/json"}
        self.reply(status, body, {**extra, **(headers or {})})

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    # What is asked for

    def _repo(self, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            self.error(404 if allowed else 401, "RepoNotFound", "Repository not found")
            return None
        if repo.gated and not allowed:
            self.error(403, "GatedRepo", "Access to this model is restricted")
            return None
        if self.command == "POST" and not allowed and "/paths-info/" not in self.path:
            self.error(403, "", "Forbidden: you need write access")
            return None
        return repo

    def content(self, data: bytes, about: dict[str, str] | None = None) -> None:
        """Send a file, or the range of it that was asked for."""
        if self.entry.range is None:
            self.reply(200, data, {"Accept-Ranges": "bytes", **(about or {})})
            return
        first, last = self.entry.range
        last = min(last, len(data) - 1)
        if first > last:
            self.reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self.reply(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}", **(about or {})})

    def stored_content(self) -> bytes:
        """Return the file that the request is for, of either host."""
        if self.host == "cdn":
            return self.hub.stored[self.entry.path.rpartition("/")[2]]
        match = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", self.entry.path)
        assert match is not None
        repo = self.hub.repos[match[1]]
        sha = repo.resolve(match[2])
        assert sha is not None
        return repo.commits[sha][match[3]]

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        repo = self._repo(repo_id)
        if repo is None:
            return
        sha = repo.resolve(revision)
        if sha is None:
            self.error(404, "RevisionNotFound")
        elif name not in repo.commits[sha]:
            self.error(404, "EntryNotFound")
        elif name in repo.large and self.hub.redirect_large:
            data = repo.commits[sha][name]
            oid = hashlib.sha256(data).hexdigest()
            self.hub.stored[oid] = data
            about = {"X-Repo-Commit": sha, "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
            self.reply(302, b"", {"Location": f"{self.hub.cdn}/store/{oid}?{SIGNED_QUERY}", **about})
        else:
            data = repo.commits[sha][name]
            self.content(data, {"X-Repo-Commit": sha, "ETag": f'"{git_blob(data)}"'})

    def _storage(self, path: str) -> None:
        match = re.fullmatch(r"/store/([0-9a-f]{64})", path)
        if match is None:
            self.error(404)
        elif self.command == "PUT":
            data = self.entry.body
            if hashlib.sha256(data).hexdigest() != match[1]:
                self.error(400, "", "the content has another hash")
                return
            self.hub.stored[match[1]] = data
            self.reply(200)
        else:
            self.content(self.hub.stored[match[1]])

    def _batch(self, repo_id: str) -> None:
        if self._repo(repo_id) is None:
            return
        objects = []
        for wanted in json.loads(self.entry.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.stored:
                answer["actions"] = {"upload": {"href": f"{self.hub.cdn}/store/{wanted['oid']}?{SIGNED_QUERY}"}}
            objects.append(answer)
        self.json({"transfer": "basic", "objects": objects})

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/api/repos/create":
            self._create()
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([a-z-]+)/([^/]+)(?:/([a-z]+))?)?", path):
            repo_id, what, argument, more = match[1], match[2], unquote(match[3] or "main"), match[4]
            repo = self._repo(repo_id)
            if repo is None:
                return
            if what in (None, "revision"):
                self._info(repo, repo_id, argument)
            elif what == "tree":
                self._tree(repo, argument)
            elif what == "preupload":
                self._preupload(repo, argument)
            elif what == "commit":
                self._commit(repo, repo_id, argument, create_pr="create_pr" in query)
            elif what == "branch":
                repo.branches[argument] = repo.branches["main"]
                self.json({})
            elif what == "discussions" and more == "merge":
                repo.merged.append(int(argument))
                repo.commit("main", repo.head(f"refs/pr/{argument}"), f"merge of {argument}")
                self.json({})
            else:
                self.error(404)
        else:
            self.error(404)

    def _create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.error(401, "", "Invalid username or password.")
            return
        wanted = json.loads(self.entry.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        if repo_id in self.hub.repos:
            self.error(409, "", "You already created this model repo")
            return
        self.hub.add(repo_id, {}, private=wanted.get("visibility") == "private")
        self.json({"url": f"{self.hub.endpoint}/{repo_id}"})

    def _info(self, repo: Repo, repo_id: str, revision: str) -> None:
        sha = repo.resolve(revision)
        if sha is None:
            self.error(404, "RevisionNotFound")
            return
        siblings = []
        for name, data in sorted(repo.commits[sha].items()):
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_blob(data)}
            if name in repo.large:
                pointer = b"version https://git-lfs.github.com/spec/v1\n" + hashlib.sha256(data).hexdigest().encode()
                sibling["blobId"] = git_blob(pointer)
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        self.json({"id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str) -> None:
        sha = repo.resolve(revision)
        entries = []
        for name, data in sorted(repo.commits[sha or ""].items()):
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_blob(data)}
            if name in repo.large:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        self.json(entries)

    def _preupload(self, repo: Repo, revision: str) -> None:
        sha = repo.resolve(revision)
        if sha is None:
            self.error(404, "RevisionNotFound")
            return
        answers = []
        for file in json.loads(self.entry.body)["files"]:
            name, large = file["path"], is_large(file["path"], file["size"])
            known = repo.commits[sha].get(name)
            oid = None if known is None else (hashlib.sha256(known).hexdigest() if large else git_blob(known))
            mode = "lfs" if large else "regular"
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.json({"files": answers})

    def _commit(self, repo: Repo, repo_id: str, revision: str, *, create_pr: bool) -> None:
        with self.hub.lock:
            lines = [json.loads(line) for line in self.entry.body.splitlines()]
            header = lines[0]["value"]
            parent = repo.resolve(revision)
            if parent is None:
                self.error(404, "RevisionNotFound")
                return
            if not create_pr and header.get("parentCommit") not in (None, parent):
                self.error(412, "", "A commit has happened since. Please refresh and try again.")
                return
            files = dict(repo.commits[parent])
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
                else:
                    files[value["path"]] = self.hub.stored[value["oid"]]
                    repo.large.add(value["path"])
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
            branch = f"refs/pr/{number}" if create_pr else revision
            sha = repo.commit(branch, files, header["summary"])
        self.json(
            {
                "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}",
                "commitOid": sha,
                "pullRequestUrl": f"{self.hub.endpoint}/{repo_id}/discussions/{number}" if create_pr else None,
            }
        )


# Faults


def status(code: int, error_code: str = "", message: str = "", headers: dict[str, str] | None = None) -> Any:
    """Answer with an error."""

    def act(handler: Handler) -> bool:
        handler.error(code, error_code, message, headers)
        return True

    return act


def hang_up(handler: Handler) -> bool:
    """Close the connection without an answer."""
    handler.hang_up()
    return True


def cut_after(count: int, *, honest_length: bool = True) -> Any:
    """Announce a whole part of a file, send ``count`` bytes of it and hang up."""

    def act(handler: Handler) -> bool:
        size = len(handler.stored_content())
        first, last = handler.entry.range or (0, size - 1)
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        if honest_length:
            handler.send_header("Content-Length", str(last - first + 1))
        else:
            handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"x" * count)
        handler.hang_up()
        return True

    return act


def after_done(handler: Handler) -> bool:
    """Do what is asked, but lose the answer."""
    real = handler.wfile
    handler.wfile = open("/dev/null", "wb")  # noqa: SIM115, PTH123
    try:
        path = urlsplit(handler.path)
        handler._api(path.path, parse_qs(path.query))
    finally:
        handler.wfile.close()
        handler.wfile = real
    handler.hang_up()
    return True


def body(change: Callable[[bytes], bytes]) -> Any:
    """Answer a request for a file with changed content, ranges as asked for."""

    def act(handler: Handler) -> bool:
        handler.content(change(handler.stored_content()))
        return True

    return act


def slowly(piece: int, pause: float) -> Any:
    """Send ``piece`` bytes, wait, and so on."""

    def act(handler: Handler) -> bool:
        data = handler.stored_content()
        first, last = handler.entry.range or (0, len(data) - 1)
        data, total = data[first : last + 1], len(data)
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            for start in range(0, len(data), piece):
                handler.wfile.write(data[start : start + piece])
                handler.wfile.flush()
                time.sleep(pause)
        handler.close_connection = True
        return True

    return act


def whole_file(handler: Handler) -> bool:
    """Ignore the range: send the whole file with status 200."""
    data = handler.stored_content()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    with contextlib.suppress(OSError):
        for start in range(0, len(data), 65536):
            handler.wfile.write(data[start : start + 65536])
            handler.entry.sent[0] += 65536
    handler.close_connection = True
    return True
