"""Measure what quantization costs a language model: KL divergence to the unquantized one, on held-out text.

    python benchmarks/quality.py MODEL [--codebooks e2m1@2 exl3-mul1@2 int6@4 exl3-mul1@4] [--work DIR] [--write]

MODEL is a Hugging Face folder of a dense language model. For each codebook all attention and MLP matrices are
quantized to it by ``espalier-format quantize`` (no Hessians; head and embedding stay plain), decoded back to float32
weights by ``convert --to hf``, and run over the text. Grids and EXL3 codebooks go through the same encoder, with the
same rotation and the same seed. The text is this repository's own specification, which no model was trained on.

Reported, per next token: KL(unquantized || quantized) in nats, mean and standard error over windows; how often the
most likely token is the same; perplexity. With --write the table goes to benchmarks/results/quality.md. Needs torch,
transformers and numba.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from decode import cpu_model

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "quality.md"
CODEBOOKS = ("e2m1@2", "exl3-mul1@2", "exl3-mcg@2", "int6@4", "exl3-mul1@4", "exl3-mcg@4")
WINDOW = 512
SEED = 0


@dataclass(frozen=True)
class Divergence:
    """Of one quantized model from the unquantized one."""

    kl: float
    kl_error: float
    same_top: float
    perplexity: float


def held_out_windows(model: Path, windows: int) -> torch.Tensor:
    """Token ids, (windows, WINDOW)."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "spec").glob("*.md")))
    ids = transformers.AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"][0]
    count = min(windows, ids.numel() // WINDOW)
    # Spread over the whole text, so that no page weighs more than another.
    starts = np.linspace(0, ids.numel() - WINDOW, count).astype(int)
    return torch.stack([ids[start : start + WINDOW] for start in starts])


def log_probabilities(model: Path, windows: torch.Tensor) -> list[torch.Tensor]:
    """Log probabilities of the next token, float32 (WINDOW - 1, vocabulary), for each window."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.eval()
    found = []
    with torch.inference_mode():
        for window in windows:
            logits = network(window[None]).logits[0, :-1].float()
            found.append(torch.log_softmax(logits, dim=-1))
    del network
    gc.collect()
    return found


def compare(reference: list[torch.Tensor], other: list[torch.Tensor], windows: torch.Tensor) -> Divergence:
    """Compare two models window by window."""
    divergences, same, losses = [], [], []
    for p, q, window in zip(reference, other, windows, strict=True):
        divergences.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
        same.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        losses.append(float(-q.gather(1, window[1:, None]).double().mean()))
    return Divergence(
        kl=float(np.mean(divergences)),
        kl_error=float(np.std(divergences, ddof=1) / len(divergences) ** 0.5),
        same_top=float(np.mean(same)),
        perplexity=float(np.exp(np.mean(losses))),
    )


def run(*arguments: str | Path) -> None:
    """Run the command line of this project."""
    subprocess.run(
        [sys.executable, "-m", "espalier_format", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL
    )


def quantized(model: Path, codebook: str, work: Path) -> tuple[Path, dict[str, object], float]:
    """Quantize and decode the model; return (folder of float32 weights, report, seconds of the quantization)."""
    recipe = work / "recipe.toml"
    recipe.write_text(f'[[rule]]\ncomponent = ["attention", "mlp"]\ncodebook = "{codebook}"\n', encoding="utf-8")
    started = time.perf_counter()
    run("quantize", model, work / "q", "--recipe", recipe, "--seed", str(SEED), "--no-digests",
        "--report", work / "report.json")  # fmt: skip
    seconds = time.perf_counter() - started
    run("convert", work / "q", work / "hf", "--to", "hf", "--dtype", "fp32")
    return work / "hf", json.loads((work / "report.json").read_text(encoding="utf-8")), seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--codebooks", nargs="+", default=list(CODEBOOKS))
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    windows = held_out_windows(options.model, options.windows)
    reference = log_probabilities(options.model, windows)
    base = compare(reference, reference, windows)
    lines = [
        "# What quantization costs a language model",
        "",
        f"{options.model.name}, attention and MLP matrices quantized to one codebook, head and embedding plain,",
        f"no Hessians, seed {SEED}; {len(windows)} windows of {WINDOW} tokens of this repository's specification.",
        f"{cpu_model()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__},",
        f"transformers {transformers.__version__}. Made by `python benchmarks/quality.py MODEL --write`.",
        "",
        "KL is KL(unquantized || quantized) in nats per next token, ± its standard error over windows.",
        "",
        "| codebook | bits | relative MSE of the weights | KL | same most likely token | perplexity | weights/s |",
        "|---|---|---|---|---|---|---|",
        f"| unquantized | 16 | 0 | 0 | 100 % | {base.perplexity:.2f} | |",
    ]
    print("\n".join(lines), flush=True)
    for codebook in options.codebooks:
        work = Path(tempfile.mkdtemp(prefix="quality-", dir=options.work))
        try:
            folder, report, seconds = quantized(options.model, codebook, work)
            found = compare(reference, log_probabilities(folder, windows), windows)
        finally:
            shutil.rmtree(work)
        weights = sum(module["in_features"] * module["out_features"] for module in report["modules"])
        line = (
            f"| {codebook} | {report['bits']:g} | {report['relative_mse']:.5f} | {found.kl:.4f} ± {found.kl_error:.4f} "
            f"| {found.same_top:.1%} | {found.perplexity:.2f} | {weights / seconds:,.0f} |"
        )
        print(line, flush=True)
        lines.append(line)
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
