"""The decode digest: one hash by which a decoder, on any hardware, proves that its codes are right."""

from __future__ import annotations

import hashlib
from typing import Any

from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.kernels.numpy_decoder import iter_code_rows


def decode_digest(trellis: NDArray[Any], codebook: Codebook | str, *, threads: int = 1) -> str:
    """Return the decode digest of a module, 64 lower-case hex digits (spec/manifest.md §4).

    It is the SHA-256 of the module's codes as little-endian int16, row-major, in the rotated basis and padded:
    (in_p, out_p); grid codes as stored, EXL3 values as float16 bit patterns. It covers neither scales nor
    bias nor the true size. ``trellis`` is int16 (in_p/16, out_p/16, W), ``codebook`` a codebook or its name. Memory is
    bounded; with several ``threads`` the hash is computed beside them. Raises CodebookError, DtypeError and ShapeError.

    >>> import numpy as np
    >>> from espalier_format.codec.codebook import get_codebook
    >>> codebook = get_codebook("int8@6")
    >>> trellis = np.zeros((1, 1, 96), np.int16)
    >>> codes = np.full((16, 16), codebook.codes[0], "<i2")
    >>> decode_digest(trellis, codebook) == hashlib.sha256(codes.tobytes()).hexdigest()
    True
    """
    digest = hashlib.sha256()
    for block in iter_code_rows(trellis, codebook, threads=threads):
        digest.update(block.data)
    return digest.hexdigest()
