"""The operations on packed weights, also as torch operators ``torch.ops.espalier_format``: one call for every device.

- `decode_codes` and `decode_weight`: a module, or some of its rows
- `matmul`, and `linear` with a `LinearOperand`: the product with a module
- `expert_bank` with an `ExpertBankOperand`: the experts of a layer
- `prepare`: compile what these will need, ahead of them

Importing this module registers the operators. Each has an implementation for CPUs in plain torch, one for CUDA that
launches on the current stream and waits for nothing, and a fake one, so that ``torch.compile`` in its default mode can
trace it, and the caller can record it in a CUDA graph. Not supported, and not tested, is the mode "reduce-overhead",
with graphs of torch's own that share memory (cudagraph trees): counters outlive their capture. Operands are checked
before anything is launched, but not their values on a CUDA device: whoever loads a module does that (`load_checks`).
Errors are those of `espalier_format.errors`. They are for inference, and have no derivative. Needs torch; cuda-core is
imported, and a kernel compiled, at the first call with tensors on a CUDA device, or by `prepare`: call an operation
once before capturing a graph.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from espalier_format.errors import DependencyError

try:
    import torch
except ImportError as error:
    raise DependencyError("these operations need torch: pip install torch") from error

from espalier_format.kernels import decode as _decode
from espalier_format.kernels import expert_bank_op as _expert_bank_op
from espalier_format.kernels import matmul as _matmul
from espalier_format.kernels import no_derivative as _no_derivative
from espalier_format.kernels.decode import decode_codes, decode_weight
from espalier_format.kernels.linear import LinearOperand, linear
from espalier_format.kernels.matmul import matmul
from espalier_format.kernels.prepare import prepare

if TYPE_CHECKING:
    from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank

__all__ = [
    "NAMESPACE",
    "ExpertBankOperand",
    "LinearOperand",
    "decode_codes",
    "decode_weight",
    "expert_bank",
    "linear",
    "matmul",
    "prepare",
    "register",
]

NAMESPACE: Final = "espalier_format"
"""The operators are ``torch.ops.<NAMESPACE>.<name>``."""

_MODULES: Final = (_no_derivative, _decode, _matmul, _expert_bank_op)
"""Each has ``register(library)``, which defines its operators and implements them for CPU, CUDA and Meta."""

_lock: Final = threading.Lock()
_kept: Final[list[Any]] = []
"""A library takes its operators with it when it goes."""


def register() -> None:
    """Define and implement all operators. Later calls do nothing; safe to call from several threads."""
    with _lock:
        if not _kept:
            make_library: Any = torch.library.Library  # not annotated
            library = make_library(NAMESPACE, "DEF")
            for module in _MODULES:
                module.register(library)
            _kept.append(library)


def __getattr__(name: str) -> Any:
    """Import what stands in a module that imports this one (PEP 562)."""
    if name not in ("ExpertBankOperand", "expert_bank"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from espalier_format.kernels import expert_bank as home  # noqa: PLC0415 - it imports this module

    return getattr(home, name)


register()
