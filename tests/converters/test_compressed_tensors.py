"""Weights of compressed-tensors against the library, against its sample files, and against packing spelt out here.

The library that is installed decides what it is compared with; the sample files also come from release 0.17.1.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Tensor
from compressed_tensors_cases import args, compress, from_torch, one_module

from espalier_format.checkpoint import open_checkpoint
from espalier_format.converters import compressed_tensors
from espalier_format.converters.compressed_tensors import unpack_codes
from espalier_format.converters.compressed_tensors_packing import Packing, find_packing
from espalier_format.errors import (
    DtypeError,
    EspalierError,
    MissingTensorError,
    NonFiniteScaleError,
    ScaleOverflowError,
    ShapeError,
    SourceError,
    UnexpectedTensorError,
    UsageError,
)

SAMPLES = json.loads((Path(__file__).parents[1] / "fixtures" / "compressed-tensors" / "manifest.json").read_text())
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PIECES = (0, 1, 7, 32, 33)


def _decoded(folder: Path, pieces: tuple[int, ...] = PIECES) -> tuple[str, np.ndarray]:
    """Decode the module ``m`` in pieces that end nowhere in particular."""
    with open_checkpoint(folder) as checkpoint:
        module = checkpoint.packed["m"]
        ends = [*(piece for piece in pieces if piece < module.out_features), module.out_features]
        rows = [module.rows(start, stop) for start, stop in itertools.pairwise(ends)]
        whole = np.concatenate(rows)
        assert whole.shape == (module.out_features, module.in_features)
        return module.dtype, whole


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_files_decode_to_the_bits_that_came_with_them(name: str, fixtures: Path, tmp_path: Path) -> None:
    sample, folder = SAMPLES[name], fixtures / "compressed-tensors"
    draft = one_module({}, sample["weights"], version=sample["writer_version"], label=sample["format"])
    draft.write(tmp_path)
    shutil.copy(folder / f"{name}.safetensors", tmp_path / "model.safetensors")
    dtype, rows = _decoded(tmp_path)
    with open_checkpoint(folder / f"{name}.expected.safetensors") as expected:
        assert dtype == expected.tensors["m.weight"].dtype
        assert rows.tobytes() == expected.tensor("m.weight").tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, None])
def test_packed_weights_equal_the_library(group: int | None, symmetric: bool, dtype: str, tmp_path: Path) -> None:
    """All widths; for one scale per row with a number of inputs that fills no word."""
    outputs, inputs = 75, 250 if group is None else 384
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    for bits in range(2, 9):
        arguments = args(bits, group, symmetric=symmetric)
        tensors, expected = compress(weight, arguments, "pack-quantized")
        assert ("weight_zero_point" in tensors) is not symmetric
        folder = one_module(tensors, json.loads(arguments.model_dump_json())).write(tmp_path / str(bits))
        stored, rows = _decoded(folder)
        assert (stored, rows.tobytes()) == (expected.dtype, expected.data), bits
        narrow = bits <= 4
        assert len(np.unique(rows)) > (2 if narrow else 16)  # not one value everywhere


@pytest.mark.parametrize("label", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
def test_unpacked_integers_equal_the_library(strategy: str, symmetric: bool, label: str, tmp_path: Path) -> None:
    weight = torch.randn((40, 96), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    arguments = args(8, 32 if strategy == "group" else None, symmetric=symmetric).model_copy(
        update={"strategy": strategy}
    )
    tensors, expected = compress(weight, arguments, label)
    assert tensors["weight"].dtype == "I8"
    stored, rows = _decoded(one_module(tensors, json.loads(arguments.model_dump_json()), label=label).write(tmp_path))
    assert (stored, rows.tobytes()) == (expected.dtype, expected.data)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_for_all_equals_the_library(symmetric: bool, tmp_path: Path) -> None:
    weight = torch.randn((40, 50), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    arguments = args(4, None, symmetric=symmetric).model_copy(update={"strategy": "tensor"})
    tensors, expected = compress(weight, arguments, "pack-quantized")
    stored, rows = _decoded(one_module(tensors, json.loads(arguments.model_dump_json())).write(tmp_path))
    assert (stored, rows.tobytes()) == (expected.dtype, expected.data)


def _packed(codes: np.ndarray, bits: int, packing: Packing) -> np.ndarray:
    """Pack unsigned codes of each row, one bit at a time."""
    rows, count = codes.shape
    each = 32 // bits
    width = -(-count * bits // 32) if packing is Packing.DENSE else -(-count // each)
    words = np.zeros((rows, width), np.uint64)
    for code in range(count):
        start = code * bits if packing is Packing.DENSE else 32 * (code // each) + bits * (code % each)
        for bit in range(bits):
            word, shift = divmod(start + bit, 32)
            words[:, word] |= ((codes[:, code].astype(np.uint64) >> np.uint64(bit)) & np.uint64(1)) << np.uint64(shift)
    return words.astype(np.uint32)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("bits", range(2, 9))
def test_both_layouts_unpack_what_was_packed(bits: int, packing: Packing) -> None:
    for count in (1, 31, 32, 33, 100, 256):
        codes = np.random.default_rng(count).integers(0, 1 << bits, (5, count))
        words = _packed(codes, bits, packing)
        assert words.shape[1] == packing.words(bits, count)
        assert np.array_equal(unpack_codes(words, bits, count, packing), codes - (1 << (bits - 1)))
        if words.shape[1] * 32 > count * bits and packing is Packing.DENSE:
            words[:, -1] |= np.uint32(0xFFFFFFFF << (count * bits % 32) & 0xFFFFFFFF)  # bits after the last code
            assert np.array_equal(unpack_codes(words, bits, count, packing), codes - (1 << (bits - 1)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_the_layout_of_older_releases_is_told_by_its_width(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """Whatever version the config states: the bytes decide. The values are those of the dense layout of the library."""
    weight = torch.randn((70, 256), generator=torch.Generator().manual_seed(bits)).to(torch.bfloat16)
    arguments = args(bits, 128, symmetric=symmetric)
    tensors, expected = compress(weight, arguments, "pack-quantized")
    codes = unpack_codes(tensors["weight_packed"].array(), bits, 256, Packing.DENSE) + (1 << (bits - 1))
    tensors["weight_packed"] = Tensor.of(_packed(codes, bits, Packing.WORD_ALIGNED).view(np.int32), "I32")
    if not symmetric:
        zero = unpack_codes(tensors["weight_zero_point"].array().T, bits, 70, Packing.DENSE) + (1 << (bits - 1))
        old = np.ascontiguousarray(_packed(zero, bits, Packing.WORD_ALIGNED).T)
        tensors["weight_zero_point"] = Tensor.of(old.view(np.int32), "I32")
    for version in ("0.17.1", "0.20.1", None):
        draft = one_module(tensors, json.loads(arguments.model_dump_json()), version=version)
        assert _decoded(draft.write(tmp_path / str(version)))[1].tobytes() == expected.data


@pytest.mark.parametrize(
    ("version", "packing"),
    [
        ("0.18.0", Packing.DENSE),
        ("0.20.1+cu12", Packing.DENSE),
        ("1.0", Packing.DENSE),
        ("0.17.1", Packing.WORD_ALIGNED),
        ("0.13.0", Packing.WORD_ALIGNED),
        ("0.17.1.post1", Packing.WORD_ALIGNED),
        (None, None),
        ("", None),
        ("0.17.2", None),
        ("0.18.0.a20260601", None),
        ("0.18.0rc1", None),
        ("abc", None),
    ],
)
def test_where_the_widths_tie_the_writer_decides_or_nobody(version: str | None, packing: Packing | None) -> None:
    """150 codes of 3 bits take 15 words in both layouts. A pre-release may have written either."""
    if packing is None:
        with pytest.raises(SourceError, match="as wide in both layouts"):
            find_packing(3, 150, 15, version, tensor="m.weight_packed")
    else:
        assert find_packing(3, 150, 15, version, tensor="m.weight_packed") is packing
    assert find_packing(3, 151, 16, None, tensor="m.weight_packed") is Packing.WORD_ALIGNED
    assert find_packing(4, 150, 19, None, tensor="m.weight_packed") is Packing.DENSE


def test_a_tie_is_refused_by_name_and_a_version_settles_it(tmp_path: Path) -> None:
    weight = torch.randn((64, 150), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tensors, expected = compress(weight, args(3, None), "pack-quantized")
    with pytest.raises(SourceError, match="does not tell which") as caught:
        open_checkpoint(
            one_module(tensors, json.loads(args(3, None).model_dump_json()), version=None).write(tmp_path / "a")
        )
    assert caught.value.tensor == "m.weight_packed"
    draft = one_module(tensors, json.loads(args(3, None).model_dump_json()), version="0.19.0")
    assert _decoded(draft.write(tmp_path / "b"))[1].tobytes() == expected.data


def _int4(**changes: Tensor | None) -> dict[str, Tensor]:
    weight = torch.randn((40, 64), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tensors = {**compress(weight, args(4, 32), "pack-quantized")[0], **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return from_torch(torch.zeros(shape, dtype=dtype))


ZERO = _zeros((5, 2), torch.int32)
ORDER = _zeros((64,), torch.int32)
REFUSED: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], type[EspalierError], str]] = {
    "width of no layout": ({"weight_packed": _zeros((40, 9), torch.int32)}, {}, ShapeError, "do not have this width"),
    "bits that do not fit": ({}, {"num_bits": 8}, ShapeError, "64 codes of 8 bits"),
    "group that does not fit": ({}, {"group_size": 64}, ShapeError, "128 codes of 4 bits"),
    "strategy that does not fit": ({}, {"strategy": "channel"}, ShapeError, "does not fit int4 channel"),
    "zero point of a symmetric one": ({"weight_zero_point": ZERO}, {}, UnexpectedTensorError, "a zero point"),
    "no zero point": ({}, {"symmetric": False}, MissingTensorError, "no zero point"),
    "zero point too small": (
        {"weight_zero_point": _zeros((4, 2), torch.int32)}, {"symmetric": False}, ShapeError, "do not have this width"),
    "zero point not packed": (
        {"weight_zero_point": _zeros((40, 2), torch.int32)}, {"symmetric": False}, ShapeError, "not have this width"),
    "zero point not packed of other rows": (
        {"weight_zero_point": _zeros((39, 2), torch.int8)}, {"symmetric": False}, ShapeError, "does not fit the scale"),
    "shape of another dtype": (
        {"weight_shape": _zeros((2,), torch.float32)}, {}, DtypeError, "two I64 or I32 numbers"),
    "shape of three numbers": ({"weight_shape": _zeros((3,), torch.int32)}, {}, DtypeError, "two I64 or I32 numbers"),
    "order that is denied": ({"weight_g_idx": ORDER}, {}, UnexpectedTensorError, "does not order groups"),
    "order denied by weight": (
        {"weight_g_idx": ORDER}, {"actorder": "weight"}, UnexpectedTensorError, "does not order groups"),
    "order that is missing": ({}, {"actorder": "group"}, MissingTensorError, "no weight_g_idx"),
    "order of another length": (
        {"weight_g_idx": _zeros((63,), torch.int32)}, {"actorder": "group"}, ShapeError, "does not fit the weight"),
    "no scale": ({"weight_scale": None}, {}, MissingTensorError, "no weight_scale"),
    "no shape": ({"weight_shape": None}, {}, MissingTensorError, "no weight_shape"),
    "scale of integers": ({"weight_scale": _zeros((40, 2), torch.int32)}, {}, DtypeError, "must be floating-point"),
    "scale of other rows": ({"weight_scale": _zeros((39, 2), torch.bfloat16)}, {}, ShapeError, "does not fit int4 g32"),
    "words of another dtype": ({"weight_packed": _zeros((40, 8), torch.int64)}, {}, DtypeError, "32-bit words"),
    "three dimensions": ({"weight_packed": _zeros((4, 40, 8), torch.int32)}, {}, SourceError, "in three dimensions"),
    "plain as well": ({"weight": _zeros((40, 64), torch.bfloat16)}, {}, UnexpectedTensorError, "stored packed as well"),
    "bias that does not fit": ({"bias": _zeros((39,), torch.bfloat16)}, {}, ShapeError, "does not fit the weight"),
    "parameter of another kind": (
        {"weight_global_scale": _zeros((1,), torch.float32)}, {}, UnexpectedTensorError, "is not read"),
    "scale without a weight": ({"weight_packed": None}, {}, MissingTensorError, "no weight_packed and no weight"),
    "scale of a plain weight": (
        {"weight_packed": None, "weight_shape": None, "weight": _zeros((40, 64), torch.bfloat16)}, {},
        UnexpectedTensorError, "the weight is not quantized"),
    "float": ({}, {"type": "float"}, SourceError, "type 'float'"),
    "one bit": ({}, {"num_bits": 1}, SourceError, "2 to 8"),
    "sixteen bits": ({}, {"num_bits": 16}, SourceError, "2 to 8"),
    "blocks": ({}, {"strategy": "block"}, SourceError, "strategy 'block'"),
    "dynamic": ({}, {"dynamic": True}, SourceError, "dynamic"),
    "unknown order": ({}, {"actorder": "magic"}, SourceError, "actorder 'magic'"),
    "argument of a later release": ({}, {"rotation": "hadamard"}, SourceError, "'rotation' is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_decode_to_something_else_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, weights, error, message = REFUSED[name]
    draft = one_module(_int4(**changes), {**INT4, **weights})
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(draft.write(tmp_path)).close()
    assert type(caught.value) is error
    assert caught.value.path is not None


def test_the_cases_differ_from_one_that_is_read(tmp_path: Path) -> None:
    assert _decoded(one_module(_int4(), INT4).write(tmp_path))[1].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_shape": from_torch(torch.tensor([40, 63]))}, ShapeError, "does not fit the other tensors"),
        ({"weight_scale": from_torch(torch.full((40, 2), float("nan")))}, NonFiniteScaleError, "nan"),
        ({"weight_scale": from_torch(torch.full((40, 2), float("inf")))}, NonFiniteScaleError, "inf"),
        ({"weight_scale": from_torch(torch.full((40, 2), 6e4, dtype=torch.float16))}, ScaleOverflowError, "too large"),
        ({"weight_scale": from_torch(torch.full((40, 2), 3e38))}, ScaleOverflowError, "too large"),
    ],
)
def test_values_are_checked_when_they_are_decoded(
    change: dict[str, Tensor], error: type[EspalierError], message: str, tmp_path: Path
) -> None:
    with (
        open_checkpoint(one_module(_int4(**change), INT4).write(tmp_path)) as checkpoint,
        pytest.raises(error, match=message) as caught,
    ):
        checkpoint.decode("m")
    assert caught.value.tensor in {"m", "m.weight_scale", "m.weight_shape"}


@pytest.mark.parametrize("spelling", ["group", "dynamic", True])
def test_columns_in_another_order_take_their_own_scale(spelling: object, tmp_path: Path) -> None:
    tensors = _int4()
    order = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(9), dtype=torch.int32)
    weights = {**INT4, "actorder": spelling}
    folder = one_module({**tensors, "weight_g_idx": from_torch(order)}, weights).write(tmp_path / "a")
    codes = unpack_codes(tensors["weight_packed"].array(), 4, 64, Packing.DENSE).astype(np.float32)
    scale = (tensors["weight_scale"].array().astype(np.uint32) << 16).view(np.float32)
    product = torch.from_numpy(codes * scale[:, order.numpy()]).to(torch.bfloat16)
    assert _decoded(folder)[1].tobytes() == from_torch(product).data

    unset = from_torch(torch.full((64,), -1, dtype=torch.int32))
    plain = _decoded(one_module(tensors, INT4).write(tmp_path / "b"))[1]
    folder = one_module({**tensors, "weight_g_idx": unset}, weights).write(tmp_path / "c")
    assert _decoded(folder)[1].tobytes() == plain.tobytes()
    for bad in (2, -1):
        order[5] = bad
        folder = one_module({**tensors, "weight_g_idx": from_torch(order)}, weights).write(tmp_path / str(bad))
        with pytest.raises(ShapeError, match="a group that there is not"):
            _decoded(folder)


def test_decode_casts_what_the_library_would_give(tmp_path: Path) -> None:
    with open_checkpoint(one_module(_int4(), INT4).write(tmp_path)) as checkpoint:
        stored = checkpoint.packed["m"].rows(0, 40)
        assert checkpoint.decode("m", "bfloat16").tobytes() == stored.tobytes()
        wide = checkpoint.decode("m", "float32")
        assert np.array_equal(wide.view(np.uint32), stored.astype(np.uint32) << 16)
        again = checkpoint.decode("m", "bfloat16", device="cpu")
        assert again.dtype == torch.bfloat16
        assert from_torch(again).data == stored.tobytes()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_nothing(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_tensors, "_BLOCK_WEIGHTS", 200)
    weight = torch.randn((75, 64), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    arguments = args(3, 32, symmetric=False)
    tensors, expected = compress(weight, arguments, "pack-quantized")
    with open_checkpoint(one_module(tensors, json.loads(arguments.model_dump_json())).write(tmp_path)) as checkpoint:
        module = checkpoint.packed["m"]
        assert module.rows(0, 75, threads=threads).tobytes() == expected.data
        assert module.rows(7, 7, threads=threads).shape == (0, 64)
        with pytest.raises(UsageError):
            module.rows(0, 75, threads=0)


def test_scales_of_activations_are_not_weights(tmp_path: Path) -> None:
    draft = one_module(_int4(input_scale=_zeros((1,), torch.bfloat16)), INT4)
    assert draft.config is not None
    group = draft.config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": False}
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert [tensor.name for tensor in checkpoint.packed["m"].activations] == ["m.input_scale"]
        assert "weights only are read" in checkpoint.warnings[0]
        assert tuple(checkpoint.plain) == ()


FORMS = [
    (dtype, shape)
    for dtype in (torch.int32, torch.int8, torch.int64, torch.bfloat16, torch.float32)
    for shape in (
        (),
        (0,),
        (1,),
        (2,),
        (40,),
        (64,),
        (40, 0),
        (40, 1),
        (1, 2),
        (40, 2),
        (5, 2),
        (40, 8),
        (40, 64),
        (1, 40, 8),
    )
]


@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize(
    "kind", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight"]
)
def test_tensors_of_any_form_are_decoded_or_refused(kind: str, strategy: str, tmp_path: Path) -> None:
    """Nothing but an error of ours comes of a tensor of another dtype or shape; what is decoded has the right size."""
    weight = torch.randn((40, 64), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for symmetric, order in ((True, None), (False, None), (True, "group")):
        arguments = args(4, 32 if strategy == "group" else None, symmetric=symmetric)
        arguments = arguments.model_copy(update={"strategy": strategy})
        tensors, _ = compress(weight, arguments, "pack-quantized")
        weights = {**json.loads(arguments.model_dump_json()), "actorder": order}
        for dtype, shape in FORMS:
            changed = {**tensors, kind: _zeros(shape, dtype)}
            if kind == "weight":
                changed = {name: tensor for name, tensor in changed.items() if name != "weight_packed"}
            try:
                with open_checkpoint(one_module(changed, weights).write(tmp_path)) as checkpoint:
                    for module in checkpoint.packed.values():
                        assert module.rows(3, 39).shape == (36, 64)
            except EspalierError as error:
                assert error.path is not None  # noqa: PT017 - which of them it is depends on the case
