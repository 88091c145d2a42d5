"""The fast numpy decoder: its codes equal the reference's, its weights are correctly rounded.

Correct rounding of single products is proved against rational arithmetic in tests/codec/test_rounding.py; here the sums
are recomputed in int64 and each weight is checked against its two neighbours exactly, on a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.dtype_names import DtypeName
from espalier_format.codec.rotation import BLOCKS, hadamard, padded
from espalier_format.codec.rounding import MAX_SUM_BITS, OutputDtype
from espalier_format.errors import DtypeError, NonFiniteScaleError, ScaleOverflowError, ShapeError, UsageError
from espalier_format.kernels import numpy_decoder, reference

Maker = Callable[..., Any]
DTYPES: list[OutputDtype] = ["float32", "float16", "bfloat16"]
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(f"u{array.itemsize}")


def as_float64(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def unit_exponent(family: str) -> int:
    return {"exl3-mul1": 17, "exl3-mcg": 13, "exl3-3inst": 13}.get(family, 0)


def exact_sums(module: Any) -> np.ndarray[Any, Any]:
    """H_in V H_out with entries +1 and -1, in int64, in units of the codebook, transposed to (out, in)."""
    codes = reference.decode_codes(module.trellis, module.codebook).astype(np.float64)
    scaled = codes * 2 ** unit_exponent(module.codebook.family)
    sums = scaled.astype(np.int64)
    assert np.array_equal(sums, scaled)
    for axis, block in enumerate(module.rotation):
        matrix = hadamard(block).astype(np.int64)
        moved = np.moveaxis(sums, axis, 0)
        groups = moved.reshape(-1, matrix.shape[0], moved.shape[1])
        sums = np.moveaxis((matrix @ groups).reshape(moved.shape), 0, axis)
    return sums.T


@pytest.mark.parametrize("name", list(CODEBOOKS))
def test_sums_fit_the_bits_that_exactness_needs(name: str) -> None:
    codebook = CODEBOOKS[name]
    units = codebook.codes.astype(np.float64) * 2 ** unit_exponent(codebook.family)
    assert np.array_equal(units, np.rint(units))
    largest = int(np.abs(units).max()) * max(BLOCKS) ** 2
    assert largest < 2**MAX_SUM_BITS
    assert largest < 2**35 + 1
    if codebook.is_grid:
        assert largest < 2**24


@quick
@given(name=st.sampled_from(list(CODEBOOKS)), rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 9))
@pytest.mark.capability("numpy decoder", "codes, bit for bit")
def test_codes_equal_the_reference(name: str, rows: int, columns: int, seed: int, random_module: Maker) -> None:
    module = random_module(name, (0, 0), 16 * rows, 16 * columns, seed)
    expected = reference.decode_codes(module.trellis, module.codebook)
    for trellis in (module.trellis, module.trellis.view(np.uint16)):
        codes = numpy_decoder.decode_codes(trellis, module.codebook)
        assert codes.dtype == expected.dtype
        assert np.array_equal(bits(codes), bits(expected))
    blocks = list(numpy_decoder.iter_code_rows(module.trellis, module.codebook, threads=2))
    joined = np.concatenate(blocks)
    assert joined.dtype == np.dtype("<i2")
    assert np.array_equal(joined, expected.view(np.int16) if expected.dtype == np.float16 else expected)


@quick
@given(
    name=st.sampled_from(list(CODEBOOKS)),
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@pytest.mark.capability("numpy decoder", "weights, correctly rounded")
def test_weights_are_correctly_rounded(
    name: str,
    rotation: tuple[int, int],
    in_features: int,
    out_features: int,
    dtype: OutputDtype,
    seed: int,
    random_module: Maker,
) -> None:
    module = random_module(name, rotation, in_features, out_features, seed)
    weight = numpy_decoder.decode_weight(*module.operands(), in_features, out_features, dtype)
    assert weight.shape == (out_features, in_features)
    assert weight.dtype == (np.uint16 if dtype == "bfloat16" else np.dtype(dtype))
    got = as_float64(weight, dtype)

    # All weights: within half a unit in the last place of the reference, whose own error is some 2^-50.
    precision, tiny = {"float32": (24, 0.0), "float16": (11, 2.0**-25), "bfloat16": (8, 0.0)}[dtype]
    expected = reference.decode_weight(*module.operands()).T[:out_features, :in_features]
    assert np.all(np.abs(got - expected) <= np.maximum(np.abs(expected) * (2.0**-precision + 2.0**-48), tiny))

    def value(pattern: int) -> Fraction:
        return Fraction(float(as_float64(np.array([pattern], f"u{weight.itemsize}").view(weight.dtype), dtype)[0]))

    # A sample: no neighbour is nearer to the exact value. Squares, since the norm may be irrational.
    sums = exact_sums(module)
    rng = np.random.default_rng(seed)
    root = 4 ** unit_exponent(module.codebook.family) * max(rotation[0], 1) * max(rotation[1], 1)
    for _ in range(30):
        o, i = int(rng.integers(out_features)), int(rng.integers(in_features))
        scale = Fraction(float(module.svh[o])) * Fraction(float(module.suh[i])) * Fraction(module.codebook.value_scale)
        exact = int(sums[o, i]) * scale
        pattern = bits(weight)[o : o + 1, i].astype(np.int64)
        magnitude = int(pattern[0]) & ~(1 << (8 * weight.itemsize - 1))
        if exact == 0:
            assert pattern[0] == 0
            continue
        assert (int(pattern[0]) != magnitude) == (exact < 0)
        square = exact * exact / root
        here, above = value(magnitude), value(magnitude + 1)
        upper = ((here + above) / 2) ** 2
        assert square < upper or (square == upper and magnitude % 2 == 0)
        if magnitude:
            lower = ((here + value(magnitude - 1)) / 2) ** 2
            assert square > lower or (square == lower and magnitude % 2 == 0)


@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_short_names_of_dtypes(short: DtypeName, name: OutputDtype, random_module: Maker) -> None:
    module = random_module("int8@6", (32, 64), 40, 50)
    got, expected = (numpy_decoder.decode_weight(*module.operands(), 40, 50, dtype) for dtype in (short, name))
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exl3-mul1@1.5", "int8@6"])
def test_signs_only_give_many_exact_midpoints(name: str, dtype: OutputDtype, random_module: Maker) -> None:
    """With scales of +1 and -1, as legacy files have, a weight is a sum of few bits and often a midpoint."""
    module = random_module(name, (128, 128), 128, 256)
    suh, svh = np.sign(module.suh) + (module.suh == 0), np.sign(module.svh) + (module.svh == 0)
    weight = numpy_decoder.decode_weight(
        module.trellis, suh.astype("f2"), svh.astype("f2"), module.codebook, 128, 128, 128, 256, dtype
    )
    exact = exact_sums(module) * (suh[None, :].astype(int) * svh[:, None].astype(int))
    # Exact in float64, so that numpy's own casts and struct round correctly from it.
    value = exact * 2.0 ** (-7 - unit_exponent(module.codebook.family))
    if dtype == "bfloat16":
        scaled = np.ldexp(1.0, np.frexp(value)[1] - 8)
        assert np.array_equal(as_float64(weight, dtype), np.rint(value / scaled) * scaled)
    else:
        assert np.array_equal(bits(weight), bits(value.astype(dtype) + np.dtype(dtype).type(0)))


def test_result_does_not_depend_on_threads_or_rows(random_module: Maker) -> None:
    """Larger than one block in both directions, with rotations that do not divide the block."""
    module = random_module("exl3-mul1@3.5", (64, 256), 1500, 1300)
    operands = (*module.operands(), module.in_features, module.out_features, "bfloat16")
    whole = numpy_decoder.decode_weight(*operands)
    assert np.array_equal(whole, numpy_decoder.decode_weight(*operands, threads=3))
    for rows in (slice(0, 1), slice(1, 700), slice(511, 513), slice(1299, 1300), slice(None, 256), slice(1000, None)):
        assert np.array_equal(numpy_decoder.decode_rows(*operands, rows), whole[rows])
        assert np.array_equal(numpy_decoder.decode_rows(*operands, rows, threads=2), whole[rows])
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: numpy_decoder.decode_weight(*operands), range(4)):
            assert np.array_equal(result, whole)
    codes = numpy_decoder.decode_codes(module.trellis, module.codebook, threads=3)
    assert np.array_equal(bits(codes), bits(reference.decode_codes(module.trellis, module.codebook)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.sampled_from(BLOCKS), st.integers(16, 9000), st.integers(1, 10**8))
def test_row_blocks_cover_everything_once(out_features: int, block: int, padded_in: int, budget: int) -> None:
    slices = list(numpy_decoder.row_blocks(out_features, block, padded_in, budget))
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(out_features))
    step = block or 16
    for part in slices[:-1]:
        assert part.stop % step == 0
    for part in slices:
        assert (part.stop - part.start) * padded_in * 4 <= budget or part.stop - part.start <= step


def test_row_blocks_stream_a_matrix(random_module: Maker) -> None:
    module = random_module("int5@3", (128, 64), 200, 300)
    operands = (*module.operands(), 200, 300, "float32")
    blocks = list(numpy_decoder.row_blocks(300, 64, 256, 64 * 256 * 4 * 2))
    assert len(blocks) == 3
    joined = np.concatenate([numpy_decoder.decode_rows(*operands, rows) for rows in blocks])
    assert np.array_equal(bits(joined), bits(numpy_decoder.decode_weight(*operands)))


def test_padding_counts_through_the_rotation_only(random_module: Maker) -> None:
    """Bits of padded rows do change the weights of their block; scales of padding never do."""
    module = random_module("e2m1@1", (64, 64), 60, 60)
    operands = (*module.operands()[3:], 60, 60, "float32")
    weight = numpy_decoder.decode_weight(module.trellis, module.suh, module.svh, *operands)
    suh, svh = module.suh.copy(), module.svh.copy()
    suh[60:], svh[60:] = 7.5, -3
    assert np.array_equal(bits(numpy_decoder.decode_weight(module.trellis, suh, svh, *operands)), bits(weight))
    trellis = module.trellis.copy()
    trellis[3] ^= 0x5A5A
    assert not np.array_equal(numpy_decoder.decode_weight(trellis, module.suh, module.svh, *operands), weight)


def test_scale_overflow_error(random_module: Maker) -> None:
    module = random_module("int8@5", (128, 128), 128, 128)
    suh, svh = np.full(128, 2000, np.float16), np.full(128, 300, np.float16)
    operands = (module.trellis, suh, svh, *module.operands()[3:], 128, 128)
    with pytest.raises(ScaleOverflowError, match="float16"):
        numpy_decoder.decode_weight(*operands, "float16")
    assert np.isfinite(numpy_decoder.decode_weight(*operands, "float32")).all()


def test_non_finite_scale_error(random_module: Maker) -> None:
    module = random_module("int8@5", (32, 32), 32, 32)
    for bad in (math.inf, -math.inf, math.nan):
        for side in (1, 2):
            operands = list(module.operands())
            operands[side] = operands[side].copy()
            operands[side][31] = bad
            with pytest.raises(NonFiniteScaleError, match=("suh", "svh")[side - 1]):
                numpy_decoder.decode_weight(*operands, 32, 32, "float32")


def test_wrong_operands_are_refused(random_module: Maker) -> None:
    module = random_module("int6@4", (32, 64), 50, 60)
    trellis, suh, svh, codebook, _, _ = module.operands()
    decode = numpy_decoder.decode_weight
    with pytest.raises(DtypeError):
        decode(trellis.astype(np.int32), suh, svh, codebook, 32, 64, 50, 60, "float32")
    with pytest.raises(DtypeError):
        decode(trellis, suh, svh.astype(np.float64), codebook, 32, 64, 50, 60, "float32")
    for bad in (trellis[0], trellis[..., :48], trellis[:2]):
        with pytest.raises(ShapeError):
            decode(bad, suh, svh, codebook, 32, 64, 50, 60, "float32")
    for sizes in ((0, 60), (50, 0), (65, 60), (50, 65), (-1, 60)):
        with pytest.raises(ShapeError):
            decode(trellis, suh, svh, codebook, 32, 64, *sizes, "float32")
    with pytest.raises(ShapeError):
        decode(trellis, suh, svh, codebook, 128, 64, 50, 60, "float32")
    with pytest.raises(UsageError):
        decode(trellis, suh, svh, codebook, 32, 16, 50, 60, "float32")
    with pytest.raises(UsageError):
        decode(trellis, suh, svh, codebook, 32, 64, 50, 60, "float64")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        decode(trellis, suh, svh, codebook, 32, 64, 50, 60, "float32", threads=0)
    for rows in (slice(0, 61), slice(5, 5), slice(-3, 4), slice(7, 3), slice(0, 9, 2)):
        with pytest.raises(UsageError):
            numpy_decoder.decode_rows(trellis, suh, svh, codebook, 32, 64, 50, 60, "float32", rows)
    with pytest.raises(UsageError):
        list(numpy_decoder.row_blocks(10, 48, 64, 100))


def test_a_failing_block_stops_the_pool(random_module: Maker) -> None:
    module = random_module("int8@5", (32, 32), 2048, 2048)
    suh = module.suh.copy()
    suh[:] = 60000
    svh = np.full(padded(2048, 32), 60000, np.float16)
    with pytest.raises(ScaleOverflowError):
        numpy_decoder.decode_weight(module.trellis, suh, svh, module.codebook, 32, 32, 2048, 2048, "float16", threads=2)
