"""What measuring costs: how often a weight is read, counted and not timed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Exl3Module, exl3_draft, llama_config
from quantize_cases import write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.encoder.options import EncoderOptions
from espalier_format.progress import NullProgress
from espalier_format.quantize.inventory import take_inventory
from espalier_format.quantize.matrices import DecodedMatrix
from espalier_format.quantize.measure import Measurement, measure, weighted_errors
from espalier_format.quantize.plan import make_plan
from espalier_format.quantize.recipe import read_recipe
from espalier_format.quantize.state import QuantizeState

NAME = "model.layers.0.mlp.down_proj"


NINE = [f"exl3-mul1@{bits}" for bits in ("1", "1.5", "2", "2.5", "3", "3.5", "4", "5", "6")]


@pytest.mark.parametrize("codebooks", [["e2m1@1", "e2m1@2"], NINE])
def test_passes_over_a_weight_do_not_grow_with_its_candidates(
    codebooks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four that choose the channel scales, of which the first adds up the squares; the sample is at most another."""
    module = Exl3Module(NAME, 512, 1024, 2)
    source = exl3_draft([module], config=llama_config(hidden=1024, intermediate=512)).write(tmp_path / "m")
    read = [0]
    rows = DecodedMatrix.rows

    def counted(self: DecodedMatrix, start: int, stop: int) -> Any:
        read[0] += (stop - start) * self.shape[1]
        return rows(self, start, stop)

    monkeypatch.setattr(DecodedMatrix, "rows", counted)
    recipe = read_recipe(write_recipe(tmp_path, f'match = "*"\ncodebook = {codebooks!r}'))
    (tmp_path / "state").mkdir()
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(take_inventory(checkpoint, exl3=False), recipe, exl3=False)
        state = QuantizeState(tmp_path / "state", {})
        options = EncoderOptions()
        found = measure(plan.modules, state, seed=0, hessians=None, options=options, progress=NullProgress())[NAME]
        whole = checkpoint.decode(NAME)
    assert 4 * whole.size < read[0] <= 5 * whole.size
    assert len(found.relative) == len(codebooks)
    assert all(left > right for left, right in zip(found.relative, found.relative[1:], strict=False))
    assert found.energy == pytest.approx(float(np.square(whole, dtype=np.float64).sum()), rel=1e-12)


@pytest.mark.parametrize("largest", [0.0, 1e-320, 1.0, 1.5e308])
def test_weights_of_any_size_are_compared(largest: float) -> None:
    """The largest does not become an infinity, which the solver could not compare with another."""
    found = {name: Measurement((0.25, 0.0625), 1e9, 1e6) for name in ("a", "b", "c")}
    errors = weighted_errors(found, {"a": largest, "b": largest / 2, "c": 0.0})
    assert all(math.isfinite(error) for each in errors.values() for error in each)
    assert errors["a"][0] == 4 * errors["a"][1] == 2 * errors["b"][0]
    assert errors["c"] == (0.0, 0.0)
    assert (errors["a"][0] > 0) == (largest > 0)
