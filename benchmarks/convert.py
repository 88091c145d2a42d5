"""Time the lossless conversion of a large EXL3 checkpoint against ``cp --reflink=never`` plus ``sync``.

``python benchmarks/convert.py`` makes an EXL3 checkpoint of 4 GB (random codes, so that nothing can be compressed or
left out as a hole; half of it in dense layers, half in layers of 128 experts, the true sizes of a Qwen3-MoE), then
copies it, converts it to Espalier and converts the result back, in turn, several rounds; each run starts with its input
out of the page cache (``--cache warm``: in it) and ends with ``sync``. Prints medians, rates, and the peak of anonymous
memory of the converting processes; ``--write`` also writes ``benchmarks/results/convert.md``. Goal: 70 % of the rate of
cp, under 500 MB.

The folder given by ``--dir`` needs room for four copies; everything made there is removed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.container.writer import CheckpointWriter

HIDDEN, INTERMEDIATE, EXPERT, EXPERTS, VOCABULARY = 2048, 14336, 768, 128, 32000
HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 32, 4, 128
ATTENTION = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_SIZE),
    "self_attn.k_proj": (HIDDEN, KEY_VALUE_HEADS * HEAD_SIZE),
    "self_attn.v_proj": (HIDDEN, KEY_VALUE_HEADS * HEAD_SIZE),
    "self_attn.o_proj": (HEADS * HEAD_SIZE, HIDDEN),
}
DENSE = ATTENTION | {
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
SPARSE = ATTENTION | {
    f"mlp.experts.{expert}.{name}": (EXPERT, HIDDEN) if name == "down_proj" else (HIDDEN, EXPERT)
    for expert in range(EXPERTS)
    for name in ("gate_proj", "up_proj", "down_proj")
}
BITS, HEAD_BITS = 4, 6
MUL1 = 0x83DCD12D
SHARD_BYTES = 1_000_000_000
PIECE = 4 * 1024 * 1024
GOAL_RATE, GOAL_MEMORY = 0.70, 500_000_000


def main() -> int:
    """Build, time, print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="where to work (the system's temporary folder)")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=["cold", "warm"], default="cold", help="inputs before each run")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/convert.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="espalier-benchmark-") as scratch:
        result = measure(Path(scratch), options.gigabytes, options.rounds, cold=options.cache == "cold")
    report, reached = result
    text = "\n".join(report) + "\n"
    print(text, end="")
    if options.write:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        (results / "convert.md").write_text(text, encoding="utf-8")
    return 0 if reached else 1


def measure(scratch: Path, gigabytes: float, rounds: int, *, cold: bool) -> tuple[list[str], bool]:
    """Run all rounds; return the lines of the report and whether both goals are reached."""
    exl3, espalier, back, copy = (scratch / name for name in ("exl3", "espalier", "back", "copy"))
    build(exl3, gigabytes)
    size = folder_bytes(exl3)
    jobs: dict[str, tuple[Path, Path, list[str]]] = {
        "cp": (exl3, copy, ["cp", "-r", "--reflink=never", str(exl3), str(copy)]),
        "EXL3 to Espalier": (exl3, espalier, converting(exl3, espalier, "espalier")),
        "Espalier to EXL3": (espalier, back, converting(espalier, back, "exl3")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    memory = dict.fromkeys(jobs, 0)
    for number in range(rounds):
        # After the first round, which makes all folders, the order changes: no job always follows the same other one.
        order = list(jobs)[number % 3 :] + list(jobs)[: number % 3]
        for name in order:
            source, destination, command = jobs[name]
            shutil.rmtree(destination, ignore_errors=True)
            prepare(source, cold=cold)
            elapsed, peak = timed(command)
            seconds[name].append(elapsed)
            memory[name] = max(memory[name], peak)
        print(f"round {number + 1}: {', '.join(f'{name} {times[-1]:.2f} s' for name, times in seconds.items())}")
        if number == 0:
            check_identical(exl3, back)
    shards = len(list(exl3.glob("*.safetensors")))
    tensors = len(json.loads((exl3 / "model.safetensors.index.json").read_text())["weight_map"])
    base = statistics.median(seconds["cp"])
    converters = [name for name in jobs if name != "cp"]
    slowest = min(base / statistics.median(seconds[name]) for name in converters)
    most = max(memory[name] for name in converters)
    lines = [
        "# convert: against cp and sync on the same disk",
        "",
        f"{size / 1e9:.2f} GB and {tensors:,} tensors in {shards} shards, {rounds} rounds in turn,",
        f"inputs {'out of' if cold else 'in'} the page cache, with SHA-256 of every file, without decode digests;",
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()};",
        "made by `python benchmarks/convert.py --write`. The EXL3 files that came back were identical, byte for byte.",
        "",
        "| job | median s | best s | worst s | MB/s | rate against cp | peak anonymous memory |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} "
            f"| {size / 1e6 / statistics.median(times):.0f} | {100 * base / statistics.median(times):.0f} % "
            f"| {memory[name] / 1e6:.0f} MB |"
            for name, times in seconds.items()
        ),
        "",
        f"Goal: at least {GOAL_RATE:.0%} of the rate of cp, under {GOAL_MEMORY / 1e6:.0f} MB.",
    ]
    return lines, slowest >= GOAL_RATE and most < GOAL_MEMORY


def converting(source: Path, destination: Path, target: str) -> list[str]:
    """Return the command of a conversion."""
    return [sys.executable, "-m", "espalier_format", "convert", str(source), str(destination), "--to", target]


def timed(command: list[str]) -> tuple[float, int]:
    """Run a command and sync; return the seconds of both and the peak of the process's anonymous memory in bytes."""
    begin = time.perf_counter()
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                peak = max(peak, anonymous_memory(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        process.wait()
        done.set()
        watcher.join()
    os.sync()
    elapsed = time.perf_counter() - begin
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} returned {process.returncode}")
    return elapsed, peak


def anonymous_memory(pid: int) -> int:
    """Return RssAnon of a process in bytes, 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def prepare(folder: Path, *, cold: bool) -> None:
    """Have all writes done, and the files of a folder out of the page cache, or in it."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(PIECE):
                    pass


def check_identical(first: Path, second: Path) -> None:
    """Stop if the round trip has changed a byte; the manifest is all that may be added."""
    names = {path.name for path in first.iterdir()}
    if {path.name for path in second.iterdir()} - names - {"espalier_manifest.json"}:
        raise SystemExit("the round trip has added files")
    for name in sorted(names):
        if subprocess.run(["cmp", str(first / name), str(second / name)], check=False).returncode:
            raise SystemExit(f"the round trip has changed {name}")


def folder_bytes(folder: Path) -> int:
    """Return the sizes of all files of a folder, added up."""
    return sum(path.stat().st_size for path in folder.iterdir())


def build(folder: Path, gigabytes: float) -> None:
    """Write the EXL3 checkpoint, in the form exllamav3 gives it; half of the size is dense layers, half experts."""
    rng = np.random.default_rng(0)
    dense = max(1, round(gigabytes / 2 * 1e9 / layer_bytes(DENSE)))
    sparse = max(1, round(gigabytes / 2 * 1e9 / layer_bytes(SPARSE)))
    groups = [[halves("model.embed_tokens.weight", (VOCABULARY, HIDDEN), rng)]]
    groups += [
        decoder_layer(f"model.layers.{layer}", DENSE if layer < dense else SPARSE, rng)
        for layer in range(dense + sparse)
    ]
    groups.append([halves("model.norm.weight", (HIDDEN,), rng), *module("lm_head", HIDDEN, VOCABULARY, HEAD_BITS, rng)])
    shards: list[list[PlannedTensor]] = [[]]
    for group in groups:
        if sum(tensor_size(tensor) for tensor in shards[-1] + group) > SHARD_BYTES:
            shards.append([])
        shards[-1] += group
    with CheckpointWriter(folder) as writer:
        for number, tensors in enumerate(shards, 1):
            writer.add_shard(f"model-{number:05}-of-{len(shards):05}.safetensors", tensors, pad=False)
        writer.add_bytes("config.json", json.dumps(config(dense, sparse), indent=4).encode())
        writer.add_bytes("tokenizer_config.json", b"{}")
        writer.finish(index=True)


def layer_bytes(linears: dict[str, tuple[int, int]]) -> int:
    """Return the bytes of the codes of a layer."""
    return sum(inputs * outputs for inputs, outputs in linears.values()) * BITS // 8


def tensor_size(tensor: PlannedTensor) -> int:
    """Return the bytes of a tensor."""
    return math.prod(tensor.shape) * (4 if tensor.dtype == "I32" else 2)


def decoder_layer(prefix: str, linears: dict[str, tuple[int, int]], rng: np.random.Generator) -> list[PlannedTensor]:
    """Return the tensors of a layer: norms, router, linears."""
    tensors = [
        halves(f"{prefix}.{name}.weight", (HIDDEN,), rng) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors += [halves(f"{prefix}.self_attn.{name}.weight", (HEAD_SIZE,), rng) for name in ("q_norm", "k_norm")]
    if linears is SPARSE:
        tensors.append(halves(f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN), rng))
    for name, (inputs, outputs) in linears.items():
        tensors += module(f"{prefix}.{name}", inputs, outputs, BITS, rng)
    return tensors


def module(name: str, inputs: int, outputs: int, bits: int, rng: np.random.Generator) -> list[PlannedTensor]:
    """Return the tensors of a quantized module; any codes are valid, for every ring of bits is a ring of states."""
    shape = (inputs // 16, outputs // 16, 16 * bits)
    return [
        halves(f"{name}.suh", (inputs,), rng),
        halves(f"{name}.svh", (outputs,), rng),
        PlannedTensor(f"{name}.mul1", "I32", (), lambda: [MUL1.to_bytes(4, "little")]),
        PlannedTensor(f"{name}.trellis", "I16", shape, lambda: random_bytes(inputs * outputs * bits // 8, rng)),
    ]


def halves(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> PlannedTensor:
    """Return an F16 tensor of finite random values."""
    scale = np.float16(0.02)

    def chunks() -> Iterator[bytes]:
        left = math.prod(shape)
        while left:
            count = min(left, PIECE)
            yield (rng.standard_normal(count, np.float32).astype(np.float16) * scale).tobytes()
            left -= count

    return PlannedTensor(name, "F16", shape, chunks)


def random_bytes(size: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield `size` random bytes."""
    while size:
        yield rng.bytes(min(size, PIECE))
        size -= min(size, PIECE)


def config(dense: int, sparse: int) -> dict[str, object]:
    """Return config.json of a quantized Qwen3-MoE whose first layers are dense."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 8192,
        "mlp_only_layers": list(range(dense)),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": EXPERT,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": dense + sparse,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.6.5",
            "bits": float(BITS),
            "head_bits": HEAD_BITS,
            "calibration": {"rows": 250, "cols": 2048},
            "out_scales": "auto",
            "codebook": "mul1",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
