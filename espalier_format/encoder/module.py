"""Encode a module: from a weight to trellis and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.tile import TILE
from espalier_format.encoder.channel_scales import ROWS
from espalier_format.encoder.f16_scales import flushed
from espalier_format.encoder.hessian import Hessian
from espalier_format.encoder.hessian_product import HessianProduct
from espalier_format.encoder.ldlq import Feedback, feedback_of_hessian, feedback_of_scales, quantise
from espalier_format.encoder.options import EncodedModule, EncoderOptions, ModuleStats
from espalier_format.encoder.refit import Refit
from espalier_format.encoder.regularise import Regularised, regularise
from espalier_format.encoder.scale_search import Sample, search_scale, search_scale_of
from espalier_format.encoder.tiles import encode_tiles, from_rings, to_rings
from espalier_format.encoder.weight_rows import ArrayRows, WeightRows
from espalier_format.errors import ShapeError

_DEFAULTS: Final = EncoderOptions()
_BYTES_PER_WEIGHT: Final = 32
"""About what the arrays take that exist while a block is encoded."""
_MOST_WEIGHTED_INPUTS: Final = 8192
"""Above this, suh is not refitted with a Hessian: the system would take more than another 512 MiB."""
_STEP_WEIGHTS: Final = 1 << 17
"""Weights that are encoded between two reports of progress, without feedback."""


def encode_module(
    weight: NDArray[Any] | WeightRows,
    codebook: Codebook,
    rotation: tuple[int, int],
    *,
    seed: int,
    name: str,
    hessian: Hessian | None = None,
    options: EncoderOptions = _DEFAULTS,
    advance: Callable[[int], None] | None = None,
) -> EncodedModule:
    """Encode a weight of shape (out_features, in_features), floating point or a source of rows of it.

    ``rotation`` is (in, out), each 0, 32, 64, 128 or 256 (`regularise.default_block` gives the usual one for a
    size; EXL3 wants 128 and 128, with any codebook of EXL3). ``name`` is the module's name in the checkpoint: with
    ``seed`` (0 <= seed < 2^64) it decides the random signs, and errors name it. ``hessian`` says which errors of the
    weight matter; without one, all matter alike.
    ``advance`` is called with numbers of weights as they are done; they add up to in_features * out_features.

    Rows, columns and matrices of zeros decode to exact zeros. The result is the same for every number of threads,
    back end, buffer size and BLAS library. Memory beside the source and the result: a few times
    ``options.buffer_bytes``, and with a Hessian 8 bytes * in_p^2.

    Raises SourceError for a weight that holds a NaN or an infinity, or a matrix that is no Hessian; ShapeError for an
    empty weight or a Hessian of another size; ScaleOverflowError for a weight whose scales do not fit F16; UsageError
    for a seed, rotation block or back end that does not exist; DependencyError for a back end without its package.
    """
    start = perf_counter()
    rows = ArrayRows(weight) if isinstance(weight, np.ndarray) else weight
    out_features, in_features = rows.shape
    if hessian is not None and hessian.matrix.shape != (in_features, in_features):
        raise ShapeError(
            "the Hessian does not fit the weight", tensor=name, expected=(in_features,) * 2, got=hessian.matrix.shape
        )
    regularised = regularise(rows, rotation, seed=seed, name=name, each=options.channel_scales)
    shape = (regularised.padded_in // TILE, regularised.padded_out // TILE, codebook.halfwords_per_tile)
    trellis = np.zeros(shape, np.int16)
    done = _Advance(advance, rows.shape, regularised)
    if not regularised.energy:
        suh, svh = np.zeros(regularised.padded_in, np.float16), np.zeros(regularised.padded_out, np.float16)
        done.finish()
        stats = ModuleStats(0.0, None, 0.0, 0.0, None, 0, 0, perf_counter() - start)
        return EncodedModule(codebook, in_features, out_features, rotation, trellis, suh, svh, stats)

    warnings = []
    feedback = None
    if options.feedback and hessian is not None:
        feedback = feedback_of_hessian(hessian, regularised.inputs, rotation[0], damping=options.damping, name=name)
        if feedback is None:
            warnings.append("the Hessian is zero wherever the weight is not: encoded without it")
            hessian = None
        elif feedback.damping > options.damping:
            warnings.append(f"the Hessian needed damping of {feedback.damping:g} instead of {options.damping:g}")
    if options.feedback and hessian is None:
        feedback = feedback_of_scales(regularised.inputs, rotation[0], damping=options.damping)
    scale = search_scale(
        regularised,
        codebook,
        tiles=options.scale_search_tiles,
        effort=options.effort,
        backend=options.backend,
        threads=options.threads,
    ).scale

    for block in _blocks(regularised, options.buffer_bytes):
        _encode_block(regularised, block, codebook, scale, feedback, options, trellis, done)
    damping = None if feedback is None else feedback.damping
    del feedback  # as large as what measuring with the Hessian takes
    done.finish()

    fit = Refit(rows, trellis, codebook, rotation, threads=options.threads)
    inputs, outputs = regularised.inputs, regularised.outputs * scale
    product = None if hessian is None else HessianProduct(hessian, inputs[:in_features])
    if options.refit:
        if product is None:
            inputs, outputs = fit.fit_inputs(inputs, outputs)
        elif in_features <= _MOST_WEIGHTED_INPUTS:
            inputs, outputs = fit.fit_inputs_weighted(inputs, outputs, product)
    fitted = fit.finish(inputs, outputs, name=name, refit=options.refit, hessian=product)
    lost = flushed(inputs, fitted.suh), flushed(outputs, fitted.svh)
    for count, side in zip(lost, ("input", "output"), strict=True):
        if count:
            warnings.append(f"{count} {side} channels are too small beside the others for F16 and became zero")
    stats = ModuleStats(
        fitted.squared_error / regularised.energy,
        fitted.loss / fitted.loss_of_zero if fitted.loss is not None and fitted.loss_of_zero else None,
        regularised.energy,
        scale,
        damping,
        *lost,
        perf_counter() - start,
        tuple(warnings),
    )
    return EncodedModule(codebook, in_features, out_features, rotation, trellis, fitted.suh, fitted.svh, stats)


@dataclass(frozen=True, slots=True)
class SampledErrors:
    """What `sample_errors` finds out about a weight."""

    relative_mse: tuple[float, ...]
    """An estimate for each codebook."""
    energy: float
    """Sum of squares of all weights."""


def sample_errors(
    weight: NDArray[Any] | WeightRows,
    codebooks: Sequence[Codebook],
    rotation: tuple[int, int],
    *,
    seed: int,
    name: str,
    options: EncoderOptions = _DEFAULTS,
) -> SampledErrors:
    """Estimate the ``relative_mse`` that `encode_module` would reach, without a Hessian, on a sample of its tiles.

    ``options.scale_search_tiles`` tiles are encoded, at the scale that is best for them. This is what a solver that
    distributes bits compares; 0.0 for a weight of zeros. The weight is read as often for many codebooks as for one:
    `channel_scales.measure_channels`, and the places of the sample. Raises as `encode_module`.
    """
    rows = ArrayRows(weight) if isinstance(weight, np.ndarray) else weight
    regularised = regularise(rows, rotation, seed=seed, name=name, each=options.channel_scales)
    if not regularised.energy:
        return SampledErrors((0.0,) * len(codebooks), 0.0)
    sample, kept = Sample.of(regularised, options.scale_search_tiles), regularised.kept_error
    choices = (
        search_scale_of(sample, codebook, effort=options.effort, backend=options.backend, threads=options.threads)
        for codebook in codebooks
    )
    return SampledErrors(tuple(choice.relative_error * kept for choice in choices), regularised.energy)


class _Advance:
    """Turns progress in stored columns and rows into progress in true weights, which adds up exactly."""

    def __init__(self, advance: Callable[[int], None] | None, shape: tuple[int, int], stored: Regularised) -> None:
        self._advance = advance
        self._total = shape[0] * shape[1]
        self._stored_total = stored.padded_in * stored.padded_out
        self._stored = 0
        self._reported = 0

    def __call__(self, stored: int) -> None:
        self._stored += stored
        self._report(self._total * self._stored // self._stored_total)

    def finish(self) -> None:
        """Report what is missing."""
        self._report(self._total)

    def _report(self, reached: int) -> None:
        if self._advance is not None and reached > self._reported:
            self._advance(reached - self._reported)
        self._reported = reached


def _blocks(regularised: Regularised, buffer_bytes: int) -> Iterator[slice]:
    """Cut the stored output channels into blocks of a bounded number of weights: multiples of `ROWS` and rotation."""
    step = max(ROWS, regularised.rotation[1])
    size = max(buffer_bytes // (_BYTES_PER_WEIGHT * regularised.padded_in) // step, 1) * step
    for start in range(0, regularised.padded_out, size):
        yield slice(start, min(start + size, regularised.padded_out))


def _encode_block(
    regularised: Regularised,
    block: slice,
    codebook: Codebook,
    scale: float,
    feedback: Feedback | None,
    options: EncoderOptions,
    trellis: NDArray[np.int16],
    done: _Advance,
) -> None:
    targets = regularised.columns(block.start, block.stop)
    width = block.stop - block.start
    groups = 1 if feedback is None else len(feedback.factors)
    out = trellis[:, block.start // TILE : block.stop // TILE]
    out = out.reshape(groups, -1, *out.shape[1:])  # a view: splitting an axis never copies

    def encode(row: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Encode rows (groups, height, width) that start at ``row`` of each group."""
        height = rows.shape[1]
        encoded = encode_tiles(
            to_rings(rows.reshape(-1, width)),
            codebook,
            scale=scale,
            effort=options.effort,
            backend=options.backend,
            threads=options.threads,
        )
        here = out[:, row // TILE : (row + height) // TILE]
        here[...] = encoded.pack().reshape(here.shape)
        done(rows.size)
        return from_rings(encoded.values, width).reshape(rows.shape)

    if feedback is not None:
        quantise(targets, feedback, encode)
        return
    step = max(_STEP_WEIGHTS // width // TILE, 1) * TILE
    for row in range(0, regularised.padded_in, step):
        encode(row, targets[None, row : row + step])
