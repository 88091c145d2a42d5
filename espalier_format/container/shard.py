"""One safetensors file, opened lazily: the header is validated, tensor data is mapped or read when asked for."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from espalier_format.container.header import Header, TensorInfo, read_header
from espalier_format.container.regular_file import open_regular, read_pieces, refusal
from espalier_format.errors import ShapeError, TruncatedError, UsageError

CHUNK_BYTES: Final = 4 * 1024 * 1024

# BF16 and the 8-bit floats have no numpy type: their bit patterns are given. Narrower ones come as bytes.
_NUMPY_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "F8_E5M2": "u1",
        "F8_E4M3": "u1",
        "F8_E8M0": "u1",
        "F8_E4M3FNUZ": "u1",
        "F8_E5M2FNUZ": "u1",
        "I16": "<i2",
        "U16": "<u2",
        "F16": "<f2",
        "BF16": "<u2",
        "I32": "<i4",
        "U32": "<u4",
        "F32": "<f4",
        "C64": "<c8",
        "F64": "<f8",
        "I64": "<i8",
        "U64": "<u8",
    }.items()
}


class Shard:
    """A validated safetensors file and its data, read-only.

    Opening reads the header only. `bytes_of` and `array` map the file into memory on first use; `read` and `chunks`
    read it without mapping, so that a file cut short meanwhile is an error and never a crash. Reading from several
    threads is safe; closing while another thread reads is not.
    """

    __slots__ = ("_file", "_map", "header", "name", "path")

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Open `path`; `name` is its name in the checkpoint (by default the last part of the path).

        Raises:
            MissingFileError, MalformedError, SourceError, PathError: as `open_regular`.
            TruncatedError, LimitError, DtypeError, ShapeError, OverlapError: as `read_header`.
        """
        self.path = path
        self.name = path.name if name is None else name
        self._map: mmap.mmap | None = None
        self._file, size = open_regular(path)
        try:
            self.header: Header = read_header(self._file, size, path)
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {len(self.header.tensors)} tensors>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Arrays and views handed out stay valid: they keep the mapping alive."""
        mapping, self._map = self._map, None
        self._file.close()
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view still lives; the mapping goes with the last one
                mapping.close()

    @property
    def has_data(self) -> bool:
        """Whether the tensors can be read; False only for a remote file, of which just the header is known."""
        return True

    def bytes_of(self, info: TensorInfo) -> memoryview:
        """Return the bytes of a tensor as a read-only view of the mapped file.

        Raises:
            TruncatedError: the file has been changed in size since it was opened.
            UsageError: the shard has been closed.
        """
        self._check_size()
        if self._map is None:
            try:
                self._map = mmap.mmap(self._descriptor(), self.header.file_size, access=mmap.ACCESS_READ)
            except OSError as error:
                raise refusal(error, self.path) from error
        begin = self.header.data_start
        return memoryview(self._map)[begin + info.start : begin + info.end]

    def array(self, info: TensorInfo) -> npt.NDArray[np.generic]:
        """Return a tensor as a read-only numpy array of its shape, little-endian.

        BF16 comes as its bit patterns in uint16, 8-bit floats as uint8; of F4 and F6, which numpy cannot address, the
        bytes come as a flat uint8 array. Data at an unaligned offset is copied, other data is a view of the file.

        Raises:
            TruncatedError, UsageError: as `bytes_of`.
            ShapeError: numpy has no arrays of so many dimensions.
        """
        values = self.view(info)
        if not values.flags.aligned:
            values = values.copy()
            values.flags.writeable = False
        return values

    def view(self, info: TensorInfo) -> npt.NDArray[np.generic]:
        """Return what `array` does, but never a copy: at an unaligned offset the array is not aligned.

        This is for large tensors of which parts are copied; numpy computes with an unaligned array, only slower.

        Raises:
            TruncatedError, UsageError: as `bytes_of`.
            ShapeError: numpy has no arrays of so many dimensions.
        """
        data = self.bytes_of(info)
        dtype = _NUMPY_DTYPES.get(info.dtype)
        if dtype is None:
            return np.frombuffer(data, np.uint8)
        # np.ndarray(…, buffer=data) would not keep the mapping from being closed under it.
        flat = np.frombuffer(data, dtype)
        try:
            return flat.reshape(info.shape)
        except ValueError as error:  # the header has checked that the size is right
            text = f"numpy has no arrays of {len(info.shape)} dimensions"
            raise ShapeError(text, path=self.path, tensor=info.name) from error

    def read(self, info: TensorInfo) -> bytes:
        """Return a copy of the bytes of a tensor; errors as `chunks`."""
        return b"".join(self.chunks(info.start, info.end))

    def chunks(self, start: int, end: int, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read bytes [`start`, `end`) of the data section in pieces of at most `size` bytes.

        Raises:
            TruncatedError: the file has been cut short since it was opened.
            SourceError: the operating system fails to read it.
            UsageError: the shard has been closed.
        """
        begin = self.header.data_start
        return read_pieces(self._descriptor(), begin + start, begin + end, size, self.path)

    def expect(self, infos: Iterable[TensorInfo]) -> None:
        """Let the disk fetch tensors, small and far apart, together: `read` of each then waits for none.

        Raises:
            UsageError: the shard has been closed.
        """
        descriptor, begin = self._descriptor(), self.header.data_start
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                for info in infos:
                    os.posix_fadvise(descriptor, begin + info.start, info.nbytes, os.POSIX_FADV_WILLNEED)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)

    def _descriptor(self) -> int:
        if self._file.closed:
            raise UsageError("the checkpoint has been closed", path=self.path)
        return self._file.fileno()

    def _check_size(self) -> None:
        # Touching a mapped page behind the end of the file would kill the process.
        size = os.fstat(self._descriptor()).st_size
        if size != self.header.file_size:
            raise TruncatedError(
                "file has changed in size since it was opened", path=self.path, expected=self.header.file_size, got=size
            )
