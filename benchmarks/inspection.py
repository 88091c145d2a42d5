"""Time ``espalier-format inspect`` on a checkpoint of 92,160 expert tensors, from process start to exit.

``python benchmarks/inspection.py`` builds the checkpoint (40 layers x 256 experts x 3 projections x 3 tensors, widths 1
to 3 mixed) from sparse files in a temporary folder, runs the command several times and prints the times; ``--write``
also writes ``benchmarks/results/inspect.md``. Limit: 1.5 s, plain and ``--json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

from espalier_format.codec.codebook import CODEBOOKS

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY = 40, 256, 2048, 512, 151_936
PROJECTIONS = {
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}
CHOICES = ("e2m1@1", "e2m1@2", "int5@3")
HEAD = "int8@6"
LAYERS_PER_SHARD = 5
LIMIT_SECONDS = 1.5
ITEM_BYTES = {"I16": 2, "F16": 2, "BF16": 2}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def main() -> int:
    """Build, time, print; return 1 if a median is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/inspect.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tensors = build(Path(scratch))
        variants = {"inspect SRC": (), "inspect SRC --json": ("--json",), "inspect SRC --experts": ("--experts",)}
        times = {name: measure(Path(scratch), extra, options.runs) for name, extra in variants.items()}
    lines = [
        "# inspect: from process start to exit",
        "",
        "Made by `python benchmarks/inspection.py --write`:",
        f"{tensors:,} tensors in {LAYERS // LAYERS_PER_SHARD + 1} shards,",
        f"{options.runs} runs each, limit {LIMIT_SECONDS} s,",
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}.",
        "",
        "| command | median s | best s | worst s |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {statistics.median(runs):.2f} | {min(runs):.2f} | {max(runs):.2f} |"
            for name, runs in times.items()
        ),
    ]
    print("\n".join(lines))
    if options.write:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        (results / "inspect.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(statistics.median(runs) > LIMIT_SECONDS for runs in times.values()))


def measure(folder: Path, extra: tuple[str, ...], runs: int) -> list[float]:
    """Return the wall time of each run, after one that warms the page cache."""
    command = [sys.executable, "-m", "espalier_format", "inspect", str(folder), *extra]
    seconds = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def build(folder: Path) -> int:
    """Write the checkpoint and return its number of tensors; the data of the shards are holes, so it costs no disk."""
    draw = random.Random(0)
    banks: dict[str, object] = {}
    codes = weights = tensors = 0
    weight_map: dict[str, str] = {}
    shards = LAYERS // LAYERS_PER_SHARD + 1
    for number in range(shards):
        held: Tensors = {}
        for layer in range(number * LAYERS_PER_SHARD, min((number + 1) * LAYERS_PER_SHARD, LAYERS)):
            bank, held_here, layer_codes = expert_bank(f"model.layers.{layer}.mlp.experts", draw)
            banks[f"model.layers.{layer}.mlp.experts"] = bank
            held |= held_here
            held[f"model.layers.{layer}.input_layernorm.weight"] = ("BF16", (HIDDEN,))
            codes += layer_codes
            weights += EXPERTS * 3 * HIDDEN * INTERMEDIATE
        if number == shards - 1:
            held |= module("lm_head", HIDDEN, VOCABULARY, HEAD)
            held["model.embed_tokens.weight"] = ("BF16", (VOCABULARY, HIDDEN))
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_shard(folder / name, held)
        weight_map |= dict.fromkeys(held, name)
        tensors += len(held)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config(banks, float(round(Fraction(codes, weights), 6)))))
    return tensors


def expert_bank(prefix: str, draw: random.Random) -> tuple[dict[str, object], Tensors, int]:
    """Return the config entry of one bank, its tensors, and the bits of its codes."""
    held: Tensors = {}
    projections: dict[str, object] = {}
    codes = 0
    chosen = {name: draw.choices(range(len(CHOICES)), k=EXPERTS) for name in PROJECTIONS}
    for expert in range(EXPERTS):
        for name, (inputs, outputs) in PROJECTIONS.items():
            codebook = CHOICES[chosen[name][expert]]
            held |= module(f"{prefix}.{expert}.{name}", inputs, outputs, codebook)
            codes += inputs * outputs * CODEBOOKS[codebook].half_steps // 2
    for name, (inputs, outputs) in PROJECTIONS.items():
        projections[name] = {
            **module_spec(inputs, outputs),
            "codebooks": list(CHOICES),
            "assignment": "".join(map(str, chosen[name])),
        }
    return {"num_experts": EXPERTS, "projections": projections}, held, codes


def module(name: str, inputs: int, outputs: int, codebook: str) -> Tensors:
    """Return the three tensors of a quantized module."""
    return {
        f"{name}.esp_suh": ("F16", (inputs,)),
        f"{name}.esp_svh": ("F16", (outputs,)),
        f"{name}.esp_trellis": ("I16", (inputs // 16, outputs // 16, CODEBOOKS[codebook].halfwords_per_tile)),
    }


def module_spec(inputs: int, outputs: int) -> dict[str, object]:
    """Return what config.json says of a module's size."""
    rotation = {"in": 128, "out": 128}
    return {"in_features": inputs, "out_features": outputs, "rotation": rotation, "size_source": "exact"}


def config(banks: dict[str, object], bits: float) -> dict[str, object]:
    """Return config.json."""
    block = {
        "quant_method": "espalier",
        "format_version": 1,
        "required_features": [],
        "producer": {"name": "espalier-format", "version": "0.1.0"},
        "bits": bits,
        "head_bits": float(CODEBOOKS[HEAD].bits),
        "codebooks": {
            name: {"multiplier": CODEBOOKS[name].multiplier_hex, "sha256": CODEBOOKS[name].sha256}
            for name in (*CHOICES, HEAD)
        },
        "modules": {"lm_head": {"codebook": HEAD, **module_spec(HIDDEN, VOCABULARY)}},
        "expert_banks": banks,
        "ignore": [],
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "quantization_config": block}


def write_shard(path: Path, held: Tensors) -> None:
    """Write a header and a hole of the right size behind it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "espalier_format_version": "1"}}
    end = 0
    for name, (dtype, shape) in held.items():
        begin = end
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        end += size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    sys.exit(main())
