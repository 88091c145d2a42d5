"""The writer's folder for intermediate results: it survives what goes wrong, and goes with the complete output."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from espalier_format.container import staging
from espalier_format.container.names import PROGRESS_NAME
from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.container.writer import CheckpointWriter
from espalier_format.converters.output import manifest_bytes
from espalier_format.errors import OutputExistsError, UsageError


def _begin(out: Path, **options: bool) -> None:
    """Store something in the workspace, then fail."""
    with CheckpointWriter(out, workspace="work", **options) as writer:
        (writer.workspace / "result").write_text("done")
        writer.add_bytes("a.txt", b"a")
        raise RuntimeError


def _resumed(out: Path, **options: bool) -> list[str]:
    with CheckpointWriter(out, workspace="work", **options) as writer:
        found = sorted(path.name for path in writer.workspace.iterdir())
        writer.add_bytes("config.json", b"{}")
        writer.finish(manifest=manifest_bytes)
    return found


def test_what_is_in_it_survives_an_exception(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        _begin(out)
    assert [path.name for path in out.iterdir()] == [PROGRESS_NAME]
    assert sorted(path.name for path in (out / PROGRESS_NAME).iterdir()) == ["lock", "work"]
    assert _resumed(out, resume=True) == ["result"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "espalier_manifest.json"]


def test_an_empty_one_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "a" / "out", workspace="work"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_it_is_emptied_unless_the_run_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        _begin(out)
    with pytest.raises(OutputExistsError, match="; --resume goes on with it, --force alone begins anew"):
        _resumed(out)
    assert _resumed(out, force=True) == []


def test_others_are_told_of_an_unfinished_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _begin(tmp_path / "out")
    with pytest.raises(OutputExistsError, match="holds an unfinished output; --force replaces it"):
        CheckpointWriter(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", force=True) as writer:
        writer.finish()
    assert not (tmp_path / "out" / PROGRESS_NAME).exists()


def test_old_content_stays_and_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _resumed(out) == []
    with pytest.raises(RuntimeError):
        _begin(out, force=True)
    assert (out / "config.json").read_bytes() == b"{}"
    with pytest.raises(OutputExistsError, match="is not empty; --force replaces it"):
        _resumed(out, resume=True)
    assert _resumed(out, resume=True, force=True) == ["result"]


def test_a_writer_without_one_says_so(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer, pytest.raises(UsageError, match="no workspace"):
        _ = writer.workspace


JOB = {"command": "test", "source": 1}


def _write(out: Path, names: str = "abc", **options: bool) -> int:
    with CheckpointWriter(out, job=JOB, **options) as writer:
        for name in names:
            tensor = PlannedTensor(name, "U8", (1000,), lambda name=name: [name.encode() * 1000])
            writer.add_shard(f"{name}.safetensors", [tensor])
        writer.add_bytes("config.json", b"{}")
        writer.finish(manifest=manifest_bytes)
    return writer.resumed


def _interrupted(out: Path, *tensors: PlannedTensor) -> None:
    """Write a shard of each tensor, then stop."""
    with contextlib.suppress(KeyboardInterrupt), CheckpointWriter(out, job=JOB) as writer:
        for tensor in tensors:
            writer.add_shard(f"{tensor.name}.safetensors", [tensor])
        raise KeyboardInterrupt


def test_a_commit_that_fails_costs_no_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has its name already is moved back, and not written again."""
    real, moved = staging._move, []

    def move(before: Path, after: Path) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(before)
        real(before, after)

    monkeypatch.setattr(staging, "_move", move)
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path / "out")
    assert len(moved) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PROGRESS_NAME]
    monkeypatch.undo()
    assert _write(tmp_path / "out", resume=True) == 3
    assert (tmp_path / "out" / "a.safetensors").read_bytes().endswith(b"a" * 1000)


def test_a_file_by_another_plan_is_written_again(tmp_path: Path) -> None:
    """The plan of a shard is its header: the same job of another build of the program may have another."""
    out = tmp_path / "out"
    _interrupted(
        out,
        PlannedTensor("a", "I8", (1000,), lambda: [b"x" * 1000]),
        PlannedTensor("b", "U8", (1000,), lambda: [b"b" * 1000]),
    )
    assert _write(out, resume=True) == 1
    assert (out / "a.safetensors").read_bytes().endswith(b"a" * 1000)


def test_a_name_that_is_no_longer_written_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _interrupted(out, PlannedTensor("z", "U8", (4,), lambda: [b"zzzz"]))
    assert _write(out, resume=True) == 0
    assert not (out / "z.safetensors").exists()
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["a.safetensors", "b.safetensors", "c.safetensors", "config.json", "espalier_manifest.json"]
    )


def test_a_complete_output_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed just before it removed what is left over."""
    monkeypatch.setattr(staging.Staging, "_clear", lambda self: self._release())
    _write(tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(OutputExistsError, match="holds the complete output already; --force replaces it"):
        _write(tmp_path / "out", resume=True)
    assert _write(tmp_path / "out", resume=True, force=True) == 0
    assert not (tmp_path / "out" / PROGRESS_NAME).exists()


def test_job_that_cannot_be_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _interrupted(out, PlannedTensor("a", "U8", (4,), lambda: [b"aaaa"]))
    (out / PROGRESS_NAME / "work" / "job.json").write_text("{")
    with pytest.raises(UsageError, match=r"job.json is damaged\); --force begins anew"):
        _write(out, resume=True)
    assert _write(out, force=True) == 0


@pytest.mark.parametrize("staged", ["../../../victim", "/victim", "a/../../../victim"])
def test_notes_from_somebody_else_move_nothing_out_of_the_folder(staged: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = out / PROGRESS_NAME
    (work / "old").mkdir(parents=True)
    (out / "espalier_manifest.json").write_text("{}")
    (tmp_path / "victim").write_text("mine")
    names = {"files": ["x"], "old": [], "new": {"x": staged, "../victim": "y"}}
    (work / "names.json").write_text(json.dumps(names))
    (out / "x").write_text("theirs")
    with CheckpointWriter(out, force=True) as writer:
        writer.add_bytes("config.json", b"{}")
        writer.finish(manifest=manifest_bytes)
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "victim"]


def test_notes_from_somebody_else_change_nothing_behind_a_link(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    work = out / PROGRESS_NAME
    (work / "old").mkdir(parents=True)
    (elsewhere / "empty").mkdir(parents=True)
    (elsewhere / "a").write_text("theirs")
    (out / "b").write_text("ours")
    (out / "sub").symlink_to(elsewhere)
    (work / "sub").symlink_to(elsewhere)
    new = {"sub/a": "1.partial", "sub/empty/x": "2.partial", "b": "sub/a"}
    (work / "names.json").write_text(json.dumps({"files": ["b", "sub"], "old": [], "new": new}))
    with contextlib.suppress(OutputExistsError), CheckpointWriter(out, force=True):
        pass
    assert (elsewhere / "a").read_text() == "theirs"
    assert (elsewhere / "empty").is_dir()


@pytest.mark.parametrize("name", ["", "work", "old"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_folder_of_ours_that_is_none_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "data").write_text("theirs")
    with pytest.raises(RuntimeError):
        _begin(out)
    place = out / PROGRESS_NAME / name
    if place.exists():
        place.rename(tmp_path / "moved")
    if kind == "file":
        place.write_text("theirs")
    else:
        place.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    before = sorted(out.rglob("*"))
    with pytest.raises(OutputExistsError, match="is no folder, and not" if kind == "file" else "is a link, and not"):
        _write(out, resume=True)
    assert sorted(out.rglob("*")) == before
    assert (elsewhere / "deep" / "data").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_begins_anew_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("theirs")
    (out / PROGRESS_NAME).mkdir(parents=True)
    (out / PROGRESS_NAME / "work").symlink_to(elsewhere)
    assert _write(out, force=True) == 0
    assert (elsewhere / "data").read_text() == "theirs"
