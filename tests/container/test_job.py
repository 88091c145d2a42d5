"""What a person reads where an unfinished output is one of another job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier_format.container.job import JOB_NAME, take_over
from espalier_format.errors import UsageError

JOB = {"command": "quantize", "effort": "exact", "seed": 1, "bits": 2.5, "source": [["a", 1]], "folder": None}


def _refusal(workspace: Path, **changes: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        take_over(workspace, {**JOB, **changes})
    return caught.value


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The workspace of `JOB`, two folders below its output as everywhere."""
    folder = tmp_path / "out" / ".work" / "job"
    folder.mkdir(parents=True)
    assert not take_over(folder, JOB)
    assert take_over(folder, JOB)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"effort": "fast"}, "another effort (exact, now fast)"),
        ({"seed": 2, "bits": None}, "another bits (2.5, now none) and another seed (1, now 2)"),
        ({"effort": True}, "another effort (exact, now true)"),
        ({"source": [["b", 1]]}, "another source"),
        ({"source": [["b", 1]], "seed": 2}, "another seed (1, now 2) and another source"),
        ({"folder": "0" * 64}, "another folder"),
        ({"more": 1}, "another more"),
        ({"command": "convert", "seed": 2}, "another command (quantize, now convert)"),
        (
            {"source": 1, "seed": 2, "bits": 3.0, "effort": "fast", "age": 4, "folder": "x"},
            (
                "another bits (2.5, now 3.0) and another effort (exact, now fast) and another folder (none, now x) and "
                "3 more"
            ),
        ),
    ],
)
def test_the_message_names_both_values(changes: dict[str, object], words: str, workspace: Path) -> None:
    error = _refusal(workspace, **changes)
    assert (error.code, error.path) == ("usage", str(workspace.parent.parent))
    assert error.message == f"the unfinished output was begun with {words}; --force begins anew"
    assert take_over(workspace, JOB)  # nothing was lost by trying


def test_whatever_a_job_holds_the_message_is_one_short_line(workspace: Path) -> None:
    foreign = {**JOB, "seed": "\x1b[31m\n", "effort": "e" * 100_000, "k" * 100_000: 1, "z": {"a": [1]}}
    (workspace / JOB_NAME).write_text(json.dumps(foreign))
    line = str(_refusal(workspace)).removeprefix(f"{workspace.parent.parent}: ")
    assert "another seed (\\x1b[31m , now 1) and another effort and another kkk" in line
    assert line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize("damaged", [b"", b"[]", b"{}", b'{"comm', b'\xef\xbb\xbf{"command": "quantize"}'])
def test_a_damaged_job_is_not_another_command(damaged: bytes, tmp_path: Path) -> None:
    workspace = tmp_path / "out" / ".espalier-in-progress" / "work"
    workspace.mkdir(parents=True)
    (workspace / JOB_NAME).write_bytes(damaged)
    with pytest.raises(UsageError, match=r"does not say what it was begun with \(job.json is damaged\); --force"):
        take_over(workspace, {"command": "quantize"})
