"""The decode digest by the torch decoder: on a GPU, which proves that GPU's codes, or on the CPU."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# torch_decoder first: it says what to install where torch is missing.
from espalier_format.kernels.torch_decoder import decode_codes  # isort: skip
import torch

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.tile import TILE
from espalier_format.kernels.operands import check_trellis_shape, padded_size
from espalier_format.kernels.torch_device import usable_device

_BLOCK_WEIGHTS: Final = 1 << 24
"""Weights that are decoded and brought to the host at a time: 32 MiB of words."""


def decode_digest(trellis: NDArray[Any], codebook: Codebook | str, device: str | torch.device) -> str:
    """Return what `espalier_format.kernels.digest.decode_digest` does, decoded on `device` and hashed by the CPU.

    ``trellis`` is int16 (in_p/16, out_p/16, W) in host memory. Memory on the device and the host is bounded: a block of
    rows at a time. Raises CodebookError, DtypeError, ShapeError and, for a device that torch cannot use, UsageError.
    """
    where = usable_device(device)
    codebook = get_codebook(codebook)
    check_trellis_shape(trellis.shape, codebook)
    _, padded_out = padded_size(trellis.shape)
    height = max(1, _BLOCK_WEIGHTS // max(1, TILE * padded_out))
    digest = hashlib.sha256()
    for top in range(0, trellis.shape[0], height):
        # A copy, for torch takes no read-only memory.
        codes = decode_codes(torch.from_numpy(trellis[top : top + height].copy()).to(where), codebook)
        words = codes.to(torch.int16) if codes.dtype == torch.int8 else codes.view(torch.int16)
        digest.update(words.cpu().numpy().astype(np.dtype("<i2"), copy=False).data)
    return digest.hexdigest()
