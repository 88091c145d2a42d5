"""``run_demo``: its steps are real, what it keeps is what it says, and a difference would show."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier_format.errors import OutputExistsError, WriteError
from espalier_format.operations import demo
from espalier_format.operations.demo import ComparedFile, run_demo
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify_report import VerifyReport


def test_keeps_three_checkpoints(llama_exl3: Path, tmp_path: Path) -> None:
    steps = list(run_demo(tmp_path / "new" / "folder"))
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["espalier", "exl3", "exl3-again"]
    for path in llama_exl3.iterdir():
        assert (folder / "exl3" / path.name).read_bytes() == path.read_bytes()
        assert (folder / "exl3-again" / path.name).read_bytes() == path.read_bytes()
    assert inspect_checkpoint(folder / "espalier").format == "espalier"
    verified = steps[3].result
    assert isinstance(verified, VerifyReport)
    assert verified.checks[-1].detail.endswith("all compared")
    compared = steps[-1].result
    assert isinstance(compared, tuple)
    assert {file.name for file in compared} == {path.name for path in llama_exl3.iterdir()}
    assert all(file.identical for file in compared)


def test_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(list(run_demo())) == 6
    assert list(tmp_path.iterdir()) == []


def test_difference_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changes on the way, a file that gets lost, and one that appears."""
    genuine = demo.convert_checkpoint

    def spoil(source: Path, destination: Path, **more: object) -> object:
        report = genuine(source, destination, **more)  # type: ignore[arg-type]
        if more["to"] == "exl3":
            shard = bytearray((destination / "model.safetensors").read_bytes())
            shard[-1] ^= 1
            (destination / "model.safetensors").write_bytes(shard)
            (destination / "tokenizer.json").unlink()
            (destination / "new.json").write_text("{}")
        return report

    monkeypatch.setattr(demo, "convert_checkpoint", spoil)
    compared = list(run_demo(tmp_path / "kept"))[-1].result
    assert isinstance(compared, tuple)
    assert {file.name for file in compared if not file.identical} == {"model.safetensors", "tokenizer.json", "new.json"}


def test_missing_on_both_sides_is_not_identical() -> None:
    assert not ComparedFile("x", 0, None, None).identical


def test_occupied_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for keep in (tmp_path, tmp_path / "mine"):
        with pytest.raises(OutputExistsError):
            next(run_demo(keep))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError):
        next(run_demo(tmp_path / "file" / "below"))
