"""Compares what a decoder gives with what the kit expects: the first difference, how many, and what it looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance import diagnosis
from espalier_format.conformance.arrays import numbers, received, received_floats
from espalier_format.conformance.bank_cases import BankCase
from espalier_format.conformance.module_case import ModuleCase
from espalier_format.conformance.outcome import Mismatch
from espalier_format.conformance.products import ProductCase
from espalier_format.conformance.tolerance import product_bound, weight_bound

_SLACK = 1 + 2.0**-40  # the expected numbers are float64, not exact


def compare_codes(result: object, expected: NDArray[Any], halfwords: NDArray[np.int16]) -> Mismatch | None:
    """Compare codes bit for bit.

    ``expected`` is int8, for which any integer dtype is taken, or float16, for which its 16-bit patterns are taken
    too. ``halfwords`` is the trellis.
    """
    array, name = received(result)
    if expected.dtype == np.float16:
        if array.dtype.itemsize != 2 or array.dtype.kind not in "iuf" or name == "bfloat16":
            return Mismatch(f"the codes have dtype {name}", expected="float16", got=name)
    elif array.dtype.kind not in "iu":
        return Mismatch(f"the codes have dtype {name}", expected="int8", got=name)
    if array.shape != expected.shape:
        return Mismatch(f"the codes have shape {array.shape}", expected=str(expected.shape), got=str(array.shape))
    if expected.dtype == np.float16:
        got, want, pattern = np.ascontiguousarray(array).view(np.uint16), expected.view(np.uint16), "0x{:04x}"
    else:
        got, want, pattern = array, expected, "{}"
    wrong = got != want
    if not wrong.any():
        return None
    at = _first(wrong)
    hint = diagnosis.of_codes(got, want, halfwords)
    shown, right = pattern.format(int(got[at])), pattern.format(int(want[at]))
    return Mismatch(f"code[{_spell(at)}] is {shown}, expected {right}; {_count(wrong)}{hint}", at, right, shown)


def compare_weight(result: object, case: ModuleCase, dtype: OutputDtype, *, exact: bool) -> Mismatch | None:
    """Compare a weight (out_features, in_features): within spec/rotation.md §6, or, if ``exact``, with §5."""
    weight, tensors = case.weight(), case.tensors()
    patterns = received_floats(result, dtype, weight.shape)
    if isinstance(patterns, Mismatch):
        return diagnosis.of_shape(patterns, case)
    values = numbers(patterns, dtype)
    bound = weight_bound(weight, tensors.suh, tensors.svh, case.book.family, dtype)
    mismatch = _beyond("weight", values, weight, bound, dtype)
    if mismatch is not None:
        hint = diagnosis.of_weight(values, case, bound)
        return Mismatch(mismatch.message + hint, mismatch.position, mismatch.expected, mismatch.got)
    if exact:
        rounded = np.ascontiguousarray(case.rounded(dtype)).view(patterns.dtype)
        wrong = patterns != rounded
        if wrong.any():
            at, digits = _first(wrong), 2 * patterns.itemsize
            want, got = (f"0x{int(array[at]):0{digits}x}" for array in (rounded, patterns))
            text = f"weight[{_spell(at)}] is {got}, correctly rounded it is {want}; {_count(wrong)}"
            return Mismatch(f"{text}; all are within the tolerance", at, want, got)
    return None


def compare_unchecked(result: object, case: ModuleCase, dtype: OutputDtype) -> Mismatch | None:
    """Compare the weight of a module that should be refused, by a decoder that does not look at values.

    What is no number in that dtype must be an infinity or a NaN; what is one, within spec/rotation.md §6.
    """
    weight, tensors, lost = case.weight(), case.tensors(), case.lost(dtype)
    patterns = received_floats(result, dtype, weight.shape)
    if isinstance(patterns, Mismatch):
        return patterns
    values = numbers(patterns, dtype)
    hidden = lost & np.isfinite(values)
    if hidden.any():
        at = _first(hidden)
        got = f"{float(values[at]):.9g}"
        text = f"{dtype} weight[{_spell(at)}] is {got}, which hides that its scale is bad; {_count(hidden)}"
        return Mismatch(text, at, "an infinity or a NaN", got)
    right, finite = np.where(lost, 0.0, weight), np.where(lost, 0.0, values)
    suh, svh = (np.where(np.isfinite(side), side, np.float16(1)) for side in (tensors.suh, tensors.svh))
    return _beyond("weight", finite, right, weight_bound(right, suh, svh, case.book.family, dtype), dtype)


def compare_product(result: object, case: ProductCase, dtype: OutputDtype) -> Mismatch | None:
    """Compare outputs (rows, out_features) within spec/conformance.md §7."""
    operands, tensors = case.operands(), case.module.tensors()
    patterns = received_floats(result, dtype, operands.product.shape)
    if isinstance(patterns, Mismatch):
        return patterns
    values = numbers(patterns, dtype)
    bound = product_bound(
        operands.product, operands.x, tensors.suh, tensors.svh, operands.bias, case.module.book.family, dtype
    )
    mismatch = _beyond("y", values, operands.product, bound, dtype)
    if mismatch is None:
        return None
    hint = diagnosis.of_product(values, case, bound)
    return Mismatch(mismatch.message + hint, mismatch.position, mismatch.expected, mismatch.got)


def compare_bank(result: object, case: BankCase, dtype: OutputDtype) -> Mismatch | None:
    """Compare the outputs of an expert bank, (tokens, hidden), within spec/conformance.md §7.1."""
    operands = case.operands()
    patterns = received_floats(result, dtype, operands.y.shape)
    if isinstance(patterns, Mismatch):
        return patterns
    values, bound = numbers(patterns, dtype), operands.bounds[dtype]
    mismatch = _beyond("y", values, operands.y, bound, dtype)
    if mismatch is None:
        return None
    hint = diagnosis.of_places(values, operands.y, bound)
    return Mismatch(mismatch.message + hint, mismatch.position, mismatch.expected, mismatch.got)


def _beyond(
    name: str,
    values: NDArray[np.float64],
    expected: NDArray[np.float64],
    bound: NDArray[np.float64],
    dtype: OutputDtype,
) -> Mismatch | None:
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(values - expected) <= bound * _SLACK)  # so that a NaN is wrong
    if not wrong.any():
        return None
    at = _first(wrong)
    want, got, allowed = (f"{float(array[at]):.9g}" for array in (expected, values, bound))
    text = f"{dtype} {name}[{_spell(at)}] is {got}, expected {want}, at most {allowed} away; {_count(wrong)}"
    return Mismatch(text, at, want, got)


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def _spell(position: tuple[int, ...]) -> str:
    return ", ".join(map(str, position))


def _count(wrong: NDArray[np.bool_]) -> str:
    return f"{int(wrong.sum()):,} of {wrong.size:,} wrong"
