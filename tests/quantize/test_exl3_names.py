"""Plain tensors that an EXL3 reader would take for a part of a module: refused, and never written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import MARKERS, Draft, Exl3Module, Module, Tensor, espalier_draft, exl3_draft, llama_config
from quantize_cases import dense_draft, moe_draft, write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.exl3_names import MODULE_KINDS
from espalier_format.errors import UnexpectedTensorError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.quantize import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("fake_encoder")

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
EXPERT = "model.language_model.layers.0.mlp.experts.2.gate_proj"
BELONGS = "in EXL3 this plain tensor would belong to the quantized module"


def part(kind: str) -> Tensor:
    """A tensor that EXL3 could have as this part of a module of 128 x 128."""
    if kind in MARKERS:
        return Tensor.of(np.array(MARKERS[kind], np.uint32).view(np.int32), "I32")
    if kind == "trellis":
        return Tensor.of(np.zeros((8, 8, 32)), "I16")
    return Tensor.of(np.ones(128), "F16") if kind.endswith("h") else Tensor.of(np.zeros(8), "I16")


def espalier() -> Draft:
    """``up_proj`` is encoded anew, ``down_proj`` kept."""
    modules = [Module(UP, 128, 256, "e2m1@2"), Module(DOWN, 256, 128, "exl3-mcg@3")]
    return espalier_draft(modules, (), config=llama_config(hidden=128, intermediate=256))


@pytest.mark.parametrize("kind", sorted(MODULE_KINDS))
def test_a_plain_tensor_with_the_name_of_a_part(kind: str, tmp_path: Path) -> None:
    """Of a module that is encoded, whole or a part of a fused tensor, and of one that is kept."""
    cases = [
        (dense_draft(hidden=128), UP, UP),
        (moe_draft(), EXPERT, "*.experts.*"),
        (espalier(), UP, UP),
        (espalier(), DOWN, UP),
    ]
    for number, (draft, module, pattern) in enumerate(cases):
        recipe = write_recipe(tmp_path, f'match = "{pattern}"\ncodebook = "exl3-3inst@4"')
        draft[f"{module}.{kind}"] = part(kind)
        source = draft.write(tmp_path / f"m{number}")
        with open_checkpoint(source) as checkpoint:
            assert f"{module}.{kind}" in checkpoint.plain
        with pytest.raises(UnexpectedTensorError, match=f"{BELONGS} {module}") as caught:
            quantize_checkpoint(source, tmp_path / "out", recipe=recipe, to="exl3")
        assert caught.value.tensor == f"{module}.{kind}"
        assert caught.value.path is not None
        assert str(source) in caught.value.path
        assert not (tmp_path / "out").exists()


ORPHANS = [
    ("trellis", (8, 8, 32)),
    ("trellis", (8,)),
    ("suh", (128,)),
    ("svh", (128,)),
    ("su", (8,)),
    ("sv", (8,)),
]
"""Parts without the others: open_checkpoint refuses an EXL3 checkpoint with one of them."""


@pytest.mark.parametrize(("kind", "shape"), ORPHANS)
def test_a_part_of_no_module(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    orphan = Tensor.of(np.zeros(shape), "I16")
    recipe = write_recipe(tmp_path, f'match = "{UP}"\ncodebook = "exl3-3inst@4"')
    for number, draft in enumerate((dense_draft(hidden=128), espalier())):
        draft[f"other.{kind}"] = orphan
        with pytest.raises(UnexpectedTensorError, match="in EXL3 this plain tensor would be a part of a module"):
            quantize_checkpoint(draft.write(tmp_path / f"m{number}"), tmp_path / "out", recipe=recipe, to="exl3")
    only = espalier_draft([Module(DOWN, 256, 128, "exl3-mcg@3")], (), config=llama_config())
    only[f"other.{kind}"] = orphan
    with pytest.raises(UnexpectedTensorError, match="would be a part of a module"):
        convert_checkpoint(only.write(tmp_path / "only"), tmp_path / "out", to="exl3")
    assert not (tmp_path / "out").exists()


def test_what_an_exl3_reader_leaves_alone(tmp_path: Path) -> None:
    """A row table with its scales, and a marker of nothing."""
    recipe = write_recipe(tmp_path, f'match = "{UP}"\ncodebook = "exl3-3inst@4"')
    exl3 = exl3_draft([Exl3Module(UP, 128, 256, 2)], config=llama_config(hidden=128, intermediate=256))
    for number, draft in enumerate((dense_draft(hidden=128), espalier(), exl3)):
        draft["table.trellis"] = Tensor.of(np.zeros((16, 32)), "I16")
        draft["table.suh"] = Tensor.of(np.ones(16), "F16")
        draft["other.mcg"] = part("mcg")
        quantize_checkpoint(draft.write(tmp_path / f"m{number}"), tmp_path / f"out{number}", recipe=recipe, to="exl3")
        with open_checkpoint(tmp_path / f"out{number}") as made:
            assert made.modules[UP].codebook.name == "exl3-3inst@4"
            assert {"table.trellis", "table.suh", "other.mcg"} <= set(made.plain)
