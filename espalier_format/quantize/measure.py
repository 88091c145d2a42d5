"""Measure how large the error of each module would be at each candidate width."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Final

from espalier_format.encoder.hessian import input_power
from espalier_format.encoder.module import sample_errors
from espalier_format.errors import EspalierError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from espalier_format.encoder.options import EncoderOptions
    from espalier_format.progress import Progress
    from espalier_format.quantize.plan import ModulePlan
    from espalier_format.quantize.state import QuantizeState

SAMPLE_TILES: Final = 16
"""Tiles of each module that are encoded at each width, or all if there are fewer."""

BYTES_PER_WEIGHT: Final = 2
"""Progress is reported in bytes of BF16."""

_NO_HESSIAN: Final = -1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One module: ``relative`` errors of its candidates, on a sample of tiles.

    ``energy`` is the sum of its squared weights; ``input_power`` the mean diagonal entry of its Hessian: a sum over
    tokens there weighs a module by how much it is used as well. None without a Hessian.
    """

    relative: tuple[float, ...]
    energy: float
    input_power: float | None


def measure(
    modules: Sequence[ModulePlan],
    state: QuantizeState,
    *,
    seed: int,
    hessians: Path | None,
    options: EncoderOptions,
    progress: Progress,
) -> dict[str, Measurement]:
    """Measure the modules that have several candidates, but for those that ``state`` knows already.

    A sample of `SAMPLE_TILES` tiles, the same for all candidates, stands for the module: after the rotation its
    weights look alike everywhere. What a module weighs, the sum of its squares, is taken of all weights. A weight is
    read five times at most, however many candidates there are.

    Raises:
        SourceError: a weight holds a NaN or an infinity.
        EspalierError: as `sample_errors`, `input_power` and `QuantizeState`.
    """
    wanted = [module for module in modules if len(module.candidates) > 1]
    missing = [module for module in wanted if not _is_whole(state.measurements.get(module.name, ()), module)]
    options = dataclasses.replace(options, scale_search_tiles=SAMPLE_TILES)
    if missing:
        progress.start(sum(module.linear.weights for module in missing) * BYTES_PER_WEIGHT, "measuring")
        for module in missing:
            state.add_measurement(module.name, _measure(module, seed=seed, hessians=hessians, options=options))
            progress.advance(module.linear.weights * BYTES_PER_WEIGHT)
        state.flush()
        progress.finish()
    return {module.name: _measurement(state.measurements[module.name]) for module in wanted}


def weighted_errors(
    measurements: Mapping[str, Measurement], weights: Mapping[str, float]
) -> dict[str, tuple[float, ...]]:
    """Return what the solver minimises: relative error x energy x input power x sensitivity, in some unit.

    A module without a Hessian, among others with one, counts as if its inputs had the median power of the others.
    """
    # A power of two, so that nothing is rounded: a weight may be as large as a float can be.
    largest = max((weights.get(name, 1.0) for name in measurements), default=1.0)
    unit = math.ldexp(1.0, min(-math.frexp(largest)[1], 1000))
    powers = [m.input_power for m in measurements.values() if m.input_power is not None]
    usual = statistics.median(powers) if powers else 1.0
    return {
        name: tuple(
            error * m.energy * (usual if m.input_power is None else m.input_power) * (weights.get(name, 1.0) * unit)
            for error in m.relative
        )
        for name, m in measurements.items()
    }


def _measure(module: ModulePlan, *, seed: int, hessians: Path | None, options: EncoderOptions) -> list[float]:
    linear = module.linear
    try:
        power = None if hessians is None else input_power(hessians, module.name, linear.in_features)
        sampled = sample_errors(
            linear.matrix, module.candidates, module.rotation, seed=seed, name=module.name, options=options
        )
    except EspalierError as error:
        error.tensor = error.tensor or module.name
        raise
    return [sampled.energy, _NO_HESSIAN if power is None else power, *sampled.relative_mse]


def _is_whole(stored: Sequence[float], module: ModulePlan) -> bool:
    """Tell whether a stored measurement is one of this module: the file may have been damaged."""
    return len(stored) == 2 + len(module.candidates) and all(map(math.isfinite, stored))


def _measurement(stored: Sequence[float]) -> Measurement:
    energy, power, *errors = stored
    return Measurement(tuple(errors), energy, None if power == _NO_HESSIAN else power)
