"""Exit codes and the form of errors: one line, its code, no traceback; the same for every command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from convert_cases import exl3_source

from espalier_format.cli import frame
from espalier_format.container.writer import CheckpointWriter

Run = Callable[..., Any]

ONE_LINE = re.compile(r"error\[([a-z-]+)\]: [^\n]+\n")


def code_of(err: str) -> str:
    """Check that stderr is exactly one error line and return its code."""
    found = ONE_LINE.fullmatch(err)
    assert found is not None, err
    return found[1]


def test_fine_is_0(run: Run, llama_espalier: Path, tmp_path: Path) -> None:
    for arguments in (
        ("inspect", llama_espalier),
        ("verify", llama_espalier, "--deep"),
        ("convert", llama_espalier, tmp_path / "back", "--to", "exl3"),
        ("schema",),
        ("--version",),
        ("--help",),
        (),
    ):
        outcome = run(*arguments)
        assert (outcome.code, outcome.err) == (0, ""), arguments
        assert outcome.out, arguments


def test_readable_but_wrong_is_1(run: Run, llama_espalier: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_espalier, tmp_path / "e")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "extra").write_text("")
    outcome = run("verify", folder)
    assert outcome.code == 1
    assert [line.split("]")[0] for line in outcome.err.splitlines()] == ["error[digest-mismatch"] * 2


def test_contradiction_at_opening_is_1(run: Run, llama_espalier: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_espalier, tmp_path / "e")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    for arguments in (("inspect", folder), ("convert", folder, tmp_path / "x", "--to", "exl3")):
        outcome = run(*arguments)
        assert (outcome.code, code_of(outcome.err), outcome.out) == (1, "index-mismatch", "")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_refused_is_2(run: Run, tmp_path: Path, command: str) -> None:
    outcome = run(command, tmp_path / "nothing here")
    assert (outcome.code, code_of(outcome.err), outcome.out) == (2, "missing-file", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("inspect",),
        ("inspect", "a", "b"),
        ("inspect", "a", "--frobnicate"),
        ("convert", "a", "b"),
        ("convert", "a", "b", "--to", "gguf"),
        ("convert", "a", "b", "--to", "hf", "--dtype", "int3"),
        ("convert", "a", "b", "--to", "exl3", "--dtype", "fp16"),
        ("verify", "a", "--record"),
        ("schema", "everything"),
    ],
)
def test_bad_usage_is_2(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert (outcome.code, code_of(outcome.err), outcome.out) == (2, "usage", "")


def test_a_dtype_that_is_none_names_those_that_are(run: Run, llama_exl3: Path, tmp_path: Path) -> None:
    wrong = run("convert", llama_exl3, tmp_path / "out", "--to", "hf", "--dtype", "int3")
    assert "no such output dtype (expected source, bfloat16, float16, float32, got int3)" in wrong.err
    assert "[source|bfloat16|float16|float32]" in run("convert", "--help").out
    for number, dtype in enumerate(("bf16", "bfloat16")):
        assert run("convert", llama_exl3, tmp_path / str(number), "--to", "hf", "--dtype", dtype).code == 0
    first, second = (tmp_path / str(number) / "model.safetensors" for number in range(2))
    assert first.read_bytes() == second.read_bytes()


def test_usage_error_names_the_help(run: Run) -> None:
    assert "(see `espalier-format convert --help`)" in run("convert", "a").err
    assert "'gguf' is not one of 'espalier', 'exl3', 'hf'" in run("convert", "a", "b", "--to", "gguf").err


def test_unexpected_exception_is_2_in_one_line(run: Run, llama_exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("espalier_format.operations.inspect.inspect_checkpoint", fail)
    outcome = run("inspect", llama_exl3)
    assert (outcome.code, code_of(outcome.err)) == (2, "internal")
    assert "ZeroDivisionError: two lines (run with --debug for the traceback)" in outcome.err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_and_goes_anywhere(run: Run, place: int) -> None:
    words = ["inspect", "nothing"]
    words.insert(place, "--debug")
    outcome = run(*words)
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback (most recent call last):\n")
    assert ONE_LINE.fullmatch(outcome.err.splitlines(keepends=True)[-1])


def test_after_two_dashes_nothing_is_an_option(run: Run) -> None:
    outcome = run("inspect", "--", "--debug")
    assert code_of(outcome.err) == "missing-file"
    assert "--debug" in outcome.err


def test_interrupt_is_130(run: Run, llama_exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("espalier_format.operations.inspect.inspect_checkpoint", interrupt)
    outcome = run("inspect", llama_exl3)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


def test_closed_pipe_is_141_and_silent(run: Run, llama_exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("espalier_format.operations.inspect.inspect_checkpoint", close)
    outcome = run("inspect", llama_exl3)
    assert (outcome.code, outcome.out, outcome.err) == (frame.EXIT_CLOSED_PIPE, "", "")


def test_version(run: Run) -> None:
    assert re.fullmatch(r"espalier-format \d+\.\d+\.\d+, format version 1\n", run("--version").out)


def test_existing_destination_is_refused(run: Run, llama_exl3: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    for force in ((), ("--force",)):
        outcome = run("convert", llama_exl3, tmp_path, "--to", "espalier", *force)
        assert (outcome.code, code_of(outcome.err)) == (2, "output-exists")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupted_conversion_is_resumed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, command = exl3_source(tmp_path / "m"), ("convert", tmp_path / "m", tmp_path / "out", "--to", "espalier")
    real, shards = CheckpointWriter.add_shard, []

    def add_shard(self: CheckpointWriter, name: str, *arguments: Any, **options: Any) -> None:
        if len(shards) == 2:
            raise KeyboardInterrupt
        shards.append(name)
        real(self, name, *arguments, **options)

    monkeypatch.setattr(CheckpointWriter, "add_shard", add_shard)
    assert run(*command).code == 130
    monkeypatch.undo()
    outcome = run(*command)
    assert outcome.code == 2
    assert "holds an unfinished output; --resume goes on with it" in outcome.err
    (source / "tokenizer.json").write_bytes(b"{}")
    outcome = run(*command, "--resume")
    assert outcome.code == 2
    assert "begun with another source; --force begins anew" in outcome.err
    outcome = run(*command, "--force")
    assert outcome.code == 0
    assert "before this run" not in outcome.out
    shutil.rmtree(tmp_path / "out")
    shards.clear()
    monkeypatch.setattr(CheckpointWriter, "add_shard", add_shard)
    assert run(*command).code == 130
    monkeypatch.undo()
    outcome = run(*command, "--resume")
    assert outcome.code == 0
    assert re.search(r" files, [234] of them before this run; read ", outcome.out)
