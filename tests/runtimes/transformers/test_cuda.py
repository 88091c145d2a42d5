"""Loaded models on a CUDA device: the kernels of the package in place of the torch fallback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime_models import LLAMA, QWEN35_MOE, BankRecipe, alike, espalier_model, routed

from espalier_format.operations.convert import convert_checkpoint
from espalier_format.runtimes import transformers as runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES: dict[str, Any] = {
    "llama": (LLAMA, None),
    "qwen3_5_moe": (QWEN35_MOE, BankRecipe()),
    "qwen3_5_moe-plain": (QWEN35_MOE, BankRecipe(assignment="3-21")),
}
IDS = torch.arange(3, 35).view(2, 16)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, bank = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return espalier_model(family, folder / "source", bank=bank).write(folder / "espalier")


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids.to(model.device)).logits
    return found.double().cpu()


def on_device(checkpoint: Path, dtype: torch.dtype) -> Any:
    """Load right onto the device where transformers can, which takes accelerate."""
    if find_spec("accelerate") is None:
        return runtime.load(checkpoint, dtype=dtype).to("cuda")
    return runtime.load(checkpoint, dtype=dtype, device_map="cuda")


@pytest.mark.capability("transformers", "dense models, and mixtures of experts of mixed width", device=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_logits(dtype: torch.dtype, checkpoint: Path, tmp_path: Path) -> None:
    """As near to the float32 model as the decoded model on the same device, but for a factor of two.

    A token that is routed otherwise, and what follows it, is another computation, as in the tests on the CPU.
    """
    convert_checkpoint(checkpoint, tmp_path / "hf", to="hf", dtype="fp32")
    decoded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=dtype, experts_implementation="eager"
    )
    model = runtime.load(checkpoint, dtype=dtype).to("cuda")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cuda"}
    true, routes = routed(runtime.load(checkpoint, dtype=torch.float32), IDS)
    found, found_routes = routed(model, IDS.cuda())
    naive, naive_routes = routed(decoded.to("cuda"), IDS.cuda())
    same = alike(routes, [found_routes, naive_routes])
    assert same >= 4
    found, naive, true = found[:, :same], naive[:, :same], true[:, :same]
    ulp = torch.finfo(dtype).eps * true.abs().max()
    assert (found - true).abs().max() <= 2 * (naive - true).abs().max() + ulp


@pytest.mark.capability("transformers", "generate()", device=True)
def test_generate(checkpoint: Path) -> None:
    """In float32 the tokens are those of the CPU; in float16 those that a forward pass over all of them prefers.

    Not in bfloat16, where the rounding of weights, for as many rows as that pass has, sends tokens to other experts.
    """
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    on_cpu = runtime.load(checkpoint, dtype=torch.float32).generate(IDS, **options)
    options["attention_mask"] = options["attention_mask"].cuda()
    model = on_device(checkpoint, torch.float32)
    assert torch.equal(model.generate(IDS.cuda(), **options).cpu(), on_cpu)
    model = on_device(checkpoint, torch.float16)
    made = model.generate(IDS.cuda(), **options)
    scores = logits(model, made)[:, IDS.shape[1] - 1 : -1]
    chosen = scores.gather(-1, made[:, IDS.shape[1] :, None].cpu())[..., 0]
    assert (scores.amax(-1) - chosen).max() < 0.05 * scores.abs().max()


def test_moving_back_and_forth(checkpoint: Path) -> None:
    model = runtime.load(checkpoint, dtype=torch.float32)
    before = logits(model)
    assert torch.equal(logits(model.to("cuda").to("cpu")), before)
