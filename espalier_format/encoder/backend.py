"""Back ends of the encoder: what one must do, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from importlib.util import find_spec
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier_format.encoder.branch_cost import BranchCost
from espalier_format.encoder.effort import Effort
from espalier_format.errors import DependencyError, UsageError


class Backend(Protocol):
    """A tail-biting Viterbi search.

    Every back end finds the same states, bit for bit: those of `numpy_backend`, which is the definition. It may
    assume a C-contiguous array of targets, all within the range that `BranchCost.fixed_point` clamps to.
    """

    def __call__(
        self, targets: NDArray[np.int16], cost: BranchCost, effort: Effort, threads: int
    ) -> NDArray[np.uint16]:
        """Return the states (n, 256) of the rings whose fixed-point targets are ``targets`` (n, 256).

        The passes of ``effort`` are the free one, then those with a boundary, at positions 0, 128, 0, ... in turn.
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


def _cuda() -> Backend:
    if find_spec("torch") is None:
        raise DependencyError('the cuda back end needs PyTorch and cuda-core: pip install torch "cuda-core[cu13]"')
    import torch  # noqa: PLC0415 - as above

    if not torch.cuda.is_available():
        raise DependencyError("the cuda back end needs a CUDA device that PyTorch can use")
    from espalier_format.kernels.cuda import compiler, viterbi  # noqa: PLC0415 - as above

    compiler.cuda_core()
    return viterbi.search


_LOADERS: Final[dict[str, Callable[[], Backend]]] = {"numpy": _numpy, "numba": _numba, "cuda": _cuda}


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
    """Return a back end; "auto" is the fastest that works here: on a GPU, else compiled for the CPU.

    "auto" takes a GPU only if every width can run on it, and never numpy, which takes hours for what the others do in
    a minute: that one has to be asked for. Raises UsageError for an unknown name and DependencyError when a package
    or device is missing.
    """
    if name == "auto":
        if _has_able_gpu():
            name = "cuda"
        elif find_spec("numba") is not None:
            name = "numba"
        else:
            raise DependencyError(
                "encoding without a GPU needs numba, which the extra [cpu] brings: pip install numba; "
                "the back end numpy needs nothing, and is hundreds of times slower"
            )
    if name not in _LOADERS:
        raise UsageError("unknown encoder back end", expected=["auto", *_LOADERS], got=name)
    return _LOADERS[name]()


def _has_able_gpu() -> bool:
    try:
        CDLL("libcuda.so.1")  # the driver: without it there is no need to import torch, which takes a second
    except OSError:
        return False
    try:
        _cuda()
    except DependencyError:
        return False
    import torch  # noqa: PLC0415 - as above

    from espalier_format.kernels.cuda.viterbi import LARGEST_SHARED_BYTES  # noqa: PLC0415 - as above

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= LARGEST_SHARED_BYTES)
