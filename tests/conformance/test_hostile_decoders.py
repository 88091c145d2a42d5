"""Callables and what they raise or return, where asking anything of it raises: cases fail, the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier_format.conformance import Options, run_conformance
from espalier_format.conformance.attempt import attempt
from espalier_format.conformance.loading import load_decoders
from espalier_format.errors import UsageError

ONE = Options(only=("codes/int6@4", "open/valid/dense", "open/refused/version-2"))


class NoCode(Exception):  # noqa: N818
    @property
    def code(self) -> str:
        raise RuntimeError("no code")


class NoText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit


class Bare(BaseException):
    pass


class AnyCode(str):
    """Equal to every code."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class NoArray:
    def __array__(self, *_: object, **__: object) -> Any:
        raise Bare("no array")

    @property
    def close(self) -> Any:
        raise Bare


def raising(error: BaseException) -> Callable[..., Any]:
    def decoder(*_: object) -> None:
        raise error

    return decoder


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoCode("x"), "raised NoCode: x"),
        (NoText(), "raised NoText"),
        (GeneratorExit(), "raised GeneratorExit"),
        (Bare("a\nb"), "raised Bare: a b"),
    ],
)
def test_exceptions(error: BaseException, message: str) -> None:
    report = run_conformance({"codes": raising(error), "open": raising(error)}, options=ONE)
    messages = [result.mismatch.message for result in report.failures if result.mismatch is not None]
    assert len(messages) == len(report.results) == 3
    assert all(found.startswith(message) for found in messages)


def test_results() -> None:
    report = run_conformance({"codes": lambda *_: NoArray(), "open": lambda _: NoArray()}, options=ONE)
    messages = {result.case: result.mismatch.message for result in report.failures if result.mismatch is not None}
    assert messages["codes/int6@4"] == "raised Bare: no array"
    assert "open/valid/dense" not in messages  # it was opened; that it cannot be closed is no matter of the format


def test_a_code_that_equals_every_code_is_none() -> None:
    report = run_conformance({"open": lambda _: AnyCode("anything")}, options=ONE)
    assert len(report.failures) == 2


def test_a_callable_without_a_name() -> None:
    class Nameless:
        def __getattribute__(self, name: str) -> Any:
            raise Bare

        def __call__(self, *_: object) -> None:
            pass

    report = run_conformance({"codes": Nameless()}, options=ONE)
    assert report.kinds[0].decoder == "a Nameless"


def test_interrupts_pass() -> None:
    class Interrupting(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(raising(Interrupting()))


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_decoder.py").write_text("class Bare(BaseException):\n    pass\nraise Bare('x')\n")
    (tmp_path / "lazy_decoder.py").write_text("def __getattr__(name):\n    raise GeneratorExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="cannot import bare_decoder: Bare: x"):
        load_decoders(["bare_decoder:f"], "codes")
    with pytest.raises(UsageError, match="cannot find lazy_decoder:f: GeneratorExit"):
        load_decoders(["lazy_decoder:f"], "codes")


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """The decoder's process ends with the command's, and the temporary files go."""
    (tmp_path / "hanging.py").write_text(
        "import os, pathlib, time\n"
        "def codes(*_):\n"
        "    pathlib.Path('started').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "espalier_format", "conformance", "--decoder", "hanging:codes", "--kind", "codes"]
    run = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    started = tmp_path / "started"
    assert _soon(lambda: started.exists() and bool(started.read_text()))
    child = int(started.read_text())
    assert list(temporary.iterdir())
    run.kill()
    run.wait()
    assert _soon(
        lambda: not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text()
    )
    assert _soon(lambda: not list(temporary.iterdir()))


def _soon(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
