"""The crash-safe, streaming writer of checkpoint folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from espalier_format.container.durable import tell_outcome, write_error
from espalier_format.container.finished_files import FinishedFiles
from espalier_format.container.folder import is_shard_name
from espalier_format.container.hashing import Buffer, FileHasher, FileRecord
from espalier_format.container.header import Header, serialise_header, tensor_bytes
from espalier_format.container.index import INDEX_NAME, Index
from espalier_format.container.names import MANIFEST_NAME, WORKSPACE_NAME
from espalier_format.container.pieces import batches, start_writeback, write_all
from espalier_format.container.planned_tensor import PlannedTensor, shard_bytes
from espalier_format.container.regular_file import open_regular, read_pieces
from espalier_format.container.shard import CHUNK_BYTES, Shard
from espalier_format.container.staging import Staging
from espalier_format.errors import EspalierError, UsageError, WriteError
from espalier_format.read_only import ReadOnlyDict

_QUEUED_BYTES: Final = 8 * CHUNK_BYTES  # that wait for the hashing thread
_OPEN_FILES: Final = 32  # that wait for the disk: a process may have 256 or 1024
_FLUSH_BYTES: Final = 8 * 1024 * 1024

_T = TypeVar("_T")


class CheckpointWriter:
    """Write a checkpoint folder; a context manager.

    Durability: until `finish` has put everything on disk, all files have temporary names inside the destination;
    config.json gets its name last. When an exception (KeyboardInterrupt too) leaves the `with` block, or `finish` was
    not called, the destination is as it was before. After a kill or power loss it holds no config.json unless it is
    complete; what is left then is in `.espalier-in-progress` and goes with the next run with `force`.

    With a `job`, shards and copied files that are complete stay there as well after an interruption or a failure to
    write, and a run with `resume` and the same job takes them over: it hashes them and writes only what is missing.

    Memory: a few pieces of 4 MiB. Each file is hashed while it is written, by a second thread; a third waits for the
    disk.
    """

    def __init__(
        self,
        destination: str | Path,
        *,
        force: bool = False,
        sources: Iterable[str | Path] = (),
        progress: Callable[[int], object] | None = None,
        workspace: str | None = None,
        resume: bool = False,
        job: Mapping[str, object] | None = None,
    ) -> None:
        """Check the destination; nothing is changed before the `with` block is entered.

        `sources` are the folders that are read from; `force` allows to replace an output of this program at commit
        time; `progress` is called with the number of bytes just written. `workspace` names a folder for intermediate
        results: what is in it survives an exception and a kill, and goes when the output is complete. With `resume`
        the one that an earlier run left behind is taken over; else it is emptied, for which `force` is needed. `job`
        states everything that decides about the content of shards and copied files (`take_over`).

        Raises:
            UsageError, OutputExistsError, WriteError: as `Staging`.
        """
        if str(destination) == "":
            raise UsageError('the path of the output is empty; the current folder is "."')
        self.destination = Path(destination)
        self._staging = Staging(
            self.destination,
            force=force,
            sources=[Path(source) for source in sources],
            workspace=WORKSPACE_NAME if job is not None and workspace is None else workspace,
            resume=resume,
        )
        self._job = job
        self._finished: FinishedFiles | None = None
        self._progress = progress
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="espalier-hash")
        # Apart from hashing: an fsync waits for the disk, and the next file can be hashed meanwhile.
        self._closing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="espalier-sync")
        self._queued: deque[tuple[Future[None], int]] = deque()
        self._queued_bytes = 0
        self._records: dict[str, Future[FileRecord]] = {}
        self._weight_map: dict[str, str] = {}
        self._tensor_bytes = 0
        self._open: dict[int, Path] = {}
        self._resumed = 0
        self._last: list[str] = []
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise UsageError("a writer can be used once", path=self.destination)
        self._state = "open"
        self._staging.open()
        if self._job is not None:
            try:
                self._finished = FinishedFiles(self.workspace, self._job)
            except BaseException as error:
                self._abort()
                tell_outcome(error, kept=self._staging.keeps_work)
                if isinstance(error, OSError) and not isinstance(error, EspalierError):
                    raise write_error(error, self.destination, kept=self._staging.keeps_work) from error
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "finished":
            # What the source or the options made impossible is so again in the next run.
            self._abort(keep=not isinstance(error, EspalierError) or isinstance(error, WriteError))
            tell_outcome(error, kept=self._staging.keeps_work)

    @property
    def resumed(self) -> int:
        """How many files were taken over from an earlier run."""
        return self._resumed

    @property
    def workspace(self) -> Path:
        """The folder for intermediate results; UsageError for a writer that has none."""
        if self._staging.workspace is None:
            raise UsageError("this writer has no workspace", path=self.destination)
        return self._staging.workspace

    @property
    def records(self) -> Mapping[str, FileRecord]:
        """Size and hashes of all files added so far; waits for the threads."""
        return ReadOnlyDict({name: self._result(record, name) for name, record in self._records.items()})

    def add_shard(
        self,
        name: str,
        tensors: Iterable[PlannedTensor],
        metadata: Mapping[str, str] | None = None,
        *,
        pad: bool = True,
    ) -> None:
        """Write a safetensors file: the header first, then the tensors in the given order.

        Raises:
            PathError: unsafe name.
            LimitError, MalformedError, DtypeError: as `serialise_header`.
            ShapeError: a tensor gave another number of bytes than its shape says.
            WriteError: the operating system refuses.
            EspalierError: whatever `chunks` raises passes through.
        """
        planned = list(tensors)
        header = serialise_header(((item.name, item.dtype, item.shape) for item in planned), metadata, pad=pad)
        sizes = [tensor_bytes(item.dtype, item.shape) for item in planned]
        plan = hashlib.sha256(header).hexdigest()
        self._write(name, len(header) + sum(sizes), shard_bytes(header, planned, sizes), plan)
        self._list(name, (item.name for item in planned), sum(sizes))

    def add_copy(self, name: str, source: Path, *, header: Header | None = None) -> None:
        """Copy a file byte for byte, without its mode.

        The tensors of a top-level *.safetensors file enter the index; give its `header` where it is known.

        Raises:
            PathError: unsafe name.
            TruncatedError: the source shrank meanwhile.
            WriteError: the operating system refuses to write.
            MissingFileError, MalformedError, SourceError: the source cannot be read; as `Shard` for shards.
        """
        if header is None and is_shard_name(name):
            with Shard(source) as shard:
                header = shard.header
        file, size = open_regular(source)
        with file:
            self._write(name, size, read_pieces(file.fileno(), 0, size, CHUNK_BYTES, source), f"copy of {size} bytes")
        if header is not None:
            self._list(name, header.tensors, header.file_size - header.data_start)

    def add_bytes(self, name: str, data: bytes, *, last: bool = False) -> None:
        """Write a small file. `last`: rename it after the index, just before config.json.

        Raises:
            PathError: unsafe name.
            WriteError: the operating system refuses.
        """
        self._write(name, len(data), iter((data,)))
        if last:
            self._last.append(name)

    def finish(
        self,
        *,
        index: bool | bytes = False,
        manifest: Callable[[Mapping[str, FileRecord]], bytes] | None = None,
    ) -> Mapping[str, FileRecord]:
        """Put everything on disk and give all files their names; return the records of all files.

        `index`: True writes an index of all shards added, bytes are written as the index. `manifest` gets the records
        of all other files and returns the content of espalier_manifest.json.

        Raises:
            WriteError: the operating system refuses; the destination is as before.
        """
        if self._state != "open":
            raise UsageError("finish() belongs in the with block of the writer, once", path=self.destination)
        if index is True:
            built = Index(dict(sorted(self._weight_map.items())), {"total_size": self._tensor_bytes})
            self.add_bytes(INDEX_NAME, built.dumps())
        elif index is not False:
            self.add_bytes(INDEX_NAME, index)
        if manifest is not None:
            self.add_bytes(MANIFEST_NAME, manifest(self.records))
        records = self.records
        self._staging.commit(self._last)
        self._state = "finished"
        self._hashing.shutdown()
        self._closing.shutdown()
        return records

    def _write(self, name: str, size: int, chunks: Iterator[Buffer], plan: str | None = None) -> None:
        """Write a file; `plan` tells what is in it, of one that a later run may take over."""
        if self._state != "open":
            raise UsageError("a writer writes within its with block only", path=self.destination)
        finished = None if plan is None else self._finished
        path = self._staging.file(name, None if finished is None else finished.path(name))
        if finished is not None and plan is not None and self._take_over(finished, name, plan):
            return
        if len(self._open) >= _OPEN_FILES:
            newest = next(reversed(self._records))
            self._result(self._records[newest], newest)  # they are closed in order
        # Anything that goes wrong below leaves an incomplete file, after which finish() must not succeed.
        self._state = "failed"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._write_error(error, name) from error
        self._open[descriptor] = path
        hasher = FileHasher(size)
        position = flushed = 0
        for batch, count in batches(chunks):
            self._submit(hasher, batch, count, name)
            try:
                write_all(descriptor, batch)
                position += count
                if position - flushed >= _FLUSH_BYTES:
                    start_writeback(descriptor, flushed, position - flushed)
                    flushed = position
            except OSError as error:
                raise self._write_error(error, name) from error
            if self._progress is not None:
                self._progress(count)
        record = self._hashing.submit(hasher.record)
        note = None if finished is None or plan is None else partial(finished.add, name, plan)
        self._records[name] = self._closing.submit(self._close, descriptor, record, note)
        self._state = "open"

    def _take_over(self, finished: FinishedFiles, name: str, plan: str) -> bool:
        try:
            found = finished.find(name, plan, self._progress)
        except OSError as error:
            raise self._write_error(error, name) from error
        if found is None:
            return False
        self._records[name] = Future()
        self._records[name].set_result(found)
        self._resumed += 1
        return True

    def _write_error(self, error: OSError, name: str) -> WriteError:
        return write_error(error, self.destination / name, kept=self._finished is not None)

    def _submit(self, hasher: FileHasher, batch: list[Buffer], count: int, name: str) -> None:
        while self._queued and self._queued_bytes + count > _QUEUED_BYTES:
            future, done = self._queued.popleft()
            self._result(future, name)
            self._queued_bytes -= done
        self._queued.append((self._hashing.submit(_hash, hasher, batch), count))
        self._queued_bytes += count

    def _result(self, future: Future[_T], name: str) -> _T:
        try:
            return future.result()
        except OSError as error:
            raise self._write_error(error, name) from error

    def _close(
        self, descriptor: int, record: Future[FileRecord], note: Callable[[FileRecord], None] | None
    ) -> FileRecord:
        os.fsync(descriptor)
        # First: once it is closed, the other thread may open another file under the same number.
        del self._open[descriptor]
        os.close(descriptor)
        result = record.result()
        if note is not None:
            note(result)
        return result

    def _list(self, name: str, tensors: Iterable[str], size: int) -> None:
        if not is_shard_name(name):
            return
        for tensor in tensors:
            if tensor in self._weight_map:
                self._state = "failed"
                text = f"is in two shards of one output, {self._weight_map[tensor]} and {name}"
                raise UsageError(text, path=self.destination, tensor=tensor)
            self._weight_map[tensor] = name
        self._tensor_bytes += size

    def _abort(self, *, keep: bool = False) -> None:
        self._state = "aborted"
        # What is written already is worth the moment that it takes to finish it.
        drop = self._finished is None or not keep
        self._hashing.shutdown(cancel_futures=drop)
        self._closing.shutdown(cancel_futures=drop)
        for descriptor in self._open:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open.clear()
        if self._finished is not None:
            self._finished.leave(keep=keep)
        self._staging.abort()


def _hash(hasher: FileHasher, batch: list[Buffer]) -> None:
    for piece in batch:
        hasher.update(piece)
