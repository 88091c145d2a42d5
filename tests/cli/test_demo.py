"""The demo as a person sees it, and that it would not hide a failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espalier_format.cli.render_demo import render_demo
from espalier_format.errors import DigestError
from espalier_format.operations.demo import ComparedFile, DemoStep
from espalier_format.operations.verify_report import VerifyReport, judged

Run = Callable[..., Any]


def test_demo(run: Run, llama_exl3: Path) -> None:
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (0, "")
    for path in llama_exl3.iterdir():
        assert re.search(rf"{re.escape(path.name)} .* identical", outcome.out), path.name
    files = len(list(llama_exl3.iterdir()))
    total = sum(path.stat().st_size for path in llama_exl3.iterdir())
    assert f"All {files} files, {total:,} bytes, are identical" in outcome.out
    commands = re.findall(r"\$ espalier-format (\w+)", outcome.out)
    assert commands == ["inspect", "convert", "inspect", "verify", "convert"]


def test_commands_shown_are_real(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """Typed in the folder that --keep left, each command shown works."""
    shown = re.findall(r"\$ espalier-format (.*)", run("demo", "--keep", tmp_path / "kept").out)
    monkeypatch.chdir(tmp_path / "kept")
    for command in shown:
        words = command.split()
        if words[0] == "convert":
            words[2] += "-by-hand"
        assert run(*words).code == 0, command


def test_keep_in_an_occupied_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    outcome = run("demo", "--keep", tmp_path)
    assert outcome.code == 2
    assert outcome.err.startswith("error[output-exists]: ")


def test_difference_is_exit_code_1(capsys: Any) -> None:
    files = (
        ComparedFile("same", 5, "aa", "aa"),
        ComparedFile("other", 5, "aa", "bb"),
        ComparedFile("lost", 5, "aa", None),
    )
    assert render_demo([DemoStep("Compare", ("sha256sum",), files)], None) == 1
    captured = capsys.readouterr()
    assert "identical:" not in captured.out
    assert captured.out.count("DIFFERS") == 2
    assert [line.split(":")[1].strip() for line in captured.err.splitlines()] == ["other", "lost"]


def test_finding_is_exit_code_1(capsys: Any) -> None:
    report = VerifyReport("x", "espalier", (judged("digests", "", [DigestError("wrong")]),), ())
    assert render_demo([DemoStep("Verify", ("verify",), report)], None) == 1
    assert "error[digest-mismatch]: wrong" in capsys.readouterr().err
