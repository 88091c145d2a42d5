"""The writer's folder for intermediate results: it survives what goes wrong, and goes with the complete output."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier_format.container.names import PROGRESS_NAME
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
