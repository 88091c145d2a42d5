"""Back ends of the encoder: what one must do, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier_format.encoder.branch_cost import BranchCost
from espalier_format.errors import DependencyError, UsageError


class Backend(Protocol):
    """A tail-biting Viterbi search.

    Every back end finds the same states, bit for bit: those of `numpy_backend`, which is the definition. It may
    assume a C-contiguous array of targets, all within the range that `BranchCost.fixed_point` clamps to.
    """

    def __call__(self, targets: NDArray[np.int16], cost: BranchCost, passes: int, threads: int) -> NDArray[np.uint16]:
        """Return the states (n, 256) of the rings whose fixed-point targets are ``targets`` (n, 256).

        ``passes`` is at least 2: the free pass, then those with a boundary, at positions 0, 128, 0, ... in turn.
        ``threads`` is how many CPU threads it may use; the result does not depend on it.
        """
        ...


def _numpy() -> Backend:
    from espalier_format.encoder import numpy_backend  # noqa: PLC0415 - back ends load when asked for

    return numpy_backend.search


def _numba() -> Backend:
    if find_spec("numba") is None:
        raise DependencyError("the numba back end needs numba: pip install numba")
    from espalier_format.encoder import numba_backend  # noqa: PLC0415 - as above; numba takes most of a second

    return numba_backend.search


_LOADERS: Final[dict[str, Callable[[], Backend]]] = {"numpy": _numpy, "numba": _numba}


def register_backend(name: str, load: Callable[[], Backend]) -> None:
    """Add a back end under a new name: ``load`` imports it and raises DependencyError where it cannot run.

    Raises UsageError when the name is taken.
    """
    if name in _LOADERS or name == "auto":
        raise UsageError("an encoder back end of this name exists", got=name)
    _LOADERS[name] = load


def backend_names() -> tuple[str, ...]:
    """Return the names that `load_backend` takes besides "auto"."""
    return tuple(_LOADERS)


def load_backend(name: str) -> Backend:
    """Return a back end; "auto" is the fastest for the CPU that is installed.

    Raises UsageError for an unknown name and DependencyError when its package is missing.
    """
    if name == "auto":
        name = "numba" if find_spec("numba") else "numpy"
    if name not in _LOADERS:
        raise UsageError("unknown encoder back end", expected=["auto", *_LOADERS], got=name)
    return _LOADERS[name]()
