"""Where an encoder reads a weight from: all of it in memory, or some rows at a time."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier_format.errors import ShapeError


class WeightRows(Protocol):
    """A weight (out_features, in_features) that is read in blocks of rows, several times over.

    Every read of a row gives the same numbers. A source that casts from BF16 as it is read keeps one block in memory,
    so a head of any size can be encoded.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return output rows [start, stop), float32 (stop - start, in_features)."""
        ...


class ArrayRows:
    """A weight that is in memory, or mapped, as one array of any floating dtype that numpy has."""

    def __init__(self, array: NDArray[Any]) -> None:
        """Take ``array``, (out_features, in_features). Raises ShapeError for another number of dimensions."""
        if array.ndim != 2:
            raise ShapeError("a weight must have two dimensions", expected="(out, in)", got=array.shape)
        self._array = array

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._array.shape[0], self._array.shape[1]

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return output rows [start, stop) as float32."""
        return self._array[start:stop].astype(np.float32)
