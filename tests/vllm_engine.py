"""Run vLLM in a process of its own, and transformers on the decoded checkpoint, and compare what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier_format.operations.convert import convert_checkpoint

PROMPTS = ((1, 5, 9, 33), (7, 8), (101, 3, 77, 12, 12, 60, 4))
STEPS = 8
SCRIPT = Path(__file__).parent / "runtimes" / "vllm" / "generate.py"
STAND_INS = Path(__file__).parent / "runtimes" / "vllm" / "stand_ins"
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclass(frozen=True)
class Answer:
    """Tokens chosen greedily after one prompt, their log-probabilities, and how far the runner-up was behind."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]

    def first(self, steps: int) -> Answer:
        """The beginning of the answer."""
        return Answer(self.tokens[:steps], self.logprobs[:steps], self.margins[:steps])


def run(folder: Path, environment: dict[str, str] | None = None, **llm: Any) -> subprocess.CompletedProcess[str]:
    """Load a folder and generate; ``llm`` are arguments of vllm.LLM. The engine runs in the same process."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = {"prompts": PROMPTS, "max_tokens": STEPS, "llm": llm}
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(options)],
        env={**os.environ, **settings, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def generate(folder: Path, environment: dict[str, str] | None = None, **llm: Any) -> list[Answer]:
    """Return what vLLM generates after each of ``PROMPTS``."""
    process = run(folder, environment, **llm)
    assert process.returncode == 0, process.stderr[-6000:]
    answers = json.loads(next(line for line in process.stdout.splitlines() if line.startswith('[{"tokens": ')))
    return [Answer(**answer) for answer in answers]


def refusal(folder: Path, environment: dict[str, str] | None = None, **llm: Any) -> str:
    """Return what vLLM prints when it refuses a folder."""
    process = run(folder, environment, **llm)
    assert process.returncode != 0, "vLLM has loaded it"
    return process.stdout + process.stderr


def reference(folder: Path, decoded: Path, dtype: str = "fp32") -> list[Answer]:
    """Return what transformers generates from the decoded checkpoint, step by step without a cache."""
    import torch
    import transformers

    convert_checkpoint(folder, decoded, to="hf", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        logprobs, margins = [], []
        for _ in range(STEPS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            best, second = logits.topk(2).values.tolist()
            tokens.append(int(logits.argmax()))
            logprobs.append(best)
            margins.append(best - second)
        answers.append(Answer(tokens[len(prompt) :], logprobs, margins))
    return answers


def assert_same(found: Sequence[Answer], expected: Sequence[Answer], tolerance: float, least: int) -> None:
    """Compare tokens, and log-probabilities within ``tolerance``.

    Where the expected token is ahead of the next by less than twice the tolerance, another may be chosen, and the rest
    of that answer cannot be compared. ``least`` tokens must be equal in all.
    """
    equal = 0
    for answer, other in zip(found, expected, strict=True):
        for step in range(len(other.tokens)):
            assert abs(answer.logprobs[step] - other.logprobs[step]) <= tolerance, (answer, other)
            if answer.tokens[step] != other.tokens[step]:
                assert other.margins[step] < 2 * tolerance, (answer, other)
                break
            equal += 1
    assert equal >= least, f"only {equal} tokens are equal"
