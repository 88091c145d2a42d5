"""The conformance kit: known answers, and a judge of any decoder of the format (spec/conformance.md).

`run_conformance` tries the callables of a runtime: ``run_conformance({"codes": decode}).exit_code``. On the command
line it is ``espalier-format conformance --decoder module:function --kind codes``; with pytest,
``pytest --espalier-decoder codes=module:function``. `write_kit` writes everything to files for programs in other
languages. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from espalier_format.conformance.at_load import refuses_at_load
    from espalier_format.conformance.outcome import CaseResult, Mismatch
    from espalier_format.conformance.report import ConformanceReport
    from espalier_format.conformance.runner import run_conformance
    from espalier_format.conformance.suite import Options
    from espalier_format.conformance.writer import write_kit

__all__ = ["CaseResult", "ConformanceReport", "Mismatch", "Options", "refuses_at_load", "run_conformance", "write_kit"]

_HOMES: Final = {
    "CaseResult": "outcome",
    "ConformanceReport": "report",
    "Mismatch": "outcome",
    "Options": "suite",
    "refuses_at_load": "at_load",
    "run_conformance": "runner",
    "write_kit": "writer",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
