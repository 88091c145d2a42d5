"""What decides about the result of a quantization: a run may only go on with the work of one that agrees in it all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from espalier_format.converters.output import this_producer
from espalier_format.converters.source_state import describe_shards, digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.quantize.plan import Plan


def describe_job(
    source: Checkpoint,
    plan: Plan,
    *,
    bits: float | None,
    seed: int,
    hessians: Path | None,
    weights: Mapping[str, float],
) -> dict[str, object]:
    """Return a JSON object whose members are equal for two runs exactly where they may share their work.

    Files are compared by name, size and time of change, shards by their headers too.
    """
    modules = [
        [
            module.name,
            module.linear.out_features,
            module.linear.in_features,
            *module.rotation,
            [codebook.name for codebook in module.candidates],
            module.group,
        ]
        for module in plan.modules
    ]
    return {
        "command": "quantize",
        "version": this_producer().version,
        "format": "exl3" if plan.exl3 else "espalier",
        "source": describe_shards(source),
        **_schemes(source),
        "recipe": {"rules": [rule.to_json() for rule in plan.recipe.rules], "modules": digest(repr(modules))},
        "bits": bits,
        "seed": seed,
        "set of Hessians": None if hessians is None else digest(repr(_listing(hessians))),
        "sensitivity": digest(repr(sorted(weights.items()))),
    }


def _schemes(source: Checkpoint) -> dict[str, object]:
    """Return what config.json, and not a shard, says about how weights are decoded."""
    if not source.packed:
        return {}
    schemes = ((m.name, m.scheme.label, m.scheme.reordered, m.packing, m.zero_packing) for m in source.packed.values())
    return {"schemes": digest(repr(list(schemes)))}


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
