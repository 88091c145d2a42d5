"""What people see: plain text in pipes, styles and progress on terminals only, hostile names made harmless.

That the tables look good is for eyes; here nothing may be cut off, folded or executed by a terminal.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import Exl3Module, Tensor, espalier_draft, exl3_draft, safetensors_bytes

from espalier_format.cli.terminal import safe_text

Run = Callable[..., Any]

ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "evil\x1b]0;owned\x07\r\u202e\u2028[bold]x[/bold]:smile:"


def in_terminal(
    columns: int, *arguments: object, stderr: int | None = None, cwd: Path | None = None, **environment: str
) -> tuple[str, int]:
    """Run the command on a terminal so wide (stderr too, if not given); return what was shown, and the code."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "espalier_format", *map(str, arguments)],
        cwd=cwd,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal if stderr is None else stderr,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(terminal)
    shown = b""
    while True:
        readable, _, _ = select.select([controller], [], [], 60)
        try:
            data = os.read(controller, 65536) if readable else b""
        except OSError:  # how Linux reports that the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(controller)
    return shown.decode().replace("\r\n", "\n"), process.wait(timeout=60)


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_pipes_get_plain_text(run_process: Run, llama_espalier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # set but empty, it is a wish to releases of rich before 14
    for arguments in (("inspect", llama_espalier), ("verify", llama_espalier, "--deep"), ("demo",)):
        outcome = run_process(*arguments, TERM="xterm-256color")
        assert (outcome.code, outcome.err) == (0, "")
        assert ESCAPE not in outcome.out
        assert "\r" not in outcome.out


def test_terminals_get_styles(llama_exl3: Path) -> None:
    shown, code = in_terminal(100, "inspect", llama_exl3)
    assert code == 0
    assert ESCAPE in shown


def test_no_color_is_honoured(qmoe_exl3: Path) -> None:
    assert COLOUR.search(in_terminal(100, "inspect", qmoe_exl3)[0])
    assert not COLOUR.search(in_terminal(100, "inspect", qmoe_exl3, NO_COLOR="1")[0])
    for setting in ({"TERM": "dumb"}, {"NO_COLOR": "1"}):
        for command in ("inspect", "verify"):
            assert not STYLE.search(in_terminal(100, command, qmoe_exl3, **setting)[0])


def test_no_line_ends_in_blanks_or_wraps(
    run: Run, run_process: Run, llama_espalier: Path, qmoe_espalier: Path, tmp_path: Path
) -> None:
    """At 80 columns, in the demo and in what verify says of a folder without digests."""
    for arguments in (("demo",), ("verify", ".", "--deep"), ("inspect", ".", "--experts")):
        shown = without_styles(in_terminal(80, *arguments, cwd=qmoe_espalier)[0])
        for line in shown.splitlines():
            assert line == line.rstrip()
            if "$" not in line:
                assert len(line) <= 80
    assert "no digests (add them: --deep --record)" in run_process("verify", qmoe_espalier, "--deep").out


def test_summary_of_a_conversion(run: Run, llama_exl3: Path, tmp_path: Path) -> None:
    """What was read is said to be read; and decode digests are only verified where there are some."""
    for digests in ((), ("--digests",)):
        out = tmp_path / f"out{len(digests)}"
        shown = run("convert", llama_exl3, out, "--to", "espalier", *digests).out
        assert re.search(r"written +\S+ MB in \d+ files; read \S+ MB\n", shown)
        assert shown.endswith(f"espalier-format verify {out}{' --deep' if digests else ''}\n")


def test_bits_are_written_in_one_way(run: Run, llama_espalier: Path) -> None:
    for arguments in (("inspect", llama_espalier), ("verify", llama_espalier), ("demo",)):
        assert "7.200" in run(*arguments).out
    assert "7.20 " not in run("inspect", llama_espalier).out


def test_help_says_what_is_true(run: Run) -> None:
    shown = run("convert", "-h").out
    assert shown.startswith("Usage: espalier-format convert [OPTIONS] SRC DST\n")
    assert ".safetensors file" not in shown
    assert "what config.json states" in " ".join(shown.split())
    assert run("schema", "-h").out.startswith("Usage: espalier-format schema [OPTIONS] [DOCUMENT]\n")


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_no_width_cuts_anything_off(qmoe_espalier: Path, run_process: Run, columns: int) -> None:
    """From 80 columns on tables fit; below, the terminal wraps lines. What is shown is what a pipe gets."""
    piped = run_process("inspect", qmoe_espalier, "--experts").out
    shown = without_styles(in_terminal(columns, "inspect", qmoe_espalier, "--experts")[0])
    assert "…" not in shown
    assert shown.split() == piped.split()
    table = shown[shown.index("component") :]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80


def test_progress_bar_is_for_terminals(llama_espalier: Path) -> None:
    """On stderr, gone at the end; and stdout stays one document."""
    shown, code = in_terminal(100, "verify", llama_espalier, "--deep", "--json")
    assert code == 0
    assert "decoding modules" in shown
    assert json.loads(shown[shown.index("{\n") : shown.rindex("}") + 1])["ok"] is True
    hidden, _ = in_terminal(100, "verify", llama_espalier, "--deep", "--json", stderr=subprocess.DEVNULL)
    assert json.loads(hidden)["ok"] is True


def test_warnings_go_to_stderr(run: Run, tmp_path: Path) -> None:
    folder = exl3_draft([Exl3Module("mystery.widget", 100, 100)]).write(tmp_path / "e")
    for command in ("inspect", "verify"):
        outcome = run(command, folder)
        assert outcome.code == 0
        assert all(line.startswith("warning: ") for line in outcome.err.splitlines())
        assert outcome.err
        assert "warning:" not in outcome.out


def test_reader_that_goes_away(llama_espalier: Path) -> None:
    """As with `| head -1`: silent, whatever was left to print."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "espalier_format", "inspect", str(llama_espalier)],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_full_disk_behind_stdout(llama_espalier: Path, options: list[str]) -> None:
    """Also with --json the error is on stderr: there is no other place for it."""
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "espalier_format", "inspect", str(llama_espalier), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    assert process.returncode == 2
    assert process.stderr.startswith("error[write-failed]: cannot write the report to standard output")
    assert "the work itself is done" in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_closed_stderr_leaves_stdout_alone(llama_espalier: Path) -> None:
    command = f'"{sys.executable}" -m espalier_format verify "{llama_espalier}" --json 2>&-'
    process = subprocess.run(["sh", "-c", command], capture_output=True, check=False, text=True)
    assert process.returncode == 0
    assert json.loads(process.stdout)["ok"] is True


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_poor_encodings_lose_no_report(run_process: Run, qmoe_espalier: Path, encoding: str) -> None:
    outcome = run_process("inspect", qmoe_espalier, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (outcome.code, outcome.err) == (0, "")
    assert "exl3-mul1@2.5" in outcome.out
    assert "\\u" not in outcome.out
    assert " - " in outcome.out


class TestHostileNames:
    """Text that comes from files cannot move the cursor, colour, retitle or reorder what a person reads."""

    def test_in_config(self, run: Run, tmp_path: Path) -> None:
        draft = espalier_draft(config={"architectures": [HOSTILE], "model_type": HOSTILE})
        draft.block["producer"]["name"] = HOSTILE
        outcome = run("inspect", draft.write(tmp_path / "e"))
        assert outcome.code == 0
        assert outcome.out.count(safe_text(HOSTILE)) == 3
        self.check(outcome.out)

    def test_in_tensor_names(self, run: Run, tmp_path: Path) -> None:
        draft = exl3_draft([Exl3Module(HOSTILE, 128, 128)])
        assert run("inspect", draft.write(tmp_path / "fine")).code == 0
        del draft[f"{HOSTILE}.svh"]
        outcome = run("inspect", draft.write(tmp_path / "bad"))
        assert outcome.code in (1, 2)
        assert len(outcome.err.splitlines()) == 1
        self.check(outcome.err)

    def test_in_paths(self, run: Run, tmp_path: Path) -> None:
        folder = tmp_path / HOSTILE.replace("/", "")
        outcome = run("inspect", folder)
        assert outcome.code == 2
        self.check(outcome.err)
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(safetensors_bytes({"x": Tensor.of([1], "U8")}))
        self.check(run("inspect", folder).out)

    def test_in_findings_and_traceback(self, run: Run, tmp_path: Path) -> None:
        draft = exl3_draft([Exl3Module(HOSTILE, 128, 128)])
        values = draft[f"{HOSTILE}.suh"].array().copy()
        values[0] = float("nan")
        draft[f"{HOSTILE}.suh"] = Tensor.of(values, "F16")
        outcome = run("verify", draft.write(tmp_path / "e"))
        assert outcome.code == 1
        self.check(outcome.out + outcome.err)
        self.check(run("inspect", tmp_path / HOSTILE, "--debug").err)

    @staticmethod
    def check(text: str) -> None:
        assert text.replace("\n", "").isprintable()


def test_safe_text() -> None:
    assert safe_text("层 é ß [red]") == "层 é ß [red]"
    assert safe_text("a\x1b[31m\n\u202e\u2066\x9b\ud800") == r"a\x1b[31m\n\u202e\u2066\x9b\ud800"


@pytest.mark.parametrize("enabled", [True, False])
def test_inspect_pauses_the_collector_and_leaves_it_as_it_was(
    run: Callable[..., Any], llama_exl3: Path, monkeypatch: pytest.MonkeyPatch, *, enabled: bool
) -> None:
    from espalier_format.operations import inspect

    seen: list[bool] = []
    original = inspect.inspect_checkpoint
    monkeypatch.setattr(inspect, "inspect_checkpoint", lambda path: (seen.append(gc.isenabled()), original(path))[1])
    try:
        if not enabled:
            gc.disable()
        assert run("inspect", llama_exl3).code == 0
        assert run("inspect", "nowhere").code == 2
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False, False]
