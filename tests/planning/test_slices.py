"""Slices for tensor parallelism: decoded one by one and put together, they are the decoded whole.

Compared are the exact codes and the weights in float64, in which the sums of a rotation are exact.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import UsageError
from espalier_format.kernels.reference import decode_codes, decode_weight
from espalier_format.planning import PlannedModule
from espalier_format.runtimes.tensor_parallel import FeatureRange, ModuleSlice

BLOCKS = (0, 32, 64, 128, 256)
CODEBOOKS = ("e2m1@1", "e2m1@1.5", "e2m1@2", "int5@3", "int8@6", "exl3-mul1@2.5", "exl3-3inst@3")


def make_module(codebook: str, inputs: int, outputs: int, rotation: tuple[int, int]) -> PlannedModule:
    return PlannedModule(
        "m", get_codebook(codebook), in_features=inputs, out_features=outputs, rotation_in=rotation[0],
        rotation_out=rotation[1],
    )  # fmt: skip


def test_sizes_and_blocks_cannot_be_mistaken_for_each_other() -> None:
    """Decoders take blocks before sizes: numbers without names would pass for others."""
    with pytest.raises(TypeError, match="positional"):
        PlannedModule("m", get_codebook("e2m1@2"), 128, 128, 64, 64)  # type: ignore[misc]


def make_tensors(module: PlannedModule, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any bits are a trellis; scales of both signs."""
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(2**15), 2**15, module.trellis_shape).astype(np.int16)
    scales = (rng.uniform(0.01, 2, size) * rng.choice([-1, 1], size) for size in (module.padded_in, module.padded_out))
    suh, svh = (scale.astype(np.float16) for scale in scales)
    return trellis, suh, svh


def cut(part: ModuleSlice, trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray) -> tuple[np.ndarray, ...]:
    """Do what a slice says, one tensor after the other."""
    rows = np.concatenate([trellis[first:end] for first, end in part.trellis_rows])
    return (
        np.concatenate([rows[:, first:end] for first, end in part.trellis_columns], axis=1),
        np.concatenate([suh[first:end] for first, end in part.suh]),
        np.concatenate([svh[first:end] for first, end in part.svh]),
    )


def weight(module: PlannedModule, tensors: tuple[np.ndarray, ...], inputs: int, outputs: int) -> np.ndarray:
    """The float64 weight (in, out) without padding."""
    whole = decode_weight(*tensors, module.codebook, module.rotation_in, module.rotation_out)
    return whole[:inputs, :outputs]


def check(module: PlannedModule, kind: str, world: int) -> None:
    tensors = make_tensors(module)
    codes = decode_codes(tensors[0], module.codebook)[: module.in_features, : module.out_features]
    expected = weight(module, tensors, module.in_features, module.out_features)
    parts = [
        module.column_parallel(rank, world) if kind == "column" else module.row_parallel(rank, world)
        for rank in range(world)
    ]
    held = [cut(part, *tensors) for part in parts]
    for part, (trellis, suh, svh) in zip(parts, held, strict=True):
        assert trellis.shape == part.trellis_shape(module.codebook)
        assert (suh.shape, svh.shape) == ((part.padded_in,), (part.padded_out,))
    found_codes = [
        decode_codes(trellis, module.codebook)[: part.in_features, : part.out_features]
        for part, (trellis, _, _) in zip(parts, held, strict=True)
    ]
    found = [weight(module, each, part.in_features, part.out_features) for part, each in zip(parts, held, strict=True)]
    axis = 1 if kind == "column" else 0
    assert np.array_equal(np.concatenate(found_codes, axis), codes)
    assert np.concatenate(found, axis).tobytes() == expected.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    codebook=st.sampled_from(CODEBOOKS),
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    kind=st.sampled_from(["column", "row"]),
    world=st.integers(1, 5),
    share=st.integers(1, 3),
    other=st.integers(1, 300),
)
def test_slices_are_the_whole(
    codebook: str, rotation: tuple[int, int], kind: str, world: int, share: int, other: int
) -> None:
    step = (rotation[1] if kind == "column" else rotation[0]) or 16
    split = world * share * step
    sizes = (other, split) if kind == "column" else (split, other)
    check(make_module(codebook, *sizes, rotation), kind, world)


@settings(max_examples=200, deadline=None)
@given(
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    inputs=st.integers(1, 700),
    outputs=st.integers(1, 700),
    world=st.integers(1, 8),
    kind=st.sampled_from(["column", "row"]),
)
def test_what_can_be_split_is_what_lies_between_blocks(
    rotation: tuple[int, int], inputs: int, outputs: int, world: int, kind: str
) -> None:
    module = make_module("e2m1@1", inputs, outputs, rotation)
    size, block = (outputs, rotation[1]) if kind == "column" else (inputs, rotation[0])
    split = module.column_parallel if kind == "column" else module.row_parallel
    fits = size % world == 0 and (world == 1 or (size // world) % (block or 16) == 0)
    if not fits:
        with pytest.raises(UsageError, match=r"cannot be split equally|is within a (rotation block|tile) of"):
            [split(rank, world) for rank in range(world)]
        return
    check(module, kind, world)


def test_parts_of_unequal_size() -> None:
    """What a runtime splits by itself, at any borders between blocks, in several pieces."""
    module = make_module("int5@3", 96, 200, (32, 64))
    tensors = make_tensors(module)
    expected = weight(module, tensors, 96, 200)
    borders = (0, 64, 128, 200)
    parts = [module.part(outputs=[FeatureRange(*border)]) for border in pairwise(borders)]
    found = [weight(module, cut(part, *tensors), 96, part.out_features) for part in parts]
    assert np.concatenate(found, 1).tobytes() == expected.tobytes()
    both = module.part(FeatureRange(32, 96), [FeatureRange(0, 64), FeatureRange(128, 200)])
    found_both = weight(module, cut(both, *tensors), 64, 136)
    assert found_both.tobytes() == np.concatenate([expected[32:, :64], expected[32:, 128:]], 1).tobytes()


def test_a_row_parallel_product_is_the_sum_of_the_ranks() -> None:
    """Inputs that are small integers make the product exact up to the weights' own rounding."""
    module = make_module("e2m1@2", 128, 64, (32, 64))
    tensors = make_tensors(module)
    x = np.arange(128) % 5 - 2.0
    expected = x @ weight(module, tensors, 128, 64)
    parts = [module.row_parallel(rank, 4) for rank in range(4)]
    total = sum(x[part.inputs.start : part.inputs.stop] @ weight(module, cut(part, *tensors), 32, 64) for part in parts)
    assert np.abs(total - expected).max() <= 1e-13 * np.abs(expected).max()
