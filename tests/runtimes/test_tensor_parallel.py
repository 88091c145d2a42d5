"""Slices of modules for tensor parallelism: against decoded weights, which must be those of the whole module."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from builders import Module, espalier_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import ShapeError, UsageError
from espalier_format.kernels import reference
from espalier_format.runtimes.tensor_parallel import FeatureRange, equal_share, join_ranges, slice_module

BLOCKS = (0, 32, 64, 128, 256)


def _decode(module: Module, trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray) -> np.ndarray:
    """The weight (out_p, in_p)."""
    return reference.decode_weight(trellis, suh, svh, get_codebook(module.codebook), *module.rotation).T


def _cut(tensor: np.ndarray, dimension: int, runs: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.take(tensor, range(first, end), dimension) for first, end in runs], dimension)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_slice_is_part_of_the_weight(data: st.DataObject) -> None:
    """Decoded on its own, a slice gives the rows and columns of the whole module's weight that it stands for."""
    rotation = (data.draw(st.sampled_from(BLOCKS)), data.draw(st.sampled_from(BLOCKS)))
    sizes = []
    for block in rotation:
        step = block or 16
        count = data.draw(st.integers(1, 3))
        sizes.append(step * count - data.draw(st.integers(0, step - 1)))
    module = Module("m", *sizes, "e2m1@1.5", rotation)
    draft = espalier_draft([module], [], {}, seed=data.draw(st.integers(0, 9)))
    tensors = [draft[f"m.esp_{kind}"].array() for kind in ("trellis", "suh", "svh")]

    def border(side: int) -> list[int]:
        step = rotation[side] or 16
        inner = list(range(step, sizes[side], step))
        chosen = data.draw(st.lists(st.sampled_from(inner), unique=True, max_size=3)) if inner else []
        return [0, *sorted(chosen), sizes[side]]

    inputs = data.draw(st.sampled_from([FeatureRange(*pair) for pair in pairwise(border(0))]))
    pieces = [FeatureRange(*pair) for pair in pairwise(border(1))]
    outputs = sorted(data.draw(st.lists(st.sampled_from(pieces), unique=True, min_size=1)))

    part = slice_module(module, rotation, inputs, outputs)
    trellis, suh, svh = tensors
    cut = _cut(_cut(trellis, 0, part.trellis_rows), 1, part.trellis_columns)
    own_suh, own_svh = _cut(suh, 0, part.suh), _cut(svh, 0, part.svh)
    assert cut.shape == part.trellis_shape(get_codebook(module.codebook))
    assert (own_suh.size, own_svh.size) == (part.padded_in, part.padded_out)

    rows = [row for each in outputs for row in range(each.start, each.stop)]
    expected = _decode(module, trellis, suh, svh)[rows][:, inputs.start : inputs.stop]
    found = _decode(module, cut, own_suh, own_svh)[: part.out_features, : part.in_features]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_partial_results_add_up() -> None:
    """Ranks with slices of the inputs: the sum of their results is the whole result."""
    module = Module("m", 160, 48, "int5@3", (32, 0))
    draft = espalier_draft([module], [], {})
    trellis, suh, svh = (draft[f"m.esp_{kind}"].array() for kind in ("trellis", "suh", "svh"))
    x = np.random.default_rng(0).standard_normal((3, 160))
    total = np.zeros((3, 48))
    for share in (FeatureRange(0, 96), FeatureRange(96, 160)):
        part = slice_module(module, module.rotation, share)
        weight = _decode(module, _cut(trellis, 0, part.trellis_rows), _cut(suh, 0, part.suh), svh)
        total += x[:, share.start : share.stop] @ weight.T
    np.testing.assert_allclose(total, x @ _decode(module, trellis, suh, svh).T, rtol=1e-12)


@pytest.mark.parametrize(
    ("rotation", "inputs", "outputs", "reason"),
    [
        (
            (64, 32),
            FeatureRange(0, 96),
            None,
            "0 to 96 of the 192 in_features, and 96 is within a rotation block of 64",
        ),
        ((64, 32), None, FeatureRange(48, 96), "48 to 96 of the 96 out_features, and 48 is within a rotation block of"),
        ((0, 0), FeatureRange(8, 192), None, "and 8 is within a tile of 16"),
        ((0, 256), None, FeatureRange(0, 48), "and 48 is within a rotation block of 256"),
    ],
)
def test_a_cut_within_a_block_says_why(
    rotation: tuple[int, int], inputs: FeatureRange | None, outputs: FeatureRange | None, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        slice_module(Module("m", 192, 96), rotation, inputs, None if outputs is None else [outputs])


@pytest.mark.parametrize("part", [FeatureRange(0, 0), FeatureRange(64, 208), FeatureRange(-16, 16)])
def test_a_range_that_is_not_there(part: FeatureRange) -> None:
    with pytest.raises(ShapeError):
        slice_module(Module("m", 192, 96), (0, 0), part)


def test_padding_comes_with_the_last_rank() -> None:
    """100 outputs in blocks of 32, 128 stored: two ranks hold 64 and 36, and 64 stored ones each."""
    parts = [
        slice_module(Module("m", 16, 100), (0, 32), None, [each])
        for each in (FeatureRange(0, 64), FeatureRange(64, 100))
    ]
    assert [(part.out_features, part.svh) for part in parts] == [(64, ((0, 64),)), (36, ((64, 128),))]


def test_shares() -> None:
    assert [equal_share(12, rank, 3) for rank in range(3)] == [
        FeatureRange(0, 4),
        FeatureRange(4, 8),
        FeatureRange(8, 12),
    ]
    with pytest.raises(UsageError, match="10 features cannot be split equally over 4 ranks"):
        equal_share(10, 0, 4)
    with pytest.raises(UsageError, match="no such rank"):
        equal_share(12, 3, 3)


def test_ranges_that_touch_are_joined() -> None:
    assert join_ranges([FeatureRange(0, 4), FeatureRange(4, 8), FeatureRange(12, 16)]) == (
        FeatureRange(0, 8),
        FeatureRange(12, 16),
    )
    with pytest.raises(UsageError):
        join_ranges([FeatureRange(4, 8), FeatureRange(0, 4)])
