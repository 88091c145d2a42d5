"""What a caller may choose about encoding a module, and what the encoder reports about one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.encoder.effort import THOROUGH, Effort
from espalier_format.errors import UsageError


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """How a module is encoded. The defaults are meant for real work."""

    backend: str = "auto"
    """Back end of the trellis search (`backend.load_backend`); the result is the same with each."""
    threads: int = 1
    """CPU threads of the trellis search; the result does not depend on it."""
    effort: Effort = THOROUGH
    """How thoroughly the trellis is searched (`tiles.encode_tiles`)."""
    scale_search_tiles: int = 32
    """Tiles, spread over the module, that the global scale is searched on; 0 keeps the codebook's gain."""
    channel_scales: bool = True
    """Whether channels are normalised one by one (else only their common size goes into the scales)."""
    refit: bool = True
    """Whether suh and svh are fitted to the weight again once the codes are known."""
    feedback: bool = True
    """Whether errors are fed back to what is encoded later (LDLQ): by the Hessian, or without one for the squared
    error, within rotation blocks."""
    damping: float = 0.01
    """What is added to the diagonal of a Hessian at first, relative to the mean of the diagonal."""
    buffer_bytes: int = 128 << 20
    """Aim for the size of the largest working buffer; a few of this size exist. The result does not depend on it."""

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        if not isinstance(self.effort, Effort):
            raise UsageError("the effort must be an Effort; get_effort finds it by name", got=repr(self.effort))
        if self.threads < 1:
            raise UsageError("threads must be at least 1", got=self.threads)
        if self.scale_search_tiles < 0:
            raise UsageError("the number of tiles must not be negative", got=self.scale_search_tiles)
        if not 0 < self.damping <= 1:
            raise UsageError("damping must be above 0 and at most 1", got=self.damping)
        if self.buffer_bytes < 1:
            raise UsageError("the buffer size must be positive", got=self.buffer_bytes)


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """What encoding a module came to. Everything but ``seconds`` is the same in every run."""

    relative_mse: float
    """Sum of squared errors of the decoded weight (exact scales and codes) ÷ sum of squares of the weight."""
    relative_proxy_loss: float | None
    """tr(E H Eᵀ) ÷ tr(W H Wᵀ), E = W - decoded weight, H the undamped Hessian; None without one."""
    energy: float
    """Sum of squares of the weight."""
    scale: float
    """Global scale: what a codebook value stands for where the rotated, normalised weight has variance 1."""
    damping: float | None
    """Damping that was used in the end; None without error feedback."""
    flushed_inputs: int
    """Input channels that are not zero but too small, next to the others, for any F16 scale: they decode to zero."""
    flushed_outputs: int
    """The same for output channels."""
    seconds: float
    """Wall time."""
    warnings: tuple[str, ...] = ()
    """Sentences for a person: damping that had to be raised, a Hessian without content, flushed channels."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedModule:
    """A quantized module: the tensors of spec/espalier-v1.md, and how well they fit."""

    codebook: Codebook
    in_features: int
    out_features: int
    rotation: tuple[int, int]
    """Rotation blocks (in, out)."""
    trellis: NDArray[np.int16]
    """(in_p/16, out_p/16, W)."""
    suh: NDArray[np.float16]
    """(in_p,); +0 in the padding and for inputs that are all zero."""
    svh: NDArray[np.float16]
    """(out_p,); +0 in the padding and for outputs that are all zero."""
    stats: ModuleStats
