"""The pytest plugin: ``pytest --espalier-decoder codes=module:function`` adds one test per case of the kit.

pytest loads this module wherever the package is installed, so it imports nothing else, and without its option it does
nothing. The tests have the names of the cases, below ``espalier-conformance``: ``-k espalier-conformance`` selects
them all.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from espalier_format.conformance.bench import Bench
    from espalier_format.conformance.suite import Case, Decoder

NODE: Final = "espalier-conformance"
_BENCH: Final = pytest.StashKey["Bench"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; all of them begin with ``--espalier``."""
    group = parser.getgroup("espalier", "conformance of a decoder of Espalier checkpoints")
    group.addoption(
        "--espalier-decoder",
        action="append",
        default=[],
        metavar="KIND=MODULE:FUNCTION",
        help="Add a test per case for this callable; KIND is open, verify, codes, weights, load, matmul or experts. Or "
        "a MODULE with functions named like kinds. May be repeated.",
    )
    group.addoption("--espalier-device", metavar="DEVICE", help="Give torch tensors on it (cpu, cuda), not numpy.")
    group.addoption(
        "--espalier-dtype",
        action="append",
        default=[],
        type=_dtype,
        metavar="DTYPE",
        help="Only this output format: float32, float16 or bfloat16. May be repeated.",
    )
    group.addoption("--espalier-exact", action="store_true", help="Weights must be correctly rounded.")
    group.addoption("--espalier-exl3", action="store_true", help="Also refusals that only readers of EXL3 can give.")


def _dtype(name: str) -> str:
    from espalier_format.codec.dtype_names import parse_dtype  # noqa: PLC0415 - only where it is asked for
    from espalier_format.errors import UsageError  # noqa: PLC0415

    try:
        return parse_dtype(name)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error


@pytest.hookimpl(tryfirst=True)  # so that -k and -m see the new tests
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests."""
    if config.getoption("espalier_decoder"):
        suite = ConformanceSuite.from_parent(session, name=NODE, nodeid=NODE)
        tests = list(suite.collect())
        for test in tests:
            test.ihook.pytest_itemcollected(item=test)
        # So that reports count them, as if pytest itself had asked for them.
        suite.ihook.pytest_collectreport(report=pytest.CollectReport(suite.nodeid, "passed", None, [*tests]))
        items.extend(tests)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the checkpoints that tests opened."""
    bench = config.stash.get(_BENCH, None)
    if bench is not None:
        bench.close()


class ConformanceSuite(pytest.Collector):
    """The cases of the decoders that the command line names."""

    def collect(self) -> Iterator[ConformanceTest]:
        """Yield a test per case; what is wrong with the options ends the run as bad usage."""
        from espalier_format.conformance.bench import Bench  # noqa: PLC0415 - only where it is asked for
        from espalier_format.conformance.loading import load_decoders, see_current_folder  # noqa: PLC0415
        from espalier_format.conformance.suite import Options, cases_of  # noqa: PLC0415
        from espalier_format.errors import EspalierError  # noqa: PLC0415

        config = self.config
        see_current_folder(config.invocation_params.dir)
        try:
            decoders, _ = load_decoders(config.getoption("espalier_decoder"))
            bench = Bench(config.getoption("espalier_device"))
        except EspalierError as error:
            raise pytest.UsageError(f"--espalier-decoder: {error}") from error
        config.stash[_BENCH] = bench
        options = Options(
            dtypes=tuple(config.getoption("espalier_dtype")) or Options().dtypes,
            exact=config.getoption("espalier_exact"),
            readers=("espalier", "exl3", "plain") if config.getoption("espalier_exl3") else ("espalier",),
        )
        for kind, decoder in decoders.items():
            for case in cases_of(kind, options):
                yield ConformanceTest.from_parent(self, name=case.name, case=case, decoder=decoder, bench=bench)


class ConformanceTest(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, decoder: Decoder, bench: Bench, **more: Any) -> None:
        super().__init__(**more)
        self._case, self._decoder, self._bench = case, decoder, bench

    def runtest(self) -> None:
        """Call the decoder."""
        result = self._case.run(self._decoder, self._bench)
        if result.mismatch is not None:
            raise ConformanceError(result.mismatch.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the message alone where the decoder is wrong."""
        if isinstance(excinfo.value, ConformanceError):
            return f"{self.name}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the place for reports: there is no file."""
        return self.path, None, f"{NODE}::{self.name}"


class ConformanceError(AssertionError):
    """A decoder does not do what the specification says."""
