"""Time ``espalier-format inspect`` on a compressed-tensors checkpoint of 30,880 packed modules, from start to exit.

``python benchmarks/inspection_packed.py`` builds the checkpoint (40 layers x 256 experts x 3 projections and attention,
3 tensors each) from sparse files in a temporary folder, runs the command several times and prints the times;
``--write`` also writes ``benchmarks/results/inspect-packed.md``. Limit: 1.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import inspection
from inspection import EXPERTS, HIDDEN, LAYERS, LAYERS_PER_SHARD, LIMIT_SECONDS, PROJECTIONS, VOCABULARY, Tensors

GROUP = 128
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
TARGETS = {
    "one class": ["Linear"],
    "expressions": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"re:.*self_attn\.(q|k|v|o)_proj$"],
}
IGNORED = [
    "lm_head", "re:.*mlp.gate$", "re:.*shared_expert.*", "re:.*linear_attn.*", "re:.*visual.*", "re:^mtp.*",
]  # fmt: skip
inspection.ITEM_BYTES.update(I32=4, I64=8)


def main() -> int:
    """Build, time, print; return 1 if a median is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/inspect-packed.md")
    options = parser.parse_args()
    times = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, targets in TARGETS.items():
            tensors = build(Path(scratch), targets)
            times[name] = inspection.measure(Path(scratch), (), options.runs)
    lines = [
        "# inspect of a compressed-tensors checkpoint: from process start to exit",
        "",
        "Made by `python benchmarks/inspection_packed.py --write`:",
        f"{tensors:,} tensors in {LAYERS // LAYERS_PER_SHARD} shards, {options.runs} runs each,",
        f"limit {LIMIT_SECONDS} s, Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}.",
        "",
        "| targets of the config | median s | best s | worst s |",
        "|---|---|---|---|",
        *(
            f"| {name} | {statistics.median(runs):.2f} | {min(runs):.2f} | {max(runs):.2f} |"
            for name, runs in times.items()
        ),
    ]
    print("\n".join(lines))
    if options.write:
        (Path(__file__).parent / "results" / "inspect-packed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(statistics.median(runs) > LIMIT_SECONDS for runs in times.values()))


def build(folder: Path, targets: list[str]) -> int:
    """Write the checkpoint and return its number of tensors; the data of the shards are holes."""
    weight_map: dict[str, str] = {}
    shards = LAYERS // LAYERS_PER_SHARD
    for number in range(shards):
        held: Tensors = {}
        for layer in range(number * LAYERS_PER_SHARD, (number + 1) * LAYERS_PER_SHARD):
            prefix = f"model.language_model.layers.{layer}"
            for expert in range(EXPERTS):
                for name, (inputs, outputs) in PROJECTIONS.items():
                    held |= packed(f"{prefix}.mlp.experts.{expert}.{name}", inputs, outputs)
            for name in "qkvo":
                held |= packed(f"{prefix}.self_attn.{name}_proj", HIDDEN, HIDDEN)
            held[f"{prefix}.mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        if number == shards - 1:
            held["lm_head.weight"] = held["model.language_model.embed_tokens.weight"] = ("BF16", (VOCABULARY, HIDDEN))
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        inspection.write_shard(folder / name, held)
        weight_map |= dict.fromkeys(held, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    groups = {
        f"group_{number}": {"targets": [target], "weights": WEIGHTS, "format": "pack-quantized"}
        for number, target in enumerate(targets)
    }
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    block |= {"ignore": IGNORED, "version": "0.18.0"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "quantization_config": block}))
    return len(weight_map)


def packed(name: str, inputs: int, outputs: int) -> Tensors:
    """Return the three tensors of a module of 4 bits in groups of 128."""
    return {
        f"{name}.weight_packed": ("I32", (outputs, inputs // 8)),
        f"{name}.weight_scale": ("BF16", (outputs, inputs // GROUP)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


if __name__ == "__main__":
    sys.exit(main())
