"""What decides about the result of a quantization: a run may only go on with the work of one that agrees in it all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from espalier_format.converters.output import this_producer
from espalier_format.converters.source_state import describe_shards, digest
from espalier_format.encoder.hessian import find_hessian

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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
    effort: str,
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
        **_decoding(source),
        "recipe": {"rules": [rule.to_json() for rule in plan.recipe.rules], "modules": digest(repr(modules))},
        "bits": bits,
        "seed": seed,
        "effort": effort,
        "set of Hessians": None if hessians is None else digest(repr(list(_stamps(hessians, plan)))),
        "sensitivity": digest(repr(sorted(weights.items()))),
    }


def _decoding(source: Checkpoint) -> dict[str, object]:
    """Return what config.json, and not a shard, says about how weights are decoded."""
    if source.quantization is not None:
        block = source.quantization.to_json()
        return {"quantization_config": digest(json.dumps([block[key] for key in ("modules", "expert_banks")]))}
    if not source.packed:
        return {}
    schemes = ((m.name, m.scheme.label, m.scheme.reordered, m.packing, m.zero_packing) for m in source.packed.values())
    return {"schemes": digest(repr(list(schemes)))}


def _stamps(folder: Path, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of change of each Hessian that is used."""
    for module in plan.modules:
        path = find_hessian(folder, module.name)
        if path is not None:
            status = path.stat()
            yield module.name, status.st_size, status.st_mtime_ns
