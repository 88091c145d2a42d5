"""EXL3 folders that `quantize` writes, loaded by exllamav3: its logits are those of the weights that we decode.

Runs where exllamav3 is installed, on a CUDA device.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.quantize import quantize_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("exllamav3") is None, reason="needs exllamav3"),
    pytest.mark.filterwarnings("ignore"),  # of exllamav3 and what it imports
]
DEMO = Path(__file__).parents[2] / "espalier_format" / "demo_data" / "llama-3.0-mcg"
IDS = np.random.default_rng(0).integers(0, 256, (1, 48))


@pytest.fixture(scope="module", params=["dense", "experts"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with unquantized weights: a real small one, or a mixture of random experts."""
    folder: Path = tmp_path_factory.mktemp(request.param) / "plain"
    if request.param == "dense":
        convert_checkpoint(str(DEMO), str(folder), to="hf", dtype="fp16")
        return folder
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        initializer_range=0.1, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).half().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["num_experts"] = written.pop("num_local_experts")  # as published: exllamav3 does not know the new name
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def logits_of_decoded(folder: Path, to: Path) -> Any:
    convert_checkpoint(str(folder), str(to), to="hf", dtype="fp16")
    model = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).cuda()
    with torch.no_grad():
        return model(torch.from_numpy(IDS).cuda()).logits[0].double().cpu().numpy()


def logits_in_exllamav3(folder: Path) -> Any:
    from exllamav3 import Config, Model

    model = Model.from_config(Config.from_directory(str(folder)))
    model.load(device="cuda:0", progressbar=False)
    logits = model.forward(torch.from_numpy(IDS), {"attn_mode": "flash_attn_nc"})
    model.unload()
    return logits[0].double().cpu().numpy()


@pytest.mark.parametrize("bits", [2, 2.5, 3, 4.5, 6, 8])
def test_logits_are_those_of_the_decoded_weights(plain: Path, bits: float, tmp_path: Path) -> None:
    """exllamav3 computes in float16, which is good for a few thousandths; what 8 bits lose is ten times that.

    The median of all tokens, since among experts that are nearly as good as each other either may be chosen.
    """
    folder = tmp_path / "exl3"
    quantize_checkpoint(str(plain), str(folder), to="exl3", bits=bits, backend="cuda")
    expected = logits_of_decoded(folder, tmp_path / "decoded")
    got = logits_in_exllamav3(folder)[:, : expected.shape[1]]
    differences = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    print(f"{plain.parent.name} at {bits} bits: {np.median(differences):.5f}, at most {differences.max():.5f}")
    assert np.median(differences) < 0.005


def test_a_conversion_there_and_back_is_the_same_model(tmp_path: Path) -> None:
    """Also through Espalier: what exllamav3 computes from the folder that comes out is bit for bit what it was."""
    convert_checkpoint(str(DEMO), str(tmp_path / "espalier"), to="espalier")
    convert_checkpoint(str(tmp_path / "espalier"), str(tmp_path / "exl3"), to="exl3")
    assert np.array_equal(logits_in_exllamav3(tmp_path / "exl3"), logits_in_exllamav3(DEMO))
