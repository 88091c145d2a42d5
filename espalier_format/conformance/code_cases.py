"""Which codes the kit decodes: of each codebook a trellis that visits every state, and what must be refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.codec.tile import HALFWORDS
from espalier_format.conformance.noise import halfwords
from espalier_format.conformance.state_tour import state_tour
from espalier_format.kernels import reference


@dataclass(frozen=True, slots=True)
class CodesCase:
    """One trellis and a codebook; ``error`` is the code it must be refused with, or None."""

    label: str
    codebook: str
    error: str | None = None

    def trellis(self) -> NDArray[np.int16]:
        """Return the trellis, int16 (tiles / 8, 8, W): of a case to refuse, a small one of W = 16."""
        if self.error is not None:
            return halfwords(f"{self.label}/trellis", 2 * 3 * HALFWORDS[0]).view(np.int16).reshape(2, 3, -1)
        return state_tour(get_codebook(self.codebook).half_steps)

    def codes(self) -> NDArray[Any]:
        """Return the codes by the reference, (in_p, out_p), int8 or float16."""
        return reference.decode_codes(self.trellis(), get_codebook(self.codebook))


REFUSED: Final = (
    CodesCase("refused/width-of-another-codebook", "e2m1@2", "shape"),
    CodesCase("refused/grid-without-this-width", "e2m1@3", "codebook"),
    CodesCase("refused/width-spelled-1.0", "e2m1@1.0", "codebook"),
    CodesCase("refused/half-width-without-mul1", "exl3-mcg@1.5", "codebook"),
    CodesCase("refused/unknown-grid", "int4@1", "codebook"),
)
"""Codebooks that do not exist, and a trellis that is not of its codebook: none may be decoded to some numbers."""


@lru_cache(maxsize=1)
def code_cases() -> tuple[CodesCase, ...]:
    """Return one case per codebook, then `REFUSED`."""
    return (*(CodesCase(name, name) for name in CODEBOOKS), *REFUSED)
