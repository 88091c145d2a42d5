"""The reference decoder, against what exllamav3 computed on a GPU and the worked tiles of the design.

Weights that exllamav3 computed went through float16 at every step, so they are compared with a bound on their own
error; only codes (its inner weights) can be compared bit for bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from espalier_format.codec.codebook import CODEBOOKS, exl3_codebook, get_codebook
from espalier_format.errors import DtypeError, NonFiniteScaleError, ShapeError, UsageError
from espalier_format.kernels import reference

FLOAT16_PIPELINE = 1e-3
"""Relative error (2-norm) of a weight that was rounded to float16 after each of four steps.

Four independent roundings of at most 2^-11 relative have a root mean square below 2 * 2^-11 = 9.8e-4.
"""

KAT = {
    "3inst": ["1", "3", "4", "6", "8"],
    "mcg": ["2", "4", "5", "7"],
    "mul1": ["1", "1.5", "2", "3", "3.5", "6"],
}
KAT_KEYS = [f"{codebook}.k{width}" for codebook, widths in KAT.items() for width in widths]

# CRC-32 of the decoded 16x16 float16 tile of h[j] = 40503 j + 12345, by codebook; None where none exists.
EXL3_TILES = {
    16: (0xF6D7657A, 0xC224991F, 0xDB66D975),
    24: (None, None, 0x29358D9A),
    32: (0x38D40EEA, 0x96FC911A, 0xFA102047),
    40: (None, None, 0x6FDB588F),
    48: (0x27A4178E, 0x2AFABE76, 0x4449A39E),
    56: (None, None, 0x66EA388A),
    64: (0x5986DBC4, 0x91A38E6A, 0x271B44BC),
    80: (0x49B592C6, 0x512C6C01, 0x891E49DE),
    96: (0x414D117B, 0x8CFA064B, 0x6305703B),
    112: (0x9DEE1AF1, 0x959B88F4, 0x229CCBA7),
    128: (0xB0DF5439, 0xA5BC8185, 0xE10FD750),
}


def relative_error(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(got - expected.astype(np.float64)) / np.linalg.norm(expected.astype(np.float64)))


@pytest.fixture(scope="module")
def kat(fixtures: Path) -> dict[str, np.ndarray[Any, Any]]:
    return load_file(fixtures / "exl3" / "kat.safetensors")


@pytest.mark.parametrize("key", KAT_KEYS)
def test_inner_weights_of_exllamav3_bit_for_bit(key: str, kat: dict[str, np.ndarray[Any, Any]]) -> None:
    family, width = key.split(".k")
    codes = reference.decode_codes(kat[f"{key}.trellis"], get_codebook(f"exl3-{family}@{width}"))
    assert codes.dtype == np.float16
    assert np.array_equal(codes.view(np.uint16), kat[f"{key}.expect_inner"].view(np.uint16))


@pytest.mark.parametrize("key", KAT_KEYS)
def test_weights_and_matmuls_of_exllamav3(key: str, kat: dict[str, np.ndarray[Any, Any]]) -> None:
    family, width = key.split(".k")
    codebook = get_codebook(f"exl3-{family}@{width}")
    weight = reference.decode_weight(*(kat[f"{key}.{n}"] for n in ("trellis", "suh", "svh")), codebook, 128, 128)
    if f"{key}.expect_weight" in kat:
        assert relative_error(weight, kat[f"{key}.expect_weight"]) < FLOAT16_PIPELINE
    # The runtime's paths round in yet more places (activations, accumulation): twice the bound.
    product = kat[f"{key}.x"].astype(np.float64) @ weight
    for path in ("y_kernel", "y_reconstruct"):
        assert relative_error(product, kat[f"{key}.{path}"]) < 2 * FLOAT16_PIPELINE


def test_the_known_answers_are_the_ones_listed(kat: dict[str, np.ndarray[Any, Any]]) -> None:
    assert sorted(key.removesuffix(".expect_inner") for key in kat if key.endswith("expect_inner")) == sorted(KAT_KEYS)
    assert any(key.endswith("expect_weight") for key in kat)


@pytest.mark.parametrize("halfwords", list(EXL3_TILES))
@pytest.mark.parametrize("column", [0, 1, 2])
def test_exl3_tiles(halfwords: int, column: int) -> None:
    expected = EXL3_TILES[halfwords][column]
    if expected is None:
        return
    codebook = exl3_codebook((None, "mcg", "mul1")[column], halfwords)
    tile = ((40503 * np.arange(halfwords) + 12345) % 65536).astype(np.uint16).reshape(1, 1, -1)
    assert zlib.crc32(reference.decode_codes(tile, codebook).astype("<f2").tobytes()) == expected


def test_worked_tiles_of_every_codebook(fixtures: Path) -> None:
    worked = json.loads((fixtures / "check_tiles.json").read_text())
    assert sorted(worked) == sorted(name for name in CODEBOOKS if name in worked)
    assert {name for name in CODEBOOKS if not name.startswith("exl3")} <= set(worked)
    for name, tile in worked.items():
        codebook = get_codebook(name)
        trellis = np.array(tile["trellis"], np.int16).reshape(1, 1, -1)
        codes = reference.decode_codes(trellis, codebook)
        assert codes.ravel().tolist() == tile["codes_row_major"]
        assert codebook.codes[:8].tolist() == tile["codebook_first8"]
        assert codebook.codes[-4:].tolist() == tile["codebook_last4"]


@pytest.mark.parametrize("source", ["llama-3.0-mcg", "qmoe-2.5-mul1"])
def test_weights_of_real_checkpoints(source: str, fixtures: Path, llama_exl3: Path, qmoe_exl3: Path) -> None:
    golden = load_file(fixtures / "exl3" / f"golden-{source}.safetensors")
    assert golden
    path = {"llama-3.0-mcg": llama_exl3, "qmoe-2.5-mul1": qmoe_exl3}[source] / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        for key, expected in golden.items():
            module = key.removesuffix(".weight_in_out")
            marker = next((m for m in ("mcg", "mul1") if f"{module}.{m}" in names), None)
            trellis, suh, svh = (file.get_tensor(f"{module}.{n}") for n in ("trellis", "suh", "svh"))
            weight = reference.decode_weight(trellis, suh, svh, exl3_codebook(marker, trellis.shape[2]), 128, 128)
            assert weight.shape == expected.shape
            assert relative_error(weight, expected) < FLOAT16_PIPELINE


@pytest.mark.parametrize("rotation", [(0, 0), (32, 0), (0, 64), (128, 256), (256, 32)])
def test_weight_is_the_formula(rotation: tuple[int, int], random_module: Callable[..., Any]) -> None:
    """diag(suh) H_in V H_out diag(svh) with dense matrices built from popcounts."""
    module = random_module("e2m1@2", rotation, 256, 256)

    def dense(block: int) -> np.ndarray[Any, Any]:
        if block == 0:
            return np.eye(256)
        one = [[(-1) ** (i & j).bit_count() / block**0.5 for j in range(block)] for i in range(block)]
        return np.kron(np.eye(256 // block), np.array(one))

    values = reference.decode_codes(module.trellis, module.codebook) / 2
    expected = np.diag(module.suh.astype(float)) @ dense(rotation[0]) @ values @ dense(rotation[1])
    expected = expected @ np.diag(module.svh.astype(float))
    weight = reference.decode_weight(*module.operands())
    assert weight.dtype == np.float64
    # Not exact: the dense oracle adds rounded numbers. 512 terms of at most 2^-53 each.
    assert np.abs(weight - expected).max() <= 2.0**-44 * np.abs(expected).max()


def test_wrong_operands_are_refused(random_module: Callable[..., Any]) -> None:
    module = random_module("int6@4", (32, 64), 64, 64)
    trellis, suh, svh, codebook, _, _ = module.operands()
    with pytest.raises(DtypeError):
        reference.decode_weight(trellis.astype(np.int32), suh, svh, codebook, 32, 64)
    with pytest.raises(DtypeError):
        reference.decode_weight(trellis, suh.astype(np.float32), svh, codebook, 32, 64)
    for bad in (trellis[0], trellis[..., :48], trellis[..., None]):
        with pytest.raises(ShapeError):
            reference.decode_codes(bad, codebook)
    with pytest.raises(ShapeError):
        reference.decode_weight(trellis, suh[:-16], svh, codebook, 32, 64)
    with pytest.raises(ShapeError):
        reference.decode_weight(trellis, suh, svh, codebook, 128, 64)
    with pytest.raises(UsageError):
        reference.decode_weight(trellis, suh, svh, codebook, 16, 64)
    for bad_scale in (np.inf, -np.inf, np.nan):
        broken = svh.copy()
        broken[3] = bad_scale
        with pytest.raises(NonFiniteScaleError, match="svh"):
            reference.decode_weight(trellis, suh, broken, codebook, 32, 64)
