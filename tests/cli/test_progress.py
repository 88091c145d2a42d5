"""Progress where stderr is no terminal: plain lines at a pace for logs, and nothing else changes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantize_cases import moe_draft

from espalier_format.cli import progress, quantities
from espalier_format.cli.progress import ProgressLines

Run = Callable[..., Any]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def advance(lines: ProgressLines, clock: Clock, seconds: float, n_bytes: int) -> None:
    clock.now += seconds
    lines.advance(n_bytes)


def test_a_line_says_what_is_done_and_what_is_left() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock=clock)
    lines.start(4_000_000_000, "encoding")
    for _ in range(3):
        advance(lines, clock, 20, 500_000_000)
    lines.finish()
    assert stream.getvalue().splitlines() == [
        "encoding: 12 %, 500 MB of 4.00 GB, 20 s so far, about 2 min left",
        "encoding: 25 %, 1.00 GB of 4.00 GB, 40 s so far, about 2 min left",
        "encoding: 37 %, 1.50 GB of 4.00 GB, 1 min so far, about 2 min left",
    ]


def test_what_was_there_already_does_not_count_for_long() -> None:
    """The first 900 GB of 1 TB are found in no time, the rest takes 5 s a GB."""
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock=clock)
    lines.start(10**12, "hashing files")
    lines.advance(900 * 10**9)
    for _ in range(20):
        advance(lines, clock, 5, 10**9)
    lefts = [line.partition("about ")[2] for line in stream.getvalue().splitlines()]
    assert lefts[:2] == ["1 s left", "2 s left"]  # nothing else is known yet
    assert lefts[-1] == "7 min left"


def test_the_pace_is_that_of_a_log() -> None:
    """Nothing of a short job; every ten seconds at first; every minute once a job has taken ten of them."""
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock=clock)
    for label in ("reading scales", "hashing files"):  # each job is one of its own: its time begins anew
        lines.start(99, label)
        for _ in range(99):
            advance(lines, clock, 0.1, 1)
        lines.finish()
    assert stream.getvalue() == ""
    lines.start(3600, "encoding")
    for _ in range(3600):
        advance(lines, clock, 1, 1)
    lines.finish()
    shown = stream.getvalue().splitlines()
    assert len(shown) == 59 + 50  # at 10, 20 … 590, then 650, 710 … 3590
    assert shown[0] == "encoding: 0 %, 10 B of 3.60 kB, 10 s so far, about 1 h left"
    assert shown[-1] == "encoding: 99 %, 3.59 kB of 3.60 kB, 1 h so far, about 10 s left"


def test_nothing_done_yet_and_nothing_to_do() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, clock=clock)
    lines.start(100, "hashing files")
    advance(lines, clock, 11, 0)
    lines.start(0, "encoding")
    advance(lines, clock, 11, 0)
    assert stream.getvalue() == (
        "hashing files: 0 %, 0 B of 100 B, 11 s so far\nencoding: 100 %, 0 B of 0 B, 11 s so far\n"
    )


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed")])
def test_a_log_that_is_gone_does_not_stop_the_work(error: Exception) -> None:
    calls = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            calls.append(text)
            raise error

    lines = ProgressLines(Gone(), pause=0)
    lines.start(10, "encoding")
    for _ in range(10):
        lines.advance(1)
    lines.finish()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3569, "59 min"), (3590, "1 h"), (11_990, "3 h 20 min")],
)
def test_duration(seconds: float, written: str) -> None:
    assert quantities.duration(seconds) == written


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step write its line."""
    made = ProgressLines
    monkeypatch.setattr(progress, "ProgressLines", lambda stream: made(stream, pause=0))


@pytest.mark.usefixtures("talkative", "fake_encoder")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_quantize_tells_a_log_how_far_it_is(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    source = moe_draft().write(tmp_path / "source")
    outcome = run("quantize", source, tmp_path / "out", "--preset", "espalier", *options)
    assert outcome.code == 0
    lines = outcome.err.splitlines()
    assert list(dict.fromkeys(line.partition(":")[0] for line in lines)) == ["measuring", "encoding", "writing"]
    encoding = [line for line in lines if line.startswith("encoding")]
    assert len(encoding) >= 21
    assert encoding[-1].startswith("encoding: 100 %, ")
    assert " left" not in outcome.out
    if options:
        assert json.loads(outcome.out)["bits"] == 2.5


@pytest.mark.usefixtures("talkative")
def test_other_commands_do_as_well(run: Run, llama_exl3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted = run("convert", llama_exl3, out, "--to", "espalier", "--digests", "--json")
    assert converted.document["target_format"] == "espalier"
    labels = [line.partition(":")[0] for line in converted.err.splitlines()]
    assert list(dict.fromkeys(labels)) == ["converting", "digests"]
    verified = run("verify", out, "--deep", "--json")
    assert verified.document["ok"] is True
    labels = [line.partition(":")[0] for line in verified.err.splitlines()]
    assert list(dict.fromkeys(labels)) == ["reading scales", "hashing files", "decoding modules"]


SLOW = """
import sys
from espalier_format.cli import frame, progress

made = progress.ProgressLines
progress.ProgressLines = lambda stream: made(stream, pause=0)
sys.exit(frame.main(sys.argv[1:]))
"""


def test_a_reader_of_stderr_that_goes_away(llama_espalier: Path) -> None:
    """As with ``2> >(head -1)``: the work is done, and its report is whole."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-c", SLOW, "verify", str(llama_espalier), "--json"],
        stdout=subprocess.PIPE,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert process.returncode == 0
    assert json.loads(process.stdout)["ok"] is True
