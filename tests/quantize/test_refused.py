"""What `quantize` refuses: before anything is written, or with the name of the tensor, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Exl3Module, Tensor, bf16, exl3_draft
from quantize_cases import dense_draft, widened, write_recipe

from espalier_format.errors import DependencyError, EspalierError, ShapeError, SourceError, UnknownSizeError, UsageError
from espalier_format.operations.quantize import quantize

pytestmark = pytest.mark.usefixtures("fake_encoder")

REFUSED: list[tuple[type[EspalierError], str, dict[str, Any], list[str]]] = [
    (UsageError, "give --bits, --preset or --recipe", {}, []),
    (UsageError, "exclude each other", {"preset_name": "espalier"}, ['match = "*"\ncodebook = "e2m1@2"']),
    (UsageError, r"no linear module matches '\*\.nothing'", {}, ['match = "*.nothing"\ncodebook = "e2m1@2"']),
    (UsageError, "rule 1 matches no linear module", {}, ['match = "*"\ncomponent = "vision"\nkeep = true']),
    (UsageError, "quantizes no module", {}, ['match = "*"\nkeep = true']),
    (UsageError, r"cannot be met for the decoder: its candidates reach 1.0000 to 6.0000", {"bits": 0.9}, []),
    (UsageError, r"reach 1.0000 to 6.0000", {"bits": 6.1}, []),
    (UsageError, r"reach 2.0000, padding included", {"bits": 2.1}, ['match = "*_proj"\ncodebook = "e2m1@2"']),
    (UsageError, r"the nearest are 1.0000 and", {"bits": 1.01}, []),
    (UsageError, "must be positive", {"bits": -1}, []),
    (UsageError, "must be positive", {"bits": float("nan")}, []),
    (UsageError, "nothing to choose by; give --bits", {}, ['match = "*_proj"\ncodebook = ["e2m1@2", "int5@3"]']),
    (UsageError, "the rule needs an average", {"bits": 2}, ['match = "lm_head"\ncodebook = ["e2m1@2", "int5@3"]',
                                                            'match = "*"\ncodebook = "e2m1@2"']),
    (UsageError, "the recipe quantizes none", {"bits": 2}, ['match = "lm_head"\ncodebook = "e2m1@2"']),
    (UsageError, "below 2\\^64", {"bits": 2, "seed": 2**64}, []),
    (UsageError, "threads must be at least 1", {"bits": 2, "threads": 0}, []),
    (UsageError, "unknown encoder back end", {"bits": 2, "backend": "abacus"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "options", "rules"), REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    kind: type[EspalierError], message: str, options: dict[str, Any], rules: list[str], dense: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, *rules) if rules else None
    with pytest.raises(kind, match=message):
        quantize(dense, tmp_path / "out", recipe=recipe, **options)
    assert not (tmp_path / "out").exists()


def test_bad_weights_name_their_tensor_and_leave_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, 'match = "*.q_proj"\ncodebook = "e2m1@2"')
    draft = dense_draft()
    name = "model.layers.0.self_attn.q_proj.weight"
    spoilt = widened(draft[name]).copy()
    spoilt[3, 3] = np.nan
    cases: list[tuple[Tensor, type[EspalierError], str]] = [
        (bf16(spoilt), SourceError, name),
        (Tensor("F8_E4M3", (64, 64), bytes(64 * 64)), SourceError, name.removesuffix(".weight")),
        (Tensor("BF16", (0, 64), b""), ShapeError, name.removesuffix(".weight")),
    ]
    del draft["model.layers.0.self_attn.q_proj.bias"]
    for number, (tensor, kind, named) in enumerate(cases):
        draft[name] = tensor
        source = draft.write(tmp_path / f"m{number}")
        with pytest.raises(kind) as caught:
            quantize(source, tmp_path / "out", recipe=recipe)
        assert caught.value.tensor == named
        assert not (tmp_path / "out").exists()


def test_an_unknown_true_size_is_refused(tmp_path: Path) -> None:
    source = exl3_draft([Exl3Module("strange.part", 96, 90, 2, "mcg")], config={"model_type": "strange"})
    with pytest.raises(UnknownSizeError, match="true size is not known"):
        quantize(
            source.write(tmp_path / "m"),
            tmp_path / "out",
            recipe=write_recipe(tmp_path, 'match = "strange.part"\ncodebook = "e2m1@2"'),
        )


def test_where_a_report_cannot_go(dense: Path, tmp_path: Path) -> None:
    for report in (tmp_path / "out" / "r.json", dense / "r.json", tmp_path / "nowhere" / "r.json", tmp_path):
        with pytest.raises(EspalierError):
            quantize(dense, tmp_path / "out", bits=2, report=report)
    assert not (tmp_path / "out").exists()


def test_a_back_end_without_its_package(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier_format.encoder.backend.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="numba"):
        quantize(dense, tmp_path / "out", bits=2, backend="numba")


def test_a_single_file_is_no_source(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="give the folder"):
        quantize(dense / "model-00001-of-00002.safetensors", tmp_path / "out", bits=2)
