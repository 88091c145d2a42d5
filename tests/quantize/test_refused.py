"""What `quantize` refuses: before anything is written, or with the name of the tensor, and nothing is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Exl3Module, Tensor, bf16, exl3_draft
from quantize_cases import dense_draft, matrix, moe_draft, widened, write_recipe
from safetensors.numpy import save_file

from espalier_format.container.names import MANIFEST_NAME
from espalier_format.errors import (
    DependencyError,
    DigestError,
    DtypeError,
    EspalierError,
    IndexMismatchError,
    MalformedError,
    MissingFileError,
    MissingTensorError,
    PathError,
    ShapeError,
    SourceError,
    TruncatedError,
    UnexpectedTensorError,
    UnknownSizeError,
    UsageError,
)
from espalier_format.operations.quantize import quantize_checkpoint

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
    (UsageError, r"must be a finite number above 0 \(got -1\)", {"bits": -1}, []),
    (UsageError, r"must be a finite number above 0 \(got 0\)", {"bits": 0}, []),
    (UsageError, r"must be a finite number above 0 \(got nan\)", {"bits": float("nan")}, []),
    (UsageError, r"must be a finite number above 0 \(got inf\)", {"bits": float("inf")}, []),
    (UsageError, "nothing to choose by; give --bits", {}, ['match = "*_proj"\ncodebook = ["e2m1@2", "int5@3"]']),
    (UsageError, "the rule needs an average", {"bits": 2}, ['match = "lm_head"\ncodebook = ["e2m1@2", "int5@3"]',
                                                            'match = "*"\ncodebook = "e2m1@2"']),
    (UsageError, "the recipe quantizes none", {"bits": 2}, ['match = "lm_head"\ncodebook = "e2m1@2"']),
    (UsageError, "below 2\\^64", {"bits": 2, "seed": 2**64}, []),
    (UsageError, "threads must be at least 1", {"bits": 2, "threads": 0}, []),
    (UsageError, "unknown encoder back end", {"bits": 2, "backend": "abacus"}, []),
    (UsageError, "unknown effort", {"bits": 2, "effort": "some"}, []),
    (UsageError, "unknown effort", {"bits": 2, "effort": ["fast"]}, []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "options", "rules"), REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    kind: type[EspalierError], message: str, options: dict[str, Any], rules: list[str], dense: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, *rules) if rules else None
    with pytest.raises(kind, match=message):
        quantize_checkpoint(dense, tmp_path / "out", recipe=recipe, **options)
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
            quantize_checkpoint(source, tmp_path / "out", recipe=recipe)
        assert caught.value.tensor == named
        assert not (tmp_path / "out").exists()


def test_biases_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Also those beside a weight that is tied or fused, which no reader of the output would take."""
    bank = "model.language_model.layers.0.mlp.experts"
    cases: list[tuple[Draft, str, Tensor, type[EspalierError]]] = [
        (dense_draft(), "lm_head", bf16(np.ones(7)), ShapeError),
        (dense_draft(tied=True), "lm_head", bf16(np.ones(7)), ShapeError),
        (moe_draft(), f"{bank}.1.up_proj", bf16(np.ones(7)), ShapeError),
        (dense_draft(), "lm_head", Tensor("I32", (50,), bytes(200)), DtypeError),
        (dense_draft(tied=True), "lm_head", Tensor("I32", (50,), bytes(200)), DtypeError),
    ]
    for number, (draft, module, bias, kind) in enumerate(cases):
        draft[f"{module}.bias"] = bias
        recipe = write_recipe(tmp_path, f'match = "{module}"\ncodebook = "e2m1@2"')
        with pytest.raises(kind) as caught:
            quantize_checkpoint(draft.write(tmp_path / f"m{number}"), tmp_path / "out", recipe=recipe)
        assert caught.value.tensor == f"{module}.bias"
        assert caught.value.path is not None
        assert not (tmp_path / "out").exists()


def test_a_weight_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    bank = "model.language_model.layers.0.mlp.experts"
    recipe = write_recipe(tmp_path, f'match = "{bank}.*.up_proj"\ncodebook = "e2m1@2"')
    draft = moe_draft()
    draft[f"{bank}.0.gate_proj.weight"] = matrix("twice", 32, 64)
    with pytest.raises(SourceError, match=rf"is stored twice: {bank}.gate_up_proj holds it as well"):
        quantize_checkpoint(draft.write(tmp_path / "m0"), tmp_path / "out", recipe=recipe)
    draft[f"{bank}.0.gate_proj.weight"] = bf16(np.ones(3))  # no weight, but in the way of one that is kept
    with pytest.raises(UnexpectedTensorError, match="two tensors of this name"):
        quantize_checkpoint(draft.write(tmp_path / "m1"), tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_only_the_index_names_is_refused(dense: Path, tmp_path: Path) -> None:
    """Half a download must not become a model, as long as it says so itself; the names of shards need not tell."""
    path = dense / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.1.mlp.up_proj.weight"] = "more.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(IndexMismatchError, match="no shard holds it; is the download complete") as caught:
        quantize_checkpoint(dense, tmp_path / "out", bits=2)
    assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"
    assert not (tmp_path / "out").exists()


def test_an_index_of_other_shards_does_no_harm(dense: Path, tmp_path: Path) -> None:
    """Such as one that stayed when the shards were put together: every tensor is there."""
    path = dense / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "gone.safetensors")
    path.write_text(json.dumps(index))
    report = quantize_checkpoint(dense, tmp_path / "out", bits=2)
    assert "names gone.safetensors, which is not there" in report.warnings[0]


@pytest.mark.parametrize("fault", ["missing", "longer"])
def test_a_source_that_is_not_what_its_manifest_says_is_refused(fault: str, dense: Path, tmp_path: Path) -> None:
    source = tmp_path / "once"
    quantize_checkpoint(dense, source, bits=2)
    path = source / "tokenizer.json"
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DigestError) as caught:
        quantize_checkpoint(source, tmp_path / "out", bits=3)
    assert caught.value.path == str(path)
    assert not (tmp_path / "out").exists()
    (source / MANIFEST_NAME).write_text("{")
    report = quantize_checkpoint(source, tmp_path / "out", bits=3)
    assert "the sizes of the source's files have not been checked" in report.warnings[0]


def test_an_unknown_true_size_is_refused(tmp_path: Path) -> None:
    source = exl3_draft([Exl3Module("strange.part", 96, 90, 2, "mcg")], config={"model_type": "strange"})
    with pytest.raises(UnknownSizeError, match="true size is not known"):
        quantize_checkpoint(
            source.write(tmp_path / "m"),
            tmp_path / "out",
            recipe=write_recipe(tmp_path, 'match = "strange.part"\ncodebook = "e2m1@2"'),
        )


def test_a_name_that_leads_out_of_the_folder_of_hessians(tmp_path: Path) -> None:
    """The Hessian there must not be used, whatever the checkpoint calls its tensors."""
    elsewhere, inside = tmp_path / "elsewhere", tmp_path / "hessians"
    for folder in (elsewhere, inside):
        folder.mkdir()
        save_file({"hessian": np.eye(64, dtype=np.float32), "count": np.array(1)}, folder / "up_proj.safetensors")
    draft, module = dense_draft(), f"{elsewhere}/up_proj"
    draft[f"{module}.weight"] = matrix("up", 64, 64)
    recipe = write_recipe(tmp_path, 'match = "*/up_proj"\ncodebook = "e2m1@2"')
    with pytest.raises(PathError, match="not a plain relative name"):
        quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe, hessians=inside)
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(tmp_path / "m", tmp_path / "out", recipe=recipe)
    assert module in [each.name for each in report.modules]


def test_odd_files_of_hessians_are_refused_before_anything_is_written(dense: Path, tmp_path: Path) -> None:
    """Of the last module, too, and not after hours, when its turn has come; nor are they passed over."""
    hessians = tmp_path / "hessians"
    hessians.mkdir()
    file = hessians / "lm_head.safetensors"

    def refused(kind: type[EspalierError], words: str) -> None:
        with pytest.raises(kind, match=words) as caught:
            quantize_checkpoint(dense, tmp_path / "out", recipe=recipe, hessians=hessians)
        assert caught.value.path == str(file)
        assert not (tmp_path / "out").exists()

    recipe = write_recipe(
        tmp_path,
        'match = "*_proj"\ncodebook = ["e2m1@2", "int5@3"]\naverage = 2.5',
        'match = "lm_head"\ncodebook = "int5@3"',
    )
    for target, kind, words in (
        ("nowhere", MissingFileError, "leads nowhere"),
        ("/dev/zero", MalformedError, "not a regular file"),
        ("lm_head.safetensors", PathError, "links go round"),
    ):
        file.symlink_to(target)
        refused(kind, words)
        file.unlink()
    os.mkfifo(file)
    refused(MalformedError, "not a regular file")
    file.unlink()
    file.mkdir()
    refused(MalformedError, "not a regular file")
    file.rmdir()
    file.write_bytes(b"x")
    refused(TruncatedError, "bytes")
    save_file({"hessian": np.eye(63, dtype=np.float32), "count": np.array(1)}, file)
    refused(ShapeError, "another shape")
    save_file({"hessian": np.eye(64, dtype=np.float32)}, file)
    refused(MissingTensorError, "lacks a tensor")


def test_the_largest_sensitivity_is_no_infinity(dense: Path, tmp_path: Path) -> None:
    """Two widths and an average: the solver compares the errors, times these weights, with each other."""
    recipe = write_recipe(tmp_path, 'match = "*_proj"\ncodebook = ["e2m1@2", "int5@3"]\naverage = 2.5')
    chosen = []
    for number, weight in enumerate(("1", "1e308")):
        (tmp_path / "s.json").write_text(f'{{"*": {weight}}}')
        out = tmp_path / f"out{number}"
        report = quantize_checkpoint(dense, out, recipe=recipe, sensitivity=tmp_path / "s.json")
        chosen.append([module.codebook for module in report.modules])
    assert chosen[0] == chosen[1]
    assert set(chosen[0]) == {"e2m1@2", "int5@3"}


def test_a_back_end_without_its_package(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier_format.encoder.backend.find_spec", lambda name: None)
    monkeypatch.setattr("espalier_format.encoder.backend._has_able_gpu", lambda: False)
    for backend in ("numba", "auto"):
        with pytest.raises(DependencyError, match="pip install numba"):
            quantize_checkpoint(dense, tmp_path / "out", bits=2, backend=backend)
        assert not (tmp_path / "out").exists()
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2, backend="numpy").modules


def test_a_single_file_is_no_source(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="give the folder"):
        quantize_checkpoint(dense / "model-00001-of-00002.safetensors", tmp_path / "out", bits=2)
