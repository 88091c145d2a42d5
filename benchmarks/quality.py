"""Measure what quantization costs a language model: KL divergence to the unquantized one, on held-out text.

    python benchmarks/quality.py MODEL [--codebooks e2m1@2 exl3-mul1@2 ...] [--jobs N] [--device cuda] [--write]

MODEL is a Hugging Face folder of a dense language model. For each codebook all attention and MLP matrices are
quantized to it as by ``espalier-format quantize`` (no Hessians; head and embedding stay plain), decoded back to float32
weights as by ``convert --to hf``, and run over the text. Grids and EXL3 codebooks go through the same encoder, with the
same rotation and the same seed. --jobs is how many quantizations run side by side, --device where the models run. The
text is this repository's own specification, which no model was trained on.

Reported, per next token: KL(unquantized || quantized) in nats, mean and standard error over windows; how often the
most likely token is the same; perplexity. With --write the table goes to benchmarks/results/quality.md. Needs torch
and transformers; without a GPU, two cores take a quarter of an hour for each codebook of a model of 135M.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from decode import cpu_model

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "quality.md"
CODEBOOKS = (
    *("e2m1@2", "exl3-mul1@2", "int6@4", "exl3-mul1@4"),
    *("int5@3", "exl3-mul1@3", "int5@2.5", "exl3-mul1@2.5"),
)
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


def log_probabilities(model: Path, windows: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Log probabilities of the next token, float32 (WINDOW - 1, vocabulary), for each window."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    network.eval()
    found = []
    with torch.inference_mode():
        for window in windows.to(device):
            logits = network(window[None]).logits[0, :-1].float()
            found.append(torch.log_softmax(logits, dim=-1))
    del network
    gc.collect()
    return found


def compare(reference: list[torch.Tensor], other: list[torch.Tensor], windows: torch.Tensor) -> Divergence:
    """Compare two models window by window."""
    divergences, same, losses = [], [], []
    for p, q, window in zip(reference, other, windows.to(reference[0].device), strict=True):
        divergences.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
        same.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        losses.append(float(-q.gather(1, window[1:, None]).double().mean()))
    return Divergence(
        kl=float(np.mean(divergences)),
        kl_error=float(np.std(divergences, ddof=1) / len(divergences) ** 0.5),
        same_top=float(np.mean(same)),
        perplexity=float(np.exp(np.mean(losses))),
    )


def quantized(model: Path, codebook: str, root: Path, backend: str, threads: int) -> tuple[Path, dict[str, float]]:
    """Quantize and decode the model, in a process of its own; return (folder of float32 weights, bits and error)."""
    from espalier_format.operations.convert import convert_checkpoint
    from espalier_format.operations.quantize import quantize_checkpoint

    work = root / codebook
    work.mkdir()
    recipe = work / "recipe.toml"
    recipe.write_text(f'[[rule]]\ncomponent = ["attention", "mlp"]\ncodebook = "{codebook}"\n', encoding="utf-8")
    done = quantize_checkpoint(
        model, work / "q", recipe=recipe, seed=SEED, backend=backend, digests=False, threads=threads
    ).to_json()
    convert_checkpoint(work / "q", work / "hf", to="hf", dtype="fp32")
    return work / "hf", {name: float(str(done[name])) for name in ("bits", "relative_mse")}


def header(options: argparse.Namespace, windows: torch.Tensor, base: Divergence) -> str:
    """Say what was measured, where, and begin the table."""
    place = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    return "\n".join(
        (
            "# What quantization costs a language model",
            "",
            f"{options.model.name}, attention and MLP matrices quantized to one codebook, head and embedding plain,",
            f"no Hessians, seed {SEED}; {len(windows)} windows of {WINDOW} tokens of this repository's specification.",
            f"{cpu_model()}, {os.cpu_count()} cores; the models ran on: {place}; Python {platform.python_version()},",
            f"torch {torch.__version__}, transformers {transformers.__version__}. Made by",
            f"`python benchmarks/quality.py MODEL --device {options.device} --jobs {options.jobs} --write`.",
            "",
            "KL is KL(unquantized || quantized) in nats per next token, ± its standard error over windows.",
            "",
            "| codebook | bits | relative MSE of the weights | KL | same most likely token | perplexity |",
            "|---|---|---|---|---|---|",
            f"| unquantized | 16 | 0 | 0 | 100 % | {base.perplexity:.2f} |",
        )
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--codebooks", nargs="+", default=list(CODEBOOKS))
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of torch")
    parser.add_argument("--backend", default="auto", help="of the encoder; never changes the result")
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    threads = max((os.cpu_count() or 1) // options.jobs, 1)
    with tempfile.TemporaryDirectory(prefix="quality-", dir=options.work) as root:
        pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
        running = [
            pool.submit(quantized, options.model, name, Path(root), options.backend, threads)
            for name in options.codebooks
        ]
        windows = held_out_windows(options.model, options.windows)
        reference = log_probabilities(options.model, windows, options.device)
        report = header(options, windows, compare(reference, reference, windows))
        print(report, flush=True)
        for codebook, future in zip(options.codebooks, running, strict=True):
            plain, found = future.result()
            divergence = compare(reference, log_probabilities(plain, windows, options.device), windows)
            shutil.rmtree(plain)
            line = (
                f"| {codebook} | {found['bits']:g} | {found['relative_mse']:.5f} "
                f"| {divergence.kl:.4f} ± {divergence.kl_error:.4f} | {divergence.same_top:.1%} "
                f"| {divergence.perplexity:.2f} |"
            )
            print(line, flush=True)
            report += f"\n{line}"
            if options.write:
                RESULT.parent.mkdir(exist_ok=True)
                RESULT.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
