"""Sources with a plain weight beside the trellis, as spec/espalier-v1.md §5 allows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Bank, Draft, Exl3Module, Module, bf16, espalier_draft, exl3_draft, llama_config
from quantize_cases import stored_block, stored_tensors, write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import SchemaError
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint

pytestmark = pytest.mark.usefixtures("fake_encoder")

CONFIG = {
    **llama_config(hidden=128, intermediate=256),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 3,
}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
BANK = "model.layers.1.mlp.experts"


def exl3() -> Draft:
    modules = [Exl3Module(UP, 128, 256, 2), Exl3Module(DOWN, 256, 128, 3)]
    modules += [Exl3Module(f"{BANK}.{expert}.up_proj", 128, 256, 2) for expert in range(3)]
    return exl3_draft(modules, config=CONFIG)


def espalier() -> Draft:
    bank = Bank(BANK, {"up_proj": (128, 256)}, ("exl3-mcg@2",), "000", (128, 128))
    modules = [Module(UP, 128, 256, "exl3-mcg@2"), Module(DOWN, 256, 128, "exl3-mcg@3")]
    return espalier_draft(modules, [bank], config=CONFIG)


@pytest.mark.parametrize("to", ["espalier", "exl3"])
@pytest.mark.parametrize("draft", [exl3, espalier])
def test_a_copy_beside_every_module(draft: Callable[[], Draft], to: str, tmp_path: Path) -> None:
    """The copy of what is encoded anew is stale and goes; that of what is kept stays as it is."""
    made = draft()
    with open_checkpoint(made.write(tmp_path / "without")) as checkpoint:
        modules = {name: (module.out_features, module.in_features) for name, module in checkpoint.modules.items()}
    for name, shape in modules.items():
        made[f"{name}.weight"] = bf16(np.full(shape, 3.0))
    recipe = write_recipe(tmp_path, f'match = ["{UP}", "{BANK}.0.*", "{BANK}.2.*"]\ncodebook = "exl3-mul1@2"\n'
                                    "rotation = 128")  # fmt: skip
    for source in ("with", "without"):
        made.write(tmp_path / "with")
        quantize_checkpoint(tmp_path / source, tmp_path / f"out-{source}", recipe=recipe, to=to)  # type: ignore[arg-type]
        assert verify_checkpoint(tmp_path / f"out-{source}", deep=True).exit_code == 0
    found, expected = (stored_tensors(tmp_path / f"out-{source}") for source in ("with", "without"))
    kept = [DOWN, f"{BANK}.1.up_proj"]
    copies = {f"{name}.weight": made[f"{name}.weight"] for name in kept}
    assert found.keys() == {*expected, *copies}
    assert all(tensor == {**expected, **copies}[name] for name, tensor in found.items())
    if to == "espalier":
        blocks = [stored_block(tmp_path / f"out-{source}") for source in ("with", "without")]
        for block in blocks:
            del block["source"]
        assert blocks[0] == blocks[1]
        assert set(blocks[0]["expert_banks"]) == {BANK}


def test_a_fused_tensor_beside_quantized_experts(tmp_path: Path) -> None:
    """It is a copy as well, though of several modules, and stays."""
    made = exl3()
    made[f"{BANK}.gate_up_proj"] = bf16(np.ones((3, 512, 128)))
    made[f"{BANK}.down_proj"] = bf16(np.ones((3, 128, 256)))
    recipe = write_recipe(tmp_path, f'match = "{BANK}.*.up_proj"\ncodebook = "e2m1@2"')
    with open_checkpoint(made.write(tmp_path / "m")) as checkpoint:
        assert set(checkpoint.plain) >= {f"{BANK}.gate_up_proj", f"{BANK}.down_proj"}
    quantize_checkpoint(tmp_path / "m", tmp_path / "out", recipe=recipe)
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    stored = stored_tensors(tmp_path / "out")
    assert stored[f"{BANK}.gate_up_proj"].data == made[f"{BANK}.gate_up_proj"].data
    assert not [name for name in stored if name.endswith(".trellis")]


@pytest.mark.parametrize("name", ["model.a\nb.up_proj", "model..up_proj"])
def test_a_name_that_a_config_cannot_hold_is_that_of_a_tensor(name: str, tmp_path: Path) -> None:
    source = exl3_draft([Exl3Module(UP, 128, 256, 2), Exl3Module(name, 128, 256, 2)], config=CONFIG)
    recipe = write_recipe(tmp_path, f'match = "{UP}"\ncodebook = "e2m1@2"')
    with pytest.raises(SchemaError, match="a config cannot hold the name of this module") as caught:
        quantize_checkpoint(source.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    assert caught.value.tensor == name
    assert caught.value.path == str(tmp_path / "m" / "model.safetensors")


def test_a_wrong_block_is_the_fault_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of the source's config.json."""
    monkeypatch.setattr("espalier_format.quantize.documents._ignored", lambda *_: [UP])
    with pytest.raises(RuntimeError, match=r"quantization_config.ignore\[0\]"):
        quantize_checkpoint(exl3().write(tmp_path / "m"), tmp_path / "out", bits=2.5)
