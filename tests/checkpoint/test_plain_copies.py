"""A plain weight beside the quantized one: allowed, never read, and everybody who opens the checkpoint hears of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Draft, Exl3Module, bf16, espalier_draft, exl3_draft

from espalier_format.checkpoint import open_checkpoint
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify import verify_checkpoint

O_PROJ = "model.layers.0.self_attn.o_proj"
EXPERT = "model.layers.0.mlp.experts.3.down_proj"
WHAT = "plain weights of modules that are quantized; their values are not used"


def exl3() -> Draft:
    return exl3_draft([Exl3Module(name, 128, 128) for name in (O_PROJ, EXPERT, "lm_head")])


@pytest.mark.parametrize("draft", [espalier_draft, exl3])
def test_it_is_said_and_the_trellis_counts(draft: Callable[[], Draft], tmp_path: Path) -> None:
    made = draft()
    before = made.write(tmp_path / "before")
    with open_checkpoint(before) as checkpoint:
        assert not [line for line in checkpoint.warnings if WHAT in line]
        expected = {name: checkpoint.decode(name) for name in (O_PROJ, EXPERT)}
    for name, weight in expected.items():
        made[f"{name}.weight"] = bf16(np.full(weight.shape, 3.0))
    # Neither what only looks like one nor a scale of that name is a copy.
    made["model.layers.0.self_attn.weight"] = bf16([1.0])
    made[f"{O_PROJ}.weight_scale"] = bf16([1.0])
    folder = made.write(tmp_path / "with")
    n_bytes = 2 * sum(weight.size for weight in expected.values())
    warning = f"{O_PROJ}.weight, {EXPERT}.weight, {n_bytes:,} bytes: {WHAT}"
    with open_checkpoint(folder) as checkpoint:
        assert warning in checkpoint.warnings
        for name, weight in expected.items():
            assert np.array_equal(checkpoint.decode(name), weight)
            assert f"{name}.weight" in checkpoint.plain
    report = verify_checkpoint(folder, deep=True)
    assert warning in report.warnings
    assert (report.exit_code, report.findings) == (0, ())
    assert warning in inspect_checkpoint(folder).warnings


def test_many_are_counted(tmp_path: Path) -> None:
    modules = [Exl3Module(f"model.layers.{number}.mlp.up_proj", 128, 128) for number in range(5)]
    made = exl3_draft(modules, plain={f"{module.name}.weight": bf16(np.zeros((128, 128))) for module in modules})
    with open_checkpoint(made.write(tmp_path)) as checkpoint:
        (found,) = [line for line in checkpoint.warnings if WHAT in line]
    assert found.startswith("model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, ")
    assert f"model.layers.2.mlp.up_proj.weight and 2 more, {5 * 2 * 128 * 128:,} bytes: " in found


def test_conversions_say_it_as_well(tmp_path: Path) -> None:
    """They carry the copy there and back, and of the two weights the quantized one becomes the plain one."""
    copied = f"{O_PROJ}.weight"
    made = exl3_draft([Exl3Module(O_PROJ, 128, 128)], plain={copied: bf16(np.full((128, 128), 3.0))})
    made.write(tmp_path / "source")
    for before, after, to in (("source", "there", "espalier"), ("there", "back", "exl3"), ("there", "hf", "hf")):
        report = convert_checkpoint(
            tmp_path / before, tmp_path / after, to=to, dtype="bfloat16" if to == "hf" else None
        )
        assert [line for line in report.warnings if WHAT in line], to
    with open_checkpoint(tmp_path / "back") as back, open_checkpoint(tmp_path / "hf") as plain:
        assert np.array_equal(back.tensor(copied), made[copied].array().view("<u2"))
        assert np.array_equal(plain.tensor(copied), back.decode(O_PROJ, "bfloat16"))
        assert plain.warnings == ()
