"""The names of the output dtypes, as torch spells them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from espalier_format.codec.dtype_names import DtypeName, parse_dtype
from espalier_format.codec.rounding import OutputDtype
from espalier_format.errors import DependencyError

try:
    import torch
except ImportError as error:
    raise DependencyError("decoding to a device needs torch: pip install torch") from error

OUTPUT_DTYPES: Final[Mapping[torch.dtype, OutputDtype]] = MappingProxyType(
    {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
)
"""torch's dtype to its name, for those that weights are decoded to."""

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {name: dtype for dtype, name in OUTPUT_DTYPES.items()}
)
"""Name of an output dtype to torch's own."""


def torch_dtype(dtype: DtypeName | torch.dtype) -> torch.dtype:
    """Return the output dtype of that name, or itself; UsageError for every other."""
    return TORCH_DTYPES[parse_dtype(dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."))]
