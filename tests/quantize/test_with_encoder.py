"""Quantization with the real encoder, on models small enough for it: the weights, and that transformers loads them.

Without numba this would take half an hour; only the test of the numpy back end runs then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Tensor
from hf_models import DELTANET, MOE, SHARED, VISION, VISION_AUTO, Family, save_model
from quantize_cases import dense_draft, moe_draft, moe_tensors, values, widened, write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.container.writer import CheckpointWriter
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="the numpy back end is too slow for this")

BANK = "model.language_model.layers.0.mlp.experts"
SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 70,
}  # fmt: skip
LLAMA = Family("llama", {**SMALL, "tie_word_embeddings": True})
QWEN = Family(
    "qwen3_5_moe",
    {"vision_config": {**VISION, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}},
    {**DELTANET, **MOE, **SHARED, **SMALL, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
     "linear_num_value_heads": 2, "linear_num_key_heads": 2},
    VISION_AUTO,
)  # fmt: skip


def _relative(decoded: np.ndarray, true: np.ndarray) -> float:
    difference = decoded.astype(np.float64) - true
    return float((difference**2).sum() / (true.astype(np.float64) ** 2).sum())


def _true_weights() -> dict[str, np.ndarray]:
    """The weights of `moe_tensors` per module, cut out of the fused tensors by hand."""
    tensors = moe_tensors(experts=2)
    gate_up, down = widened(tensors[f"{BANK}.gate_up_proj"]), widened(tensors[f"{BANK}.down_proj"])
    weights = {name.removesuffix(".weight"): widened(t) for name, t in tensors.items() if t.dtype == "BF16"}
    for expert in range(2):
        weights[f"{BANK}.{expert}.gate_proj"] = gate_up[expert, :32]
        weights[f"{BANK}.{expert}.up_proj"] = gate_up[expert, 32:]
        weights[f"{BANK}.{expert}.down_proj"] = down[expert]
    return weights


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with fused experts, and what a recipe with a solver makes of it, on two threads."""
    folder = tmp_path_factory.mktemp("quantized")
    source = moe_draft(experts=2).write(folder / "m")
    recipe = write_recipe(
        folder,
        f'match = "{BANK}.*"\ncodebook = ["e2m1@1", "e2m1@2", "int5@3"]\naverage = 2.0',
        'match = ["*.shared_expert.*", "*.in_proj_qkv"]\ncodebook = "int6@4"',
        'match = "lm_head"\ncodebook = "int8@6"',
    )
    quantize_checkpoint(source, folder / "out", recipe=recipe, threads=2, report=folder / "report.json")
    return source, folder


@needs_numba
def test_every_module_is_near_its_weight(quantized: tuple[Path, Path]) -> None:
    """The error is that of the codebook on normal numbers, give or take what a few tiles vary, and is reported."""
    _, folder = quantized
    expected = {"1": 0.26, "2": 0.067, "3": 0.017, "4": 0.0043, "6": 0.00028}
    true = _true_weights()
    report = {module["name"]: module for module in json.loads((folder / "report.json").read_text())["modules"]}
    with open_checkpoint(folder / "out") as made:
        assert len(made.modules) == 9
        for name, module in made.modules.items():
            error = _relative(made.decode(name), true[name])
            # The refit of the scales fits small modules closer.
            assert 0.4 * expected[module.codebook.width] < error < 1.15 * expected[module.codebook.width], name
            assert report[name]["relative_mse"] == pytest.approx(error, rel=1e-4)
            if module.component.value == "experts":
                promised = report[name]["measured"][module.codebook.name]
                assert promised == pytest.approx(expected[module.codebook.width], rel=0.3)


@needs_numba
def test_it_is_verified_and_inspected(quantized: tuple[Path, Path]) -> None:
    _, folder = quantized
    report = verify_checkpoint(folder / "out", deep=True)
    assert report.exit_code == 0
    digests = next(check for check in report.checks if check.name == "digests")
    assert "all compared" in digests.detail
    document = inspect_checkpoint(folder / "out").to_json()
    assert BANK in json.dumps(document)
    block = json.loads((folder / "out" / "config.json").read_text())["quantization_config"]
    # Expert 1 has weights four times as large as expert 0.
    for projection in block["expert_banks"][BANK]["projections"].values():
        widths = [get_codebook(projection["codebooks"][int(c)]).half_steps for c in projection["assignment"]]
        assert widths == sorted(widths)


@needs_numba
@pytest.mark.parametrize("threads", [1])
def test_threads_do_not_change_the_result(threads: int, quantized: tuple[Path, Path], tmp_path: Path) -> None:
    source, folder = quantized
    quantize_checkpoint(source, tmp_path / "out", recipe=folder / "recipe.toml", threads=threads)
    for path in (folder / "out").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_numpy_back_end_gives_the_same(tmp_path: Path) -> None:
    """On a module of a single tile, since numpy takes most of a second for one. Without numba both are numpy."""
    draft = dense_draft()
    draft["model.layers.0.mlp.down_proj.weight"] = Tensor.of(values("tiny", (16, 16)), "F32")
    recipe = write_recipe(tmp_path, 'match = "*.down_proj"\ncodebook = "e2m1@2"\nrotation = 0')
    source = draft.write(tmp_path / "m")
    for backend in ("numpy", "auto"):
        quantize_checkpoint(source, tmp_path / backend, recipe=recipe, backend=backend)
    shard = "model-00001-of-00002.safetensors"
    assert (tmp_path / "numpy" / shard).read_bytes() == (tmp_path / "auto" / shard).read_bytes()


@needs_numba
def test_hessians_lower_the_error_that_they_weigh(tmp_path: Path) -> None:
    draft = dense_draft()
    recipe = write_recipe(tmp_path, 'match = ["*.up_proj", "*.gate_proj"]\ncodebook = "e2m1@2"')
    source = draft.write(tmp_path / "m")
    inputs = values("inputs", (512, 64)) @ np.diag(np.linspace(0.1, 3, 64)) @ values("mix", (64, 64))
    hessian = (inputs.T @ inputs).astype(np.float32)
    hessian = (hessian + hessian.T) / 2
    folder = tmp_path / "hessians"
    name = "model.layers.0.mlp.up_proj"
    with CheckpointWriter(folder) as writer:
        tensors = [
            PlannedTensor("hessian", "F32", (64, 64), lambda: (hessian.tobytes(),)),
            PlannedTensor("count", "I64", (1,), lambda: (np.int64([512]).tobytes(),)),
        ]
        writer.add_shard(f"{name}.safetensors", tensors)
        writer.finish()
    plain = quantize_checkpoint(source, tmp_path / "plain", recipe=recipe)
    aware = quantize_checkpoint(source, tmp_path / "aware", recipe=recipe, hessians=folder)
    assert any("no Hessian of model.layers.0.mlp.gate_proj" in line for line in aware.warnings)

    def loss(out: str) -> float:
        with open_checkpoint(tmp_path / out) as made:
            error = made.decode(name).astype(np.float64) - widened(draft[f"{name}.weight"])
        return float(np.einsum("oi,ij,oj->", error, hessian.astype(np.float64), error))

    assert loss("aware") < 0.8 * loss("plain")
    by_name = {module.name: module for module in aware.modules}
    assert by_name[name].relative_proxy_loss is not None
    assert by_name["model.layers.0.mlp.gate_proj"].relative_proxy_loss is None
    assert all(module.relative_proxy_loss is None for module in plain.modules)


@needs_numba
@pytest.mark.parametrize(
    ("family", "options"),
    [(LLAMA, {}), (QWEN, {"preset_name": "espalier"})],
    ids=["llama", "qwen3_5_moe"],
)
def test_transformers_loads_what_comes_back(family: Family, options: dict[str, Any], tmp_path: Path) -> None:
    """Loaded without missing or unexpected weights, and each weight is what the checkpoint decodes to."""
    transformers = pytest.importorskip("transformers")
    import torch

    save_model(family, tmp_path / "m")
    recipe = None if options else write_recipe(tmp_path, 'match = "*"\ncodebook = "int6@4"')
    quantize_checkpoint(tmp_path / "m", tmp_path / "out", recipe=recipe, **options)
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    convert_checkpoint(tmp_path / "out", tmp_path / "hf", to="hf")
    auto = getattr(transformers, family.auto)
    before = auto.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    after, loading = auto.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    embedding = next(p for name, p in before.named_parameters() if name.endswith("embed_tokens.weight"))
    old = dict(before.named_parameters())
    changed = 0
    for name, parameter in after.named_parameters():
        true = old.get(name, embedding).detach().float().numpy()  # the head was tied
        found = parameter.detach().float().numpy()
        if not np.array_equal(found, true):
            changed += 1
            assert _relative(found, true) < 0.3, name
    # All linear layers of the llama; of the other one, which fuses its experts again, those and not what is kept.
    assert changed == (8 if family is LLAMA else 18)
