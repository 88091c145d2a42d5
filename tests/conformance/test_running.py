"""`run_conformance`, its options, its report, and how decoders are found; not what single cases compare."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espalier_format.conformance as kit
from espalier_format.conformance import ConformanceReport, Options, run_conformance
from espalier_format.conformance.adapters import numpy_adapter
from espalier_format.conformance.bench import Bench
from espalier_format.conformance.loading import load_decoders
from espalier_format.conformance.outcome import LEVELS, CaseResult, Mismatch
from espalier_format.conformance.report import KindResult
from espalier_format.errors import DependencyError, UsageError

ADAPTER = "espalier_format.conformance.adapters.numpy_adapter"
FEW = Options(only=("codes/e2m1@*", "weights/int6@4/in0-*", "matmul/int6@4/*", "open/valid/*", "load/dense/lm_head/*"))


def report_of(*kinds: tuple[Any, int, int], claim: int | None = None) -> ConformanceReport:
    results = [
        CaseResult(f"{kind}/{number}", kind, None if number < passed else Mismatch("wrong"))
        for kind, passed, failed in kinds
        for number in range(passed + failed)
    ]
    return ConformanceReport(tuple(results), tuple(KindResult(kind, "m:f", p, f) for kind, p, f in kinds), 0, claim)


@pytest.mark.parametrize(
    ("kinds", "claim", "verdicts", "shown", "exit_code"),
    [
        ([("codes", 2, 0)], None, ("not tested", "passed", "not tested"), 0, 0),
        ([("codes", 2, 0)], 2, ("not tested", "passed", "not tested"), 0, 1),
        ([("open", 1, 0), ("codes", 2, 0)], 2, ("passed", "passed", "not tested"), 2, 0),
        ([("open", 1, 0), ("codes", 2, 0)], 3, ("passed", "passed", "not tested"), 2, 1),
        ([("open", 1, 0), ("codes", 2, 0), ("weights", 1, 1)], 1, ("passed", "failed", "not tested"), 1, 1),
        ([("open", 1, 1), ("matmul", 2, 0)], None, ("failed", "not tested", "passed"), 0, 1),
        ([("open", 1, 0), ("load", 2, 0), ("matmul", 2, 0)], 3, ("passed", "passed", "passed"), 3, 0),
        ([("open", 1, 0), ("codes", 0, 0)], None, ("passed", "not tested", "not tested"), 1, 0),
    ],
)
def test_what_a_report_says(
    kinds: list[tuple[Any, int, int]], claim: int | None, verdicts: tuple[str, ...], shown: int, exit_code: int
) -> None:
    report = report_of(*kinds, claim=claim)
    assert tuple(report.verdict(level) for level in (1, 2, 3)) == verdicts
    assert (report.shown, report.exit_code) == (shown, exit_code)
    document = report.to_json()
    assert document["levels"] == dict(zip("123", verdicts, strict=True))
    assert (document["level_shown"], document["level_claimed"]) == (shown, claim)
    assert document["conforms"] == (exit_code == 0)


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (None, "not tested"),
        ((2, 0, True), "passed"),
        ((2, 0, False), "not tested"),
        ((1, 1, True), "failed"),
        ((1, 1, False), "failed"),
        ((0, 0, True), "not tested"),
    ],
)
def test_what_is_left_to_loading_has_to_be_shown(load: tuple[int, int, bool] | None, verdict: str) -> None:
    kinds = [KindResult("open", "m:f", 1, 0), KindResult("weights", "m:f", 3, 0, refuses_at_load=True)]
    if load is not None:
        kinds.append(KindResult("load", "m:f", *load[:2], shows_refusals=load[2]))
    results = tuple(
        CaseResult(f"{kind.kind}/{number}", kind.kind, None if number < kind.passed else Mismatch("wrong"))
        for kind in kinds
        for number in range(kind.passed + kind.failed)
    )
    report = ConformanceReport(results, tuple(kinds), 0, 2)
    assert report.verdict(2) == verdict
    assert report.exit_code == (verdict != "passed")
    decoders: Any = report.to_json()["decoders"]
    assert [decoder["refuses_at_load"] for decoder in decoders] == [False, True, False][: len(kinds)]


REFUSALS = ("load/refused/*", "load/exl3-codebooks/layers.0.e_proj/*")


@pytest.mark.parametrize(
    ("only", "dtypes", "verdict"),
    [
        (("load/dense/lm_head/*",), (), "not tested"),
        (REFUSALS[:1], (), "not tested"),
        (("load/refused/*/float32", REFUSALS[1]), (), "not tested"),
        (REFUSALS, (), "passed"),
        (REFUSALS[:1], ("float32", "bfloat16"), "passed"),
        (REFUSALS[:1], ("float16",), "not tested"),
    ],
)
def test_the_cases_that_loading_must_refuse_have_to_be_tried(
    only: tuple[str, ...], dtypes: tuple[Any, ...], verdict: str
) -> None:
    """Of a program that refuses at load; whichever its options leave out, the others show nothing of them."""
    weights = kit.refuses_at_load(partial(numpy_adapter.weights))
    options = Options(only=("weights/edge/scale-nan/*", *only), **({"dtypes": dtypes} if dtypes else {}))
    report = run_conformance({"weights": weights, "load": numpy_adapter.load}, options=options)
    assert (report.verdict(2), report.failures) == (verdict, ())


class Runtime:
    """A runtime whose decoder is a method."""

    __slots__ = ()

    def weights(self, *arguments: Any) -> Any:
        return numpy_adapter.weights(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        return self.weights(*arguments)


@pytest.mark.parametrize("decoder", [Runtime().weights, Runtime()])
def test_any_callable_can_be_declared(decoder: Any) -> None:
    """Methods and objects with slots take no attribute."""
    declared = kit.refuses_at_load(decoder)
    report = run_conformance({"weights": declared}, options=Options(only=("weights/int6@4/in0-*",)))
    assert [kind.refuses_at_load for kind in report.kinds] == [True]
    assert (report.failures, report.verdict(2)) == ((), "not tested")
    assert report.kinds[0].decoder.endswith("Runtime.weights") == hasattr(decoder, "__qualname__")


def test_a_run_of_several_kinds() -> None:
    decoders, names = load_decoders([ADAPTER])
    report = run_conformance(decoders, options=FEW, names=names)
    assert [kind.kind for kind in report.kinds] == list(LEVELS)
    assert {kind.kind: kind.passed for kind in report.kinds} == {
        "open": 4, "verify": 0, "codes": 3, "weights": 3, "load": 3, "matmul": 12, "experts": 0,
    }  # fmt: skip
    assert report.skipped == 1488 - 42 - len(report.results)  # 42 are for readers of EXL3
    assert report.kinds[2].decoder == f"{ADAPTER}:codes"
    assert report.to_json()["failures"] == []


def test_names_come_from_the_callables() -> None:
    report = run_conformance({"codes": numpy_adapter.codes}, options=FEW)
    assert report.kinds[0].decoder == f"{ADAPTER}:codes"


def test_a_failure_as_json() -> None:
    report = run_conformance({"codes": lambda *a: numpy_adapter.codes(*a) + 1}, options=Options(only=("codes/e2m1@1",)))
    (failure,) = report.to_json()["failures"]  # type: ignore[misc]
    right = int(numpy_adapter.codes(np.zeros((1, 1, 16), np.int16), "e2m1@1")[0, 0])
    assert right == -12
    assert failure["case"] == "codes/e2m1@1"
    assert (failure["kind"], failure["level"], failure["passed"]) == ("codes", 2, False)
    assert failure["position"] == [0, 0]
    assert int(failure["got"]) == int(failure["expected"]) + 1


def test_a_decoder_that_changes_its_input_is_wrong() -> None:
    def greedy(trellis: np.ndarray, codebook: str) -> np.ndarray:
        codes = numpy_adapter.codes(trellis, codebook)
        trellis[-1, -1, -1] ^= 1
        return codes

    def scaling(x: np.ndarray, *rest: Any) -> np.ndarray:
        product = numpy_adapter.matmul(x, *rest)
        if x.dtype == np.float16:
            x.shape = (x.size,)
        return product

    report = run_conformance({"codes": greedy, "matmul": scaling}, options=FEW)
    wrong = {result.case for result in report.results if result.mismatch is not None}
    halves = {
        result.case for result in report.results if result.case.startswith("matmul/") and "float16" in result.case
    }
    assert wrong == {result.case for result in report.results if result.kind == "codes"} | {
        case for case in halves if case.endswith("/float16")
    }
    assert {result.mismatch.message for result in report.failures if result.mismatch} == {
        "changed its input: an array that it was given"
    }
    # What a decoder gets is a copy: the kit is what it was.
    assert run_conformance({"codes": numpy_adapter.codes, "matmul": numpy_adapter.matmul}, options=FEW).exit_code == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_decoder_that_changes_a_tensor_is_wrong(dtype: Any) -> None:
    pytest.importorskip("torch")
    from espalier_format.conformance.adapters import torch_adapter

    def scaling(x: Any, *rest: Any) -> Any:
        product = torch_adapter.matmul(x, *rest)
        x.neg_()
        return product

    def shrinking(trellis: Any, codebook: str) -> Any:
        codes = torch_adapter.codes(trellis, codebook)
        trellis.resize_(0)
        return codes

    options = Options(only=("matmul/int6@4/*", "codes/int6@4"), dtypes=(dtype,))
    report = run_conformance({"codes": shrinking, "matmul": scaling}, options=options, device="cpu")
    assert len(report.failures) == len(report.results) > 1
    assert all("changed its input" in result.mismatch.message for result in report.failures if result.mismatch)


def test_what_numpy_decoders_get() -> None:
    seen: dict[str, Any] = {}

    def weights(*arguments: Any) -> Any:
        seen[arguments[8]] = arguments
        return numpy_adapter.weights(*arguments)

    def matmul(*arguments: Any) -> Any:
        seen[f"x {arguments[0].dtype}"] = arguments
        return numpy_adapter.matmul(*arguments)

    options = Options(only=("weights/int6@4/in32-*", "matmul/edge/two-*"))
    assert run_conformance({"weights": weights, "matmul": matmul}, options=options).exit_code == 0
    trellis, suh, svh, codebook, block_in, block_out, inputs, outputs, dtype = seen["bfloat16"]
    assert (trellis.dtype, suh.dtype, svh.dtype, codebook, dtype) == (
        np.int16, np.float16, np.float16, "int6@4", "bfloat16",
    )  # fmt: skip
    assert (block_in, block_out, inputs, outputs) == (32, 64, 63, 61)
    assert {"x float32", "x float16", "x uint16"} <= set(seen)
    assert seen["x uint16"][4].dtype == np.uint16  # the bias is in the dtype of x


def test_what_torch_decoders_get() -> None:
    torch = pytest.importorskip("torch")
    from espalier_format.conformance.adapters import torch_adapter

    seen: set[Any] = set()

    def weights(*arguments: Any) -> Any:
        seen.update(argument.dtype for argument in arguments[:3])
        seen.add(arguments[8])
        return torch_adapter.weights(*arguments)

    assert run_conformance({"weights": weights}, options=FEW, device="cpu").exit_code == 0
    assert seen == {torch.int16, torch.float16, torch.float32, torch.bfloat16}


def test_bfloat16_of_numpy_may_be_signed_patterns() -> None:
    def signed(*arguments: Any) -> Any:
        weight = numpy_adapter.weights(*arguments)
        return weight.view(np.int16) if arguments[8] == "bfloat16" else weight

    assert run_conformance({"weights": signed}, options=FEW).exit_code == 0


def test_only_some_output_formats() -> None:
    def no_float16(*arguments: Any) -> Any:
        assert arguments[8] == "bfloat16"
        return numpy_adapter.weights(*arguments)

    report = run_conformance({"weights": no_float16}, options=Options(dtypes=("bfloat16",)))
    assert (report.exit_code, len(report.results), report.skipped) == (0, 196, 0)


def test_a_folder_may_be_refused_by_a_returned_code() -> None:
    from espalier_format.conformance.refusals import refusal_cases

    codes = {case.name: case.code for case in refusal_cases()}
    report = run_conformance({"open": lambda folder: codes.get(Path(folder).name)})
    assert report.exit_code == 0
    assert len(report.results) == 126


def test_what_is_opened_is_closed() -> None:
    closed: list[str] = []

    class Opened:
        def close(self) -> None:
            closed.append("closed")

    run_conformance({"open": lambda _: Opened()}, options=Options(only=("open/valid/*",)))
    assert len(closed) == 4


def test_the_folders_of_a_run_are_removed() -> None:
    seen: list[Path] = []
    run_conformance({"open": lambda folder: seen.append(Path(folder))}, options=Options(only=("open/valid/*",)))
    assert seen
    assert not any(folder.exists() for folder in seen)


@pytest.mark.parametrize(
    ("returned", "part"),
    [
        ([[1, 2], [3]], "the codes have dtype list"),
        ("codes", "the codes have dtype str"),
        (object(), "the codes have dtype object"),
        ([[1, 2], [3, 4]], "the codes have shape (2, 2)"),
    ],
)
def test_results_that_are_no_arrays(returned: object, part: str) -> None:
    report = run_conformance({"codes": lambda *_: returned}, options=Options(only=("codes/int6@4",)))
    (failure,) = report.failures
    assert failure.mismatch is not None
    assert failure.mismatch.message.startswith(part)


def test_tensors_that_numpy_does_not_have() -> None:
    torch = pytest.importorskip("torch")
    for made, name in (
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, 2, dtype=torch.int8).to_sparse(), "int8"),
    ):
        report = run_conformance({"codes": lambda *_, made=made: made}, options=Options(only=("codes/int6@4",)))
        assert report.failures[0].mismatch is not None
        assert name in report.failures[0].mismatch.message


def test_a_decoder_that_exits() -> None:
    report = run_conformance({"codes": lambda *_: sys.exit(3)}, options=Options(only=("codes/int6@4",)))
    assert report.failures[0].mismatch is not None
    assert report.failures[0].mismatch.message == "raised SystemExit: 3"


def test_an_interrupt_passes_through() -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_conformance({"codes": interrupted}, options=FEW)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"decoders": {}}, "one of these kinds"),
        ({"decoders": {"decode": len}}, "one of these kinds"),
        ({"decoders": {"codes": len}, "claim": 4}, "no such level"),
        ({"decoders": {"codes": len}, "options": Options(only=("weights/*",))}, "no case has such a name"),
        ({"decoders": {"codes": len}, "options": Options(skip=("*",))}, "no case has such a name"),
    ],
)
def test_bad_usage(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        run_conformance(arguments.pop("decoders"), **arguments)


def test_unknown_output_formats() -> None:
    for dtypes in (("float8",), ()):
        with pytest.raises(UsageError, match="no such output dtype"):
            Options(dtypes=dtypes)  # type: ignore[arg-type]


def test_a_device_that_is_not_there() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match="cannot use the device 'nonsense'"):
        Bench("nonsense")


def test_a_device_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError):
        run_conformance({"codes": numpy_adapter.codes}, options=FEW, device="cpu")


def test_decoders_by_name() -> None:
    decoders, names = load_decoders([f"{ADAPTER}:codes"], "codes")
    assert decoders == {"codes": numpy_adapter.codes}
    assert names == {"codes": f"{ADAPTER}:codes"}
    decoders, _ = load_decoders([f"weights={ADAPTER}:weights", f"codes={ADAPTER}:codes"])
    assert list(decoders) == ["weights", "codes"]
    assert set(load_decoders([ADAPTER])[0]) == set(LEVELS)
    assert load_decoders([ADAPTER], "matmul")[0] == {"matmul": numpy_adapter.matmul}
    assert load_decoders(["codes=os:path.join"])[1] == {"codes": "os:path.join"}


@pytest.mark.parametrize(
    ("specification", "kind", "match"),
    [
        (f"{ADAPTER}:codes", None, "say of which kind"),
        (f"decode={ADAPTER}:codes", None, "no such kind"),
        (f"{ADAPTER}:nothing", "codes", "cannot find"),
        (f"{ADAPTER}:__doc__", "codes", "cannot be called"),
        ("no_such_module_here:f", "codes", "cannot import no_such_module_here: ModuleNotFoundError"),
        ("math", None, "no function of that name"),
        (":f", "codes", "a decoder is named module:function"),
        ("a/b.py:f", "codes", "a decoder is named module:function"),
    ],
)
def test_decoders_that_cannot_be_found(specification: str, kind: str | None, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load_decoders([specification], kind)


def test_two_decoders_of_a_kind() -> None:
    with pytest.raises(UsageError, match="two decoders of the kind codes"):
        load_decoders([ADAPTER, f"codes={ADAPTER}:codes"])


def test_an_import_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_decoder.py").write_text("1 / 0\n")
    (tmp_path / "needy_decoder.py").write_text(
        "from espalier_format.errors import DependencyError\nraise DependencyError('needs x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="cannot import broken_decoder: ZeroDivisionError: division by zero"):
        load_decoders(["broken_decoder:f"], "codes")
    with pytest.raises(DependencyError, match="needs x"):
        load_decoders(["needy_decoder:f"], "codes")


def test_the_public_names() -> None:
    assert set(kit.__all__) <= set(dir(kit))
    for name in kit.__all__:
        assert getattr(kit, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kit.nothing  # noqa: B018
