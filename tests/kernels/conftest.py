"""Random modules, and the real ones that exllamav3 wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded


@dataclass(frozen=True)
class Module:
    """One quantized module, with everything that a decoder takes."""

    trellis: np.ndarray[Any, Any]
    suh: np.ndarray[Any, Any]
    svh: np.ndarray[Any, Any]
    codebook: Codebook
    rotation: tuple[int, int]
    in_features: int
    out_features: int

    def operands(self) -> tuple[Any, ...]:
        """The arguments that all decode_weight functions start with."""
        return (self.trellis, self.suh, self.svh, self.codebook, *self.rotation)


@pytest.fixture(scope="session")
def random_module() -> Callable[..., Module]:
    """A function that makes a module of random bits and scales; padding has scales of zero."""

    def make(name: str, rotation: tuple[int, int], in_features: int, out_features: int, seed: int = 0) -> Module:
        rng = np.random.default_rng(seed)
        codebook = get_codebook(name)
        padded_in, padded_out = padded(in_features, rotation[0]), padded(out_features, rotation[1])
        shape = (padded_in // 16, padded_out // 16, codebook.halfwords_per_tile)
        trellis = rng.integers(-32768, 32768, shape).astype(np.int16)
        suh = (rng.standard_normal(padded_in) * 0.02).astype(np.float16)
        svh = rng.standard_normal(padded_out).astype(np.float16)
        suh[in_features:], svh[out_features:] = 0, 0
        svh[rng.integers(0, out_features)] = 0
        return Module(trellis, suh, svh, codebook, rotation, in_features, out_features)

    return make
