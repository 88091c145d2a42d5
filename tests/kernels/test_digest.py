"""Decode digests."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.errors import DtypeError, ShapeError
from espalier_format.kernels import reference
from espalier_format.kernels.digest import decode_digest


@pytest.mark.parametrize("name", ["e2m1@1.5", "int8@6", "exl3-3inst@4", "exl3-mul1@2.5"])
@pytest.mark.parametrize("threads", [1, 2])
def test_digest_hashes_int16_row_major(name: str, threads: int, random_module: Callable[..., Any]) -> None:
    """The bytes are written by struct from the reference's codes; several blocks, the last one shorter."""
    module = random_module(name, (0, 0), 1040, 1552)
    codes = reference.decode_codes(module.trellis, module.codebook).ravel()
    form = "<%dh" if module.codebook.is_grid else "<%de"
    data = struct.pack(form % codes.size, *codes.tolist())
    assert decode_digest(module.trellis, module.codebook, threads=threads) == hashlib.sha256(data).hexdigest()


def test_every_bit_of_the_trellis_counts(random_module: Callable[..., Any]) -> None:
    """For EXL3 codebooks one flipped bit may leave all codes equal only where two states share a value."""
    module = random_module("exl3-mcg@2", (0, 0), 32, 32)
    digests = set()
    for halfword in range(32):
        trellis = module.trellis.copy()
        trellis[1, 0, halfword] ^= np.int16(1 << (halfword % 15))
        digests.add(decode_digest(trellis, module.codebook))
    assert len(digests) == 32


def test_wrong_operands_are_refused(random_module: Callable[..., Any]) -> None:
    module = random_module("int5@3", (0, 0), 32, 32)
    with pytest.raises(DtypeError):
        decode_digest(module.trellis.astype(np.int32), module.codebook)
    with pytest.raises(ShapeError):
        decode_digest(module.trellis[..., :40], module.codebook)
