"""Runs the kit against the callables of a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from espalier_format.conformance.at_load import is_declared
from espalier_format.conformance.attempt import asked
from espalier_format.conformance.bench import Bench
from espalier_format.conformance.outcome import LEVELS, CaseResult, Kind
from espalier_format.conformance.report import ConformanceReport, KindResult
from espalier_format.conformance.suite import Decoder, Options, cases_of
from espalier_format.errors import UsageError


def run_conformance(
    decoders: Mapping[Kind, Decoder],
    *,
    options: Options | None = None,
    device: str | None = None,
    claim: int | None = None,
    names: Mapping[Kind, str] | None = None,
) -> ConformanceReport:
    """Try every case of the kit with the callables of a runtime, and report by level (spec/conformance.md).

    ``decoders`` maps a kind to a callable: at least one of "open", "verify" (level 1), "codes", "weights", "load"
    (level 2) and "matmul" (level 3); §8 says with what they are called. ``device`` None gives them numpy arrays,
    bfloat16 as uint16 bit patterns, anything else torch tensors on that device. ``claim`` is a level that has to be
    shown: where one up to it is not tested, the report's exit code is 1. ``names`` are for the report. Nothing a
    callable raises leaves this function, but interrupts.

    Raises:
        UsageError: there is no callable, no such kind, level or device, or no case that the options want.
        DependencyError: ``device`` is given, and torch is not installed.
    """
    chosen = Options() if options is None else options
    unknown = [kind for kind in decoders if kind not in LEVELS]
    if unknown or not decoders:
        raise UsageError("a decoder is of one of these kinds", expected=list(LEVELS), got=unknown or "none")
    if claim is not None and claim not in LEVELS.values():
        raise UsageError("no such level", expected=sorted(set(LEVELS.values())), got=claim)
    every = replace(chosen, only=(), skip=())
    offered = {kind: list(cases_of(kind, every)) for kind in LEVELS if kind in decoders}
    selected = {kind: [case for case in cases if chosen.wants(case.name)] for kind, cases in offered.items()}
    total = sum(len(cases) for cases in offered.values())
    if not any(selected.values()):
        raise UsageError("no case has such a name", got=[*chosen.only, *(f"not {name}" for name in chosen.skip)])
    results: list[CaseResult] = []
    kinds: list[KindResult] = []
    with Bench(device) as bench:
        for kind, cases in selected.items():
            own = [case.run(decoders[kind], bench) for case in cases]
            failed = sum(not result.passed for result in own)
            name, declared = _name(decoders[kind], kind, names), kind == "weights" and is_declared(decoders[kind])
            shows = kind == "load" and all(chosen.wants(case.name) for case in offered[kind] if case.to_refuse)
            kinds.append(KindResult(kind, name, len(own) - failed, failed, declared, shows))
            results += own
    return ConformanceReport(tuple(results), tuple(kinds), total - len(results), claim)


def _name(decoder: Decoder, kind: Kind, names: Mapping[Kind, str] | None) -> str:
    if names is not None and kind in names:
        return names[kind]
    return asked(lambda: _own_name(decoder), f"a {type(decoder).__name__}")


def _own_name(decoder: Decoder) -> str:
    module, function = getattr(decoder, "__module__", None), getattr(decoder, "__qualname__", None)
    return f"{module}:{function}" if module and function else repr(decoder)
