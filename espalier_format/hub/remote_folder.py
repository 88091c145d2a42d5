"""A repository on the Hub as a checkpoint folder: JSON files whole, of shards the headers, of tensors nothing."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, cast

from espalier_format.container.folder import CheckpointFolder, is_shard_name
from espalier_format.container.header import TensorInfo, read_header
from espalier_format.container.json_document import parse_json
from espalier_format.container.shard import CHUNK_BYTES, Shard
from espalier_format.errors import LimitError, MissingFileError, SchemaError, SourceError
from espalier_format.hub.ranges import RemoteReader
from espalier_format.limits import MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from espalier_format.hub.client import HubClient
    from espalier_format.hub.repository import RemoteFile, RemoteRepository

MAX_THREADS: Final = 8
"""How many shard headers are read at a time."""


class RemoteFolder(CheckpointFolder):
    """The files of a repository at one commit. Nothing is written to this machine.

    ``open_shards`` reads all headers, in parallel, with two requests per shard: the length of the header, and the
    header. Not a byte of a tensor is fetched. JSON files are fetched once and kept.
    """

    __slots__ = ("_client", "_kept", "repository")

    def __init__(self, client: HubClient, repository: RemoteRepository) -> None:
        self.root = repository.address.root
        self.repository = repository
        self._client = client
        self._kept: dict[str, bytes] = {}

    def files(self) -> list[str]:
        """Return the names of all files, sorted, but those in hidden folders."""
        return [name for name in self.repository.files if not any(part[0] == "." for part in name.split("/")[:-1])]

    @property
    def unfinished(self) -> bool:
        """Whether a writer was at work here: no, a repository holds what was committed."""
        return False

    def shard_names(self) -> list[str]:
        """Return the names of everything called *.safetensors at the top level, sorted."""
        return [name for name in self.repository.files if is_shard_name(name)]

    def has(self, name: str) -> bool:
        """Tell whether the repository has a file of that name."""
        return name in self.repository.files

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, as the Hub records it.

        Raises:
            MissingFileError: there is no such file.
        """
        return self._file(name).size

    def resolve(self, name: str) -> Path:
        """Refuse: a remote file has no path.

        Raises:
            SourceError: always.
        """
        raise SourceError("is on the Hub, not on this machine", path=self.root / name)

    def read_bytes(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """Return the content of a file of at most ``limit`` bytes, fetched with one request when first asked for.

        Raises:
            MissingFileError: there is no such file.
            LimitError: it is larger; nothing is fetched.
            HubError, UnreachableError, TruncatedError: as ``RemoteReader.read``.
        """
        file = self._file(name)
        if file.size > limit:
            expected = f"at most {limit} bytes"
            raise LimitError("file is too large", path=self.root / name, expected=expected, got=file.size)
        if name not in self._kept:
            self._kept[name] = RemoteReader(self._client, self.repository, file).read(0, file.size)
        return self._kept[name]

    def read_json_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, within the limits of spec/errors.md §5.

        Raises:
            SchemaError: the document is something else.
            MalformedError, LimitError: it is no JSON, or exceeds a limit.
            MissingFileError, HubError, UnreachableError, TruncatedError: as ``read_bytes``.
        """
        path = self.root / name
        document = parse_json(self.read_bytes(name), path=path)
        if not isinstance(document, dict):
            raise SchemaError("must hold a JSON object", path=path, got=type(document).__name__)
        return document

    def open_shards(self) -> tuple[Shard, ...]:
        """Read the headers of all shards, at most ``MAX_THREADS`` at a time; the first refusal in name order counts.

        Raises:
            HubError, UnreachableError: as ``RemoteReader.read``.
            TruncatedError, LimitError, MalformedError, DtypeError, ShapeError, OverlapError: as ``read_header``.
        """
        names = self.shard_names()
        pool = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="espalier-hub")
        try:
            return tuple(pool.map(self._shard, names))
        finally:
            pool.shutdown(cancel_futures=True)

    def _shard(self, name: str) -> Shard:
        return RemoteShard(RemoteReader(self._client, self.repository, self._file(name)), self.root / name)

    def _file(self, name: str) -> RemoteFile:
        if name not in self.repository.files:
            raise MissingFileError("is not in the repository", path=self.root / name)
        return self.repository.files[name]


class RemoteShard(Shard):
    """A shard of which the header is known, and nothing else."""

    __slots__ = ()

    def __init__(self, reader: RemoteReader, path: Path) -> None:
        self.path = path
        self.name = reader.file.name
        # Not a real file, but all that read_header uses of one: it compares sizes and limits before it reads on.
        file = cast("BinaryIO", _Beginning(reader))
        self.header = read_header(file, reader.file.size, path)

    @property
    def has_data(self) -> bool:
        """Whether tensors can be read: no."""
        return False

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def bytes_of(self, info: TensorInfo) -> memoryview:
        """Refuse; errors as ``chunks``."""
        self._refuse(info.name)

    def chunks(self, start: int, end: int, size: int = CHUNK_BYTES) -> Iterator[bytes]:  # noqa: ARG002 - as Shard
        """Refuse.

        Raises:
            SourceError: always.
        """
        self._refuse(None)

    def _refuse(self, tensor: str | None) -> NoReturn:
        text = "the tensors of a repository are not read from afar; download it"
        raise SourceError(text, path=self.path, tensor=tensor)


class _Beginning(io.RawIOBase):
    """A remote file that is read from its beginning: each ``read`` is one request, for exactly these bytes."""

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes."""
        data = self._reader.read(self._position, size)
        self._position += size
        return data
