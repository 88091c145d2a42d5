"""Hessians of a module's inputs, as files that a calibration wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.container.folder import CheckpointFolder, check_name
from espalier_format.container.header import TensorInfo
from espalier_format.container.regular_file import refusal
from espalier_format.container.shard import Shard
from espalier_format.errors import DtypeError, MissingFileError, MissingTensorError, ShapeError, SourceError

_ASYMMETRY: Final = 1e-3
"""Largest difference of mirrored entries, relative to the geometric mean of their diagonal entries."""
_ROWS: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Hessian:
    """Sum (or mean) of x xᵀ over the inputs x that a module saw in calibration; its size does not matter."""

    matrix: NDArray[np.float32]
    """(in_features, in_features), symmetric, in the order of the weight's columns: not rotated, not padded."""
    count: int
    """How many inputs it was made from; 0 means that there were none."""


def find_hessian(folder: Path, module: str) -> Path | None:
    """Return the file ``<folder>/<module>.safetensors``, or None where there is none.

    Names come from a checkpoint: none leads out of the folder. What is in the folder comes from the user: links are
    followed, wherever they lead.

    Raises:
        PathError: the name is not that of a file in a folder.
        MissingFileError: there is no such folder, or a link of that name leads nowhere.
        SourceError: the folder or the file cannot be read.
    """
    root = CheckpointFolder(folder).root
    path = root / check_name(f"{module}.safetensors", path=root)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise MissingFileError("the link leads nowhere", path=path) from error
        return None
    except OSError as error:
        raise refusal(error, path) from error
    return path


def has_hessian(folder: Path, module: str, in_features: int) -> bool:
    """Tell whether there is a file, which must be one that `read_hessian` can read, to judge by its header.

    Raises as `read_hessian`, but for what only the numbers show: none is read.
    """
    path = find_hessian(folder, module)
    if path is None:
        return False
    with Shard(path) as shard:
        _check_tensors(shard, in_features)
    return True


def read_hessian(folder: Path, module: str, in_features: int) -> Hessian | None:
    """Read the file that `find_hessian` finds, or return None where there is none.

    The file holds ``hessian``, F32 (in_features, in_features), and ``count``, I64 with one element. The matrix is a
    view of the file, which is mapped, unless it lies unaligned. `check_hessian` is applied.

    Raises MissingTensorError, DtypeError and ShapeError, SourceError as `check_hessian`, and what `find_hessian` and
    opening a shard raise (TruncatedError, MalformedError, ...); each names the file.
    """
    path = find_hessian(folder, module)
    if path is None:
        return None
    with Shard(path) as shard:
        info = _check_tensors(shard, in_features)
        matrix = shard.array(info)
        count = int(shard.array(shard.header.tensors["count"]).reshape(()).item())
    hessian = Hessian(matrix.astype(np.float32, copy=False), count)
    check_hessian(hessian, path)
    return hessian


def input_power(folder: Path, module: str, in_features: int) -> float | None:
    """Return the mean of the diagonal of a module's Hessian, or None where there is no file; nothing else is read.

    Raises as `read_hessian`, but SourceError for numbers on the diagonal only.
    """
    path = find_hessian(folder, module)
    if path is None:
        return None
    with Shard(path) as shard:
        diagonal = shard.view(_check_tensors(shard, in_features)).diagonal().astype(np.float64)
    _check_diagonal(diagonal, path)
    return float(diagonal.mean())


def _check_tensors(shard: Shard, in_features: int) -> TensorInfo:
    """Return the matrix of a file whose tensors are as `read_hessian` says."""
    tensors = shard.header.tensors
    for tensor, dtype, shapes in (
        ("hessian", "F32", [(in_features, in_features)]),
        ("count", "I64", [(), (1,)]),
    ):
        info = tensors.get(tensor)
        if info is None:
            raise MissingTensorError("the file of a Hessian lacks a tensor", path=shard.path, tensor=tensor)
        if info.dtype != dtype:
            raise DtypeError(
                f"{tensor} has another dtype", path=shard.path, tensor=tensor, expected=dtype, got=info.dtype
            )
        if info.shape not in shapes:
            raise ShapeError(
                f"{tensor} has another shape", path=shard.path, tensor=tensor, expected=shapes[0], got=info.shape
            )
    return tensors["hessian"]


def _check_diagonal(diagonal: NDArray[np.float64], path: Path | None) -> None:
    if not np.isfinite(diagonal).all():
        raise SourceError("the Hessian holds a NaN or an infinity", path=path)
    if (diagonal < 0).any():
        raise SourceError("the Hessian has a negative number on its diagonal", path=path)


def check_hessian(hessian: Hessian, path: Path | None = None) -> None:
    """Raise SourceError unless this can be a Hessian.

    The count is not negative; numbers are finite; the diagonal is not negative; mirrored entries differ by at most
    0.1 % of the geometric mean of their diagonal entries, and no entry exceeds that mean by more (so says
    Cauchy-Schwarz). Whether it is positive semidefinite shows when it is factorised.
    """
    matrix = hessian.matrix
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError("a Hessian must be square", path=path, got=matrix.shape)
    if hessian.count < 0:
        raise SourceError("the Hessian's count is negative", path=path, got=hessian.count)
    roots = np.sqrt(np.maximum(matrix.diagonal().astype(np.float64), 0))
    for top in range(0, len(matrix), _ROWS):
        rows = slice(top, min(top + _ROWS, len(matrix)))
        part = matrix[rows].astype(np.float64)
        if not np.isfinite(part).all():
            raise SourceError("the Hessian holds a NaN or an infinity", path=path)
        _check_diagonal(matrix.diagonal()[rows].astype(np.float64), path)
        bound = roots[rows, None] * roots
        if (np.abs(part - matrix[:, rows].T) > _ASYMMETRY * bound).any():
            raise SourceError("the Hessian is not symmetric", path=path)
        if (np.abs(part) > (1 + _ASYMMETRY) * bound).any():
            raise SourceError(
                "the Hessian is not positive semidefinite: an entry exceeds its diagonal entries", path=path
            )
