"""The operations on packed weights as torch operators, ``torch.ops.espalier_format``: one call for every device.

Importing this module registers them:

- ``decode_codes`` and ``decode_weight`` (`espalier_format.kernels.decode`)
- ``matmul`` (`espalier_format.kernels.matmul`)
- ``expert_bank`` (`espalier_format.kernels.expert_bank`)

Each has an implementation for CPUs in plain torch, one for CUDA that launches on the current stream and waits for
nothing, and a fake one, so that it can be traced by ``torch.compile`` and recorded in CUDA graphs. Operands are checked
before anything is launched; errors are those of `espalier_format.errors`. Needs torch; cuda-core is imported, and a
kernel compiled, at the first call with tensors on a CUDA device: call an operation once before capturing a graph.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from espalier_format.errors import DependencyError

try:
    import torch
except ImportError as error:
    raise DependencyError("these operations need torch: pip install torch") from error

from espalier_format.kernels import decode, expert_bank_op, matmul

NAMESPACE: Final = "espalier_format"
"""The operators are ``torch.ops.<NAMESPACE>.<name>``."""

_MODULES: Final = (decode, matmul, expert_bank_op)
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


register()
