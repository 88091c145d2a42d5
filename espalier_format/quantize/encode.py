"""Encode the modules of a plan one after the other, each result made durable before the next is begun."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from espalier_format.encoder.hessian import read_hessian
from espalier_format.encoder.module import encode_module
from espalier_format.errors import EspalierError
from espalier_format.kernels.digest import decode_digest
from espalier_format.quantize.measure import BYTES_PER_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from espalier_format.codec.codebook import Codebook
    from espalier_format.encoder.options import EncoderOptions
    from espalier_format.progress import Progress
    from espalier_format.quantize.plan import ModulePlan
    from espalier_format.quantize.state import ModuleResult, QuantizeState

_REPORTED: Final = ("relative_mse", "relative_proxy_loss", "damping", "flushed_inputs", "flushed_outputs")


def encode(
    modules: Sequence[ModulePlan],
    chosen: Mapping[str, Codebook],
    state: QuantizeState,
    *,
    seed: int,
    hessians: Path | None,
    options: EncoderOptions,
    progress: Progress,
) -> tuple[dict[str, ModuleResult], int]:
    """Return the result of every module, and how many an earlier run had finished.

    Memory: one module's codes and the buffers of the encoder.

    Raises:
        SourceError: a weight holds a NaN or an infinity.
        EspalierError: as `encode_module`, `read_hessian` and `QuantizeState`.
    """
    results: dict[str, ModuleResult] = {}
    missing: list[tuple[int, ModulePlan]] = []
    for number, module in enumerate(modules):
        found = state.result(number, module.name, chosen[module.name].name)
        if found is None:
            missing.append((number, module))
        else:
            results[module.name] = found
    resumed = len(results)
    progress.start(sum(module.linear.weights for _, module in missing) * BYTES_PER_WEIGHT, "encoding")
    for number, module in missing:
        results[module.name] = _encode(
            number,
            module,
            chosen[module.name],
            state,
            seed=seed,
            hessians=hessians,
            options=options,
            progress=progress,
        )
    progress.finish()
    return results, resumed


def _encode(
    number: int,
    module: ModulePlan,
    codebook: Codebook,
    state: QuantizeState,
    *,
    seed: int,
    hessians: Path | None,
    options: EncoderOptions,
    progress: Progress,
) -> ModuleResult:
    linear = module.linear
    try:
        hessian = None if hessians is None else read_hessian(hessians, module.name, linear.in_features)
        encoded = encode_module(
            linear.matrix,
            codebook,
            module.rotation,
            seed=seed,
            name=module.name,
            hessian=hessian,
            options=options,
            advance=lambda weights: progress.advance(weights * BYTES_PER_WEIGHT),
        )
    except EspalierError as error:
        error.tensor = error.tensor or module.name
        raise
    stats = dataclasses.asdict(encoded.stats)
    report = {
        **{key: stats[key] for key in _REPORTED},
        "warnings": list(encoded.stats.warnings),
        "sum_of_squares": encoded.stats.energy,
        "hessian": hessian is not None,
    }
    digest = decode_digest(encoded.trellis, codebook, threads=options.threads)
    return state.add_result(number, module.name, encoded, digest, report)
