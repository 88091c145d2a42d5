"""Callables and what they raise or return, where asking anything of it raises: cases fail, the run goes on."""

from __future__ import annotations

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
