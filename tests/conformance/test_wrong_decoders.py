"""Decoders that are wrong in one way each: the kit fails them, and says what is wrong.

Each is the numpy decoder with one mistake. That right ones pass is in test_own_decoders.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.conformance import Options, refuses_at_load, run_conformance
from espalier_format.conformance.adapters import numpy_adapter
from espalier_format.conformance.outcome import Kind, Mismatch
from espalier_format.conformance.refusals import refusal_cases
from espalier_format.errors import EspalierError, ScaleOverflowError
from espalier_format.kernels import reference

Decoder = Callable[..., Any]


def only_failure(kind: Kind, decoder: Decoder, case: str, **how: Any) -> Mismatch:
    """Run one case, which must fail."""
    (result,) = run_conformance({kind: decoder}, options=Options(only=(case,), **how)).results
    assert result.mismatch is not None
    return result.mismatch


def passes(kind: Kind, decoder: Decoder, case: str, **how: Any) -> bool:
    report = run_conformance({kind: decoder}, options=Options(only=(case,), **how))
    return report.exit_code == 0


# Codes


def one_bit_flipped(trellis: np.ndarray, codebook: str) -> np.ndarray:
    codes = numpy_adapter.codes(trellis, codebook).copy()
    codes.view(np.uint8 if codes.itemsize == 1 else np.uint16)[37, 21] ^= 1
    return codes


def test_one_bit_of_one_code() -> None:
    mismatch = only_failure("codes", one_bit_flipped, "codes/int6@4")
    right = int(numpy_adapter.codes(*code_operands("int6@4"))[37, 21])
    assert mismatch.position == (37, 21)
    assert (mismatch.expected, mismatch.got) == (str(right), str(right ^ 1))
    assert mismatch.message.startswith(f"code[37, 21] is {right ^ 1}, expected {right}; 1 of 122,880 wrong; all in the")
    assert "tile 2, 1" in mismatch.message


def test_one_bit_of_one_code_of_exl3() -> None:
    mismatch = only_failure("codes", one_bit_flipped, "codes/exl3-mcg@3")
    right = int(numpy_adapter.codes(*code_operands("exl3-mcg@3")).view(np.uint16)[37, 21])
    assert mismatch.message.startswith(f"code[37, 21] is 0x{right ^ 1:04x}, expected 0x{right:04x}; 1 of ")


def code_operands(codebook: str) -> tuple[np.ndarray, str]:
    from espalier_format.conformance.state_tour import state_tour

    return state_tour(get_codebook(codebook).half_steps), codebook


def tiles_transposed(trellis: np.ndarray, codebook: str) -> np.ndarray:
    codes = numpy_adapter.codes(trellis, codebook)
    rows, columns = codes.shape
    return codes.reshape(rows // 16, 16, columns // 16, 16).transpose(0, 3, 2, 1).reshape(rows, columns)


def other_grid(_trellis: np.ndarray, _codebook: str) -> np.ndarray:
    return numpy_adapter.codes(_trellis, {"int6@4": "exl3-mul1@4"}.get(_codebook, _codebook))


@pytest.mark.parametrize(
    ("decoder", "part"),
    [
        (tiles_transposed, "each tile is transposed"),
        (lambda *a: numpy_adapter.codes(*a).T, "the codes have shape (128, 960)"),
        (lambda *a: -numpy_adapter.codes(*a), "the signs are inverted"),
        (lambda *a: numpy_adapter.codes(*a).astype(np.float32), "the codes have dtype float32"),
        (other_grid, "the codes have dtype float16"),
        (lambda *a: numpy_adapter.codes(*a)[:-16], "the codes have shape (944, 128)"),
        (lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda *_: None, "the codes have dtype object"),
    ],
    ids=["tiles", "matrix", "signs", "float", "grid", "short", "crash", "nothing"],
)
def test_other_mistakes_in_codes(decoder: Decoder, part: str) -> None:
    assert part in only_failure("codes", decoder, "codes/int6@4").message


def test_codes_of_codebooks_that_do_not_exist() -> None:
    def nearest(trellis: np.ndarray, codebook: str) -> np.ndarray:
        return numpy_adapter.codes(trellis, {"e2m1@3": "int5@3"}.get(codebook, codebook))

    def silent(trellis: np.ndarray, codebook: str) -> np.ndarray:
        return numpy_adapter.codes(trellis, "e2m1@1" if codebook == "e2m1@1.0" else codebook)

    mismatch = only_failure("codes", nearest, "codes/refused/grid-without-this-width")
    assert mismatch.message == "refused with shape, expected codebook"
    mismatch = only_failure("codes", silent, "codes/refused/width-spelled-1.0")
    assert mismatch.message == "accepted, but must be refused with codebook"
    assert passes("codes", numpy_adapter.codes, "codes/refused/*")


# Weights


def weight_with(change: Callable[..., tuple[Any, ...]]) -> Decoder:
    """The numpy decoder, its arguments (trellis … out_features) changed."""
    return lambda *arguments: numpy_adapter.weights(*change(*arguments[:-1]), arguments[-1])


def padding_taken_for_zero(
    trellis: Any,
    suh: Any,
    svh: Any,
    codebook: str,
    block_in: int,
    block_out: int,
    inputs: int,
    outputs: int,
    _dtype: Any,
) -> np.ndarray:
    """Rotate what is left after cropping, filled up with zeros: float32 of a float64 computation."""
    from espalier_format.codec.rotation import hadamard

    book = get_codebook(codebook)
    values = reference.decode_codes(trellis, book).astype(np.float64) * book.value_scale
    values[inputs:] = 0
    values[:, outputs:] = 0
    for block, transposed in ((block_in, False), (block_out, True)):
        matrix = values.T if transposed else values
        signs = hadamard(block).astype(np.float64)
        matrix = (signs @ matrix.reshape(-1, signs.shape[0], matrix.shape[1])).reshape(matrix.shape)
        values = (matrix.T if transposed else matrix) / np.sqrt(max(block, 1))
    weight = values * suh.astype(np.float64)[:, None] * svh.astype(np.float64)
    return weight[:inputs, :outputs].T.astype(np.float32)


ROTATED = "weights/e2m1@2/in256-out32/float32"
"""Cropped on both sides, rotated by different blocks, with zeros and large numbers among its scales."""

WRONG_WEIGHTS: dict[str, tuple[Decoder, str]] = {
    "transposed": (lambda *a: numpy_adapter.weights(*a).T, "transposed: the order is (out_features, in_features)"),
    "not cropped": (
        weight_with(lambda *a: (*a[:6], padded(a[6], a[4]), padded(a[7], a[5]))),
        "it is not cropped to the true size",
    ),
    "no suh": (weight_with(lambda t, suh, *a: (t, np.ones_like(suh), *a)), "it looks like the weight without suh"),
    "no svh": (weight_with(lambda t, u, svh, *a: (t, u, np.ones_like(svh), *a)), "looks like the weight without svh"),
    "no scales": (
        weight_with(lambda t, suh, svh, *a: (t, np.ones_like(suh), np.ones_like(svh), *a)),
        "it looks like the weight without scales",
    ),
    "signs only": (
        weight_with(lambda t, suh, svh, *a: (t, np.sign(suh), np.sign(svh), *a)),
        "it looks like the weight with the signs of its scales only",
    ),
    "no input rotation": (
        weight_with(lambda *a: (*a[:4], 0, *a[5:])),
        "it looks like the weight without its input rotation",
    ),
    "no output rotation": (
        weight_with(lambda *a: (*a[:5], 0, *a[6:])),
        "it looks like the weight without its output rotation",
    ),
    "padding": (padding_taken_for_zero, "it looks like the weight with its padding taken for zero before the rotation"),
    "doubled": (lambda *a: 2 * numpy_adapter.weights(*a), "codes that were not multiplied by value_scale"),
    "negative": (lambda *a: -numpy_adapter.weights(*a), "it looks like the weight with inverted signs"),
    "no root": (lambda *a: 16 * np.sqrt(np.float32(32)) * numpy_adapter.weights(*a), "the factors 1/sqrt(block)"),
    "half": (lambda *a: numpy_adapter.weights(*a).astype(np.float16), "the result has dtype float16"),
    "coarse": (
        lambda *a: (numpy_adapter.weights(*a).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32),
        "all are close to it: something is rounded too coarsely",
    ),
    "refused": (lambda *_: raise_overflow(), "refused with scale-overflow, but must be accepted"),
}


def raise_overflow() -> None:
    raise ScaleOverflowError("no")


@pytest.mark.parametrize("mistake", WRONG_WEIGHTS)
def test_mistakes_in_weights(mistake: str) -> None:
    decoder, part = WRONG_WEIGHTS[mistake]
    assert part in only_failure("weights", decoder, ROTATED).message
    assert passes("weights", numpy_adapter.weights, ROTATED)


def with_one_wrong(value: Callable[[np.ndarray], float]) -> Decoder:
    def decode(*arguments: Any) -> np.ndarray:
        weight = numpy_adapter.weights(*arguments).copy()
        weight[40, 71] = value(weight)
        return weight

    return decode


@pytest.mark.parametrize("wrong", [0.0, np.nan, np.inf])
def test_one_wrong_weight(wrong: float) -> None:
    mismatch = only_failure("weights", with_one_wrong(lambda _: wrong), ROTATED)
    assert mismatch.position == (40, 71)
    assert mismatch.message.startswith(f"float32 weight[40, 71] is {wrong:g}, expected ")
    assert "; 1 of 20,833 wrong" in mismatch.message


def test_rounding_beyond_the_tolerance_and_within_it() -> None:
    """The bound of spec/rotation.md §6 for float32, 2^-22 and 2^-20 of the terms, computed here once more."""
    from espalier_format.conformance.modules import weight_modules

    (module,) = [m for m in weight_modules() if f"weights/{m.label}/float32" == ROTATED]
    exact, tensors = module.weight(), module.tensors()
    scale = abs(float(tensors.svh[40]) * float(tensors.suh[71]))
    bound = 2.0**-22 * abs(exact[40, 71]) + 2.0**-20 * 6 * scale
    assert bound > 0
    for factor, fine in ((0.9, True), (1.1, False)):
        decoder = with_one_wrong(lambda _, factor=factor: exact[40, 71] + factor * bound)
        assert passes("weights", decoder, ROTATED) == fine
        assert not passes("weights", decoder, ROTATED, exact=True)


def test_within_tolerance_is_not_correctly_rounded() -> None:
    def one_ulp_off(*arguments: Any) -> np.ndarray:
        weight = numpy_adapter.weights(*arguments).copy()
        weight.view(np.uint32)[40, 71] += 1
        return weight

    assert passes("weights", one_ulp_off, ROTATED)
    mismatch = only_failure("weights", one_ulp_off, ROTATED, exact=True)
    assert mismatch.position == (40, 71)
    assert "correctly rounded it is 0x" in mismatch.message
    assert mismatch.message.endswith("; 1 of 20,833 wrong; all are within the tolerance")


def test_a_zero_scale_makes_exact_zeros() -> None:
    def tiny(*arguments: Any) -> np.ndarray:
        return numpy_adapter.weights(*arguments) + np.float32(1e-30)

    mismatch = only_failure("weights", tiny, "weights/edge/all-outputs-zero/float32")
    assert "expected 0, at most 0 away; 3,660 of 3,660 wrong" in mismatch.message


def test_scales_that_must_be_refused() -> None:
    def infinite(*arguments: Any) -> np.ndarray:
        shape = arguments[7], arguments[6]
        return np.full(shape, np.inf, np.float16 if arguments[8] == "float16" else np.float32)

    for case, code in (
        ("weights/edge/overflow-float16/float16", "scale-overflow"),
        ("weights/edge/scale-nan/float32", "non-finite-scale"),
        ("weights/edge/scale-infinite-in-the-padding/float32", "non-finite-scale"),
    ):
        assert only_failure("weights", infinite, case).message == f"accepted, but must be refused with {code}"
        assert passes("weights", numpy_adapter.weights, case)
    assert passes("weights", numpy_adapter.weights, "weights/edge/overflow-float16/bfloat16")


UNCHECKED = {
    "edge/overflow-float16": "float16",
    "edge/scale-nan": "float32",
    "edge/scale-infinite-in-the-padding": "bfloat16",
}


def unchecked(change: Callable[[np.ndarray], np.ndarray] = lambda weight: weight) -> Decoder:
    """A decoder that does not look at values, as one on a GPU, and says so."""

    def decode(trellis: Any, suh: Any, svh: Any, *rest: Any) -> np.ndarray:
        finite = (np.where(np.isfinite(side), side, np.float16(0)) for side in (suh, svh))
        with np.errstate(over="ignore"):
            weight = np.array(numpy_adapter.weights(trellis, *finite, *rest[:-1], "float32"))
            weight[:, ~np.isfinite(suh[: rest[3]])] = np.nan
            weight[~np.isfinite(svh[: rest[4]])] = -np.inf
            weight = change(weight)
            if rest[-1] == "bfloat16":
                return np.asarray(numpy_adapter._bfloat16(weight))
            return weight.astype(rest[-1])

    return refuses_at_load(decode)


@pytest.mark.parametrize("label", UNCHECKED)
def test_a_decoder_that_leaves_refusing_to_loading(label: str) -> None:
    case = f"weights/{label}/{UNCHECKED[label]}"
    assert passes("weights", unchecked(), case)
    assert passes("weights", refuses_at_load(partial(numpy_adapter.weights)), case)  # it may refuse all the same
    undeclared = unchecked()
    undeclared.refuses_at_load = False  # type: ignore[attr-defined]
    assert "accepted, but must be refused" in only_failure("weights", undeclared, case).message
    wrong = only_failure("weights", unchecked(lambda weight: weight * np.float32(1.25)), case)
    assert "at most" in wrong.message
    assert "the result has shape" in only_failure("weights", unchecked(lambda weight: weight[1:]), case).message
    crash = refuses_at_load(lambda *_: 1 / 0)
    assert "ZeroDivisionError" in only_failure("weights", crash, case).message


@pytest.mark.parametrize(
    ("label", "change"),
    [
        ("edge/overflow-float16", lambda weight: np.clip(weight, -65504, 65504)),
        ("edge/scale-nan", np.nan_to_num),
    ],
)
def test_a_finite_number_hides_a_bad_scale(label: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    mismatch = only_failure("weights", unchecked(change), f"weights/{label}/{UNCHECKED[label]}")
    assert "which hides that its scale is bad" in mismatch.message
    assert mismatch.expected == "an infinity or a NaN"


def test_a_loader_that_refuses_nothing() -> None:
    def careless(folder: str, module: str, dtype: Any) -> np.ndarray:
        try:
            return numpy_adapter.load(folder, module, dtype)
        except EspalierError:
            return np.full((30, 20) if "e_proj" in module else (128, 128), np.inf, dtype)

    for case, code in (
        ("load/refused/scale-nan/float32", "non-finite-scale"),
        ("load/exl3-codebooks/layers.0.e_proj/float16", "scale-overflow"),
    ):
        assert only_failure("load", careless, case).message == f"accepted, but must be refused with {code}"
        assert passes("load", numpy_adapter.load, case)
    assert passes("load", careless, "load/exl3-codebooks/layers.0.e_proj/float32")


def test_numbers_in_the_padding_are_ignored() -> None:
    """Scales there do not matter, codes do: a decoder that scales before it crops and sums is not caught otherwise."""

    def leaking(trellis: Any, suh: Any, *rest: Any) -> np.ndarray:
        weight = numpy_adapter.weights(trellis, suh, *rest)
        return weight + np.float32(suh[rest[4] :].astype(np.float32).sum())

    assert "float32 weight[" in only_failure("weights", leaking, "weights/edge/numbers-in-the-padding/float32").message
    assert passes("weights", leaking, "weights/edge/all-outputs-zero/float32")


# Products


def product_with(change: Callable[..., tuple[Any, ...]]) -> Decoder:
    return lambda *arguments: numpy_adapter.matmul(*change(*arguments))


PRODUCT = "matmul/edge/two-blocks-of-256-bias/float32"


@pytest.mark.parametrize(
    ("decoder", "part"),
    [
        (product_with(lambda x, t, u, v, _bias, *a: (x, t, u, v, None, *a)), "looks like a product without its bias"),
        (
            product_with(lambda x, t, u, v, *a: (x, t, np.ones_like(u), v, *a)),
            "it looks like the product with the weight without suh",
        ),
        (
            product_with(lambda x, t, u, v, b, name, block_in, *a: (x, t, u, v, b, name, 0, *a)),
            "it looks like the product with the weight without its input rotation",
        ),
        (lambda *a: numpy_adapter.matmul(*a)[:, :-1], "the result has shape (6, 299)"),
        (lambda *a: numpy_adapter.matmul(*a).astype(np.float16), "the result has dtype float16"),
        (product_with(lambda x, *a: (np.abs(x), *a)), "float32 y[0, 0] is "),
    ],
    ids=["bias", "suh", "rotation", "short", "half", "abs"],
)
def test_mistakes_in_products(decoder: Decoder, part: str) -> None:
    assert part in only_failure("matmul", decoder, PRODUCT).message
    assert passes("matmul", numpy_adapter.matmul, PRODUCT)


def test_a_product_with_inputs_in_float16_loses_large_and_tiny_ones() -> None:
    def through_float16(x: np.ndarray, *rest: Any) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return numpy_adapter.matmul(x.astype(np.float16).astype(np.float32), *rest)

    for case in ("matmul/*-large-inputs*/float32", "matmul/*-tiny-inputs*/float32"):
        report = run_conformance({"matmul": through_float16}, options=Options(only=(case,)))
        assert len(report.results) == len(report.failures) == 2
    assert passes("matmul", through_float16, "matmul/*-unit-inputs*/float32")


def test_a_product_that_scales_its_inputs_in_float16() -> None:
    def unscaled(x: np.ndarray, t: Any, suh: np.ndarray, *rest: Any) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = x * suh[: x.shape[1]]
        assert scaled.dtype == np.float16
        return numpy_adapter.matmul(scaled, t, np.ones_like(suh), *rest)

    report = run_conformance(
        {"matmul": unscaled}, options=Options(only=("matmul/edge/steep-scales*",), dtypes=("float16",))
    )
    assert len(report.failures) == len(report.results) == 4


def test_a_product_that_decodes_many_rows_first_in_float16() -> None:
    """Weights rounded to float16, float32 sums: right at more than 64 rows, and wrong there if scales come later."""

    def decoded(x: np.ndarray, t: Any, suh: Any, svh: Any, bias: Any, *rest: Any, apart: bool) -> np.ndarray:
        if len(x) <= 64:
            return numpy_adapter.matmul(x, t, suh, svh, bias, *rest)
        with np.errstate(over="ignore", invalid="ignore"):
            last = np.ones_like(svh) if apart else svh
            weight = np.asarray(numpy_adapter.weights(t, suh, last, *rest, "float32").astype(np.float16))
            product = x.astype(np.float32) @ weight.astype(np.float32).T
            product *= svh[: product.shape[1]] if apart else np.float32(1)
            return (product + (0 if bias is None else bias.astype(np.float32))).astype(x.dtype)

    options = Options(only=("matmul/edge/*",), dtypes=("float16",))
    report = run_conformance({"matmul": partial(decoded, apart=False)}, options=options)
    assert not report.failures
    report = run_conformance({"matmul": partial(decoded, apart=True)}, options=options)
    assert {result.case for result in report.failures} >= {
        "matmul/edge/steep-scales-bias/float16", "matmul/edge/steep-scales-rotated/float16",
    }  # fmt: skip


def test_a_reader_that_does_not_compare_the_header_with_the_file() -> None:
    """What there is of the header is no JSON; it would say malformed, or that the data ends too early."""
    (refusal,) = [case for case in refusal_cases() if case.name == "header-truncated"]
    data = refusal.files["model.safetensors"]
    assert int.from_bytes(data[:8], "little") > len(data) - 8
    with pytest.raises(ValueError, match=r"delimiter|Expecting|Unterminated"):
        json.loads(data[8:])


def test_one_wrong_weight_shows_in_products_with_unit_vectors() -> None:
    def wrong_code(x: Any, trellis: np.ndarray, *rest: Any) -> np.ndarray:
        spoiled = trellis.copy()
        spoiled[0, 0, 3] ^= 0x10
        return numpy_adapter.matmul(x, spoiled, *rest)

    report = run_conformance({"matmul": wrong_code}, options=Options(only=("matmul/*-unit-inputs*",)))
    assert len(report.failures) == len(report.results) == 6


# Expert banks


def bank_with(change: Callable[..., tuple[Any, ...]]) -> Decoder:
    return lambda *arguments: numpy_adapter.experts(*change(*arguments))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "decoder",
    [
        bank_with(lambda x, ids, weights, *a: (x, (ids + 1) % 4, weights, *a)),
        bank_with(lambda x, ids, weights, *a: (x, ids, np.ones_like(weights) / 2, *a)),
        bank_with(lambda x, ids, weights, *a: (x, ids[:, :1], weights[:, :1], *a)),
        bank_with(lambda x, ids, weights, *a: (x, ids[::-1], weights, *a)),
        lambda x, *_: np.zeros_like(x),
    ],
    ids=["experts", "weights", "first", "tokens", "zeros"],
)
def test_mistakes_in_expert_banks(decoder: Decoder, dtype: str) -> None:
    """Also in bfloat16, whose tolerance is the widest."""
    options = Options(only=("experts/expert-banks/*/tokens20-*",), dtypes=(dtype,))  # type: ignore[arg-type]
    report = run_conformance({"experts": decoder}, options=options)
    assert len(report.failures) == len(report.results) == 3
    assert run_conformance({"experts": numpy_adapter.experts}, options=options).exit_code == 0


def test_an_expert_bank_without_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "tanh", np.ones_like)
    report = run_conformance({"experts": numpy_adapter.experts}, options=Options(dtypes=("bfloat16",)))
    assert len(report.failures) == len(report.results) == 12


# Folders


def test_a_reader_that_accepts_everything() -> None:
    report = run_conformance({"open": lambda _folder: None})
    assert {result.case for result in report.results if result.passed} == {
        "open/valid/dense",
        "open/valid/mixed-experts",
        "open/valid/expert-banks",
        "open/valid/exl3-codebooks",
    }
    by_name = {result.case: result.mismatch for result in report.failures}
    mismatch = by_name["open/refused/version-2"]
    assert mismatch is not None
    assert mismatch.message == "accepted, but must be refused with format-version (a later format version)"
    assert (mismatch.expected, mismatch.got) == ("format-version", "accepted")


def test_a_reader_that_refuses_everything() -> None:
    report = run_conformance({"open": lambda _folder: "malformed"})
    failed = {result.case for result in report.failures}
    assert {"open/valid/dense", "open/refused/version-2"} <= failed
    assert "open/refused/header-json" not in failed


def test_a_reader_without_one_check() -> None:
    def careless(folder: str) -> None:
        if not folder.endswith("header-key-twice"):
            open_checkpoint(folder).close()

    report = run_conformance({"open": careless})
    assert [result.case for result in report.failures] == ["open/refused/header-key-twice"]


def test_a_reader_with_errors_of_its_own() -> None:
    def crashing(folder: str) -> None:
        try:
            open_checkpoint(folder).close()
        except Exception as error:
            raise RuntimeError("cannot\nload") from error

    mismatch = only_failure("open", crashing, "open/refused/version-2")
    assert mismatch.message.startswith("raised RuntimeError: cannot load, which has no error code; expected a refusal")


def test_a_module_of_another_expert() -> None:
    def one_too_far(folder: str, module: str, dtype: Any) -> np.ndarray:
        return numpy_adapter.load(folder, module.replace("experts.1.", "experts.2."), dtype)

    report = run_conformance({"load": one_too_far}, options=Options(dtypes=("float32",), only=("load/mixed-*",)))
    expert = "load/mixed-experts/model.layers.0.mlp.experts.1"
    experts = {f"{expert}.{name}_proj/float32" for name in ("gate", "up", "down")}
    assert {result.case for result in report.failures} == experts
