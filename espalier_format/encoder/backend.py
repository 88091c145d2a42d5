"""Back ends of the encoder: what one must do, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from importlib.util import find_spec
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import CODEBOOKS, Codebook
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
    try:
        from espalier_format.encoder import numba_backend  # noqa: PLC0415 - as above; numba takes most of a second
    except ImportError as error:  # it refuses a numpy that is newer than it, for one
        raise DependencyError(f"numba is installed, but cannot be imported: {error}") from error

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
"""Each imports its back end, and raises DependencyError where it cannot run."""


def load_backend(name: str, codebook: Codebook | None = None) -> Backend:
    """Return a back end for a codebook; "auto" is the fastest that works here: on a GPU, else compiled for the CPU.

    Without a ``codebook`` it is one for all of them: a GPU may have too little shared memory for some. "auto" is never
    numpy, which takes hours for what the others do in a minute: that one has to be asked for. Raises UsageError for an
    unknown name and for "cuda" on a GPU that cannot encode the codebook, DependencyError when a package or device is
    missing.
    """
    if name == "auto":
        name = _fastest(codebook)
    elif name == "cuda":
        loaded = _cuda()
        _refuse_small_gpu(codebook)
        return loaded
    if name not in _LOADERS:
        raise UsageError("unknown encoder back end", expected=["auto", *_LOADERS], got=name)
    return _LOADERS[name]()


def _fastest(codebook: Codebook | None) -> str:
    reason = "encoding without a GPU needs numba"
    if _has_able_gpu():
        try:
            _refuse_small_gpu(codebook)
        except UsageError as error:
            reason = f"{error.message}; that needs numba"
        else:
            return "cuda"
    if find_spec("numba") is not None:
        return "numba"
    raise DependencyError(
        f"{reason}, which the extra [cpu] brings: pip install numba; "
        "the back end numpy needs nothing, and is hundreds of times slower"
    )


def _has_able_gpu() -> bool:
    try:
        CDLL("libcuda.so.1")  # the driver: without it there is no need to import torch, which takes a second
    except OSError:
        return False
    try:
        _cuda()
    except DependencyError:
        return False
    return True


def _refuse_small_gpu(codebook: Codebook | None) -> None:
    """Raise UsageError unless torch's current device can encode a codebook, or all where it is None."""
    import torch  # noqa: PLC0415 - as above

    from espalier_format.kernels.cuda.viterbi import form_on  # noqa: PLC0415 - as above

    for each in CODEBOOKS.values() if codebook is None else (codebook,):
        form_on(each, torch.cuda.current_device())
