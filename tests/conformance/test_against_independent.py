"""Expected numbers of the kit against the independent decoder of tests/spec, which shares no code with the package.

The smallest module of each codebook and of each pair of rotation blocks, the modules at the edge, and all tolerances;
whole modules in fractions take long. What is stored as fp64 is compared as such, not to its last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import independent as ind
import make_vectors
import numpy as np
import pytest
from pages import number, table
from safetensors.numpy import load_file

from espalier_format.conformance.noise import halfwords, scales
from espalier_format.conformance.tolerance import BANK, LARGEST_VALUE, PRODUCT, WEIGHT, product_bound, weight_bound

MOST_WEIGHTS = 12_000


@pytest.fixture(scope="module")
def stored(kit: Path) -> dict[str, Any]:
    return {kind: load_file(kit / f"{kind}.safetensors") for kind in ("codes", "weights", "load", "matmul", "experts")}


def cases(kit: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((kit / f"{kind}.json").read_text("ascii"))["cases"]
    return found


def smallest(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The smallest case of each codebook, and of each pair of blocks."""
    chosen: dict[Any, dict[str, Any]] = {}
    for case in sorted(found, key=lambda entry: entry["in_features"] * entry["out_features"]):
        for key in (case["codebook"], (case["rotation"]["in"], case["rotation"]["out"])):
            chosen.setdefault(key, case)
    return list({case["name"]: case for case in chosen.values()}.values())


def decoded(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[list[list[int]], ind.Codes]:
    book = make_vectors.codebook(case["codebook"])
    trellis = tensors[case["tensors"]["trellis"]].view(np.uint16).tolist()
    return ind.decode_tiles(trellis, book), book


def exact(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> list[list[tuple[bool, Fraction]]]:
    codes, book = decoded(case, tensors)
    sides = tuple(tensors[case["tensors"][side]].view(np.uint16).tolist() for side in ("suh", "svh"))
    blocks = case["rotation"]["in"], case["rotation"]["out"]
    return ind.exact_weight(codes, book, sides, blocks, (case["in_features"], case["out_features"]))  # type: ignore[arg-type]


def as_floats(weight: list[list[tuple[bool, Fraction]]]) -> np.ndarray:
    """Each root to about 2^-52 of its size."""
    return np.array([[-root(square) if negative else root(square) for negative, square in row] for row in weight])


@lru_cache(maxsize=100_000)
def root(square: Fraction) -> float:
    # Scaled, so that neither part leaves the range of fp64.
    shift = 2 * ((square.denominator.bit_length() - square.numerator.bit_length()) // 2)
    return math.ldexp(math.sqrt(square * Fraction(2) ** shift), -shift // 2)


def test_noise_and_scales() -> None:
    for label in ("abc", "e2m1@2/in32-out0/trellis"):
        assert halfwords(label, 37).tolist() == make_vectors.noise(label, 37)
    for true, padded in ((40, 64), (5, 16), (13, 16)):
        made = scales("e2m1/suh", padded, true, large=True).view(np.uint16).tolist()
        assert made == make_vectors.scales("e2m1/suh", padded, true)
        made = scales("e2m1/svh", padded, true, large=False).view(np.uint16).tolist()
        assert made == make_vectors.scales("e2m1/svh", padded, true)


def test_some_tiles_of_codes(kit: Path, stored: dict[str, Any]) -> None:
    """Three tiles of each codebook: the first, one in the middle, the last."""
    for case in cases(kit, "codes"):
        if case["error"] is not None:
            continue
        book = make_vectors.codebook(case["codebook"])
        trellis = stored["codes"][case["tensors"]["trellis"]].view(np.uint16)
        codes = stored["codes"][case["tensors"]["codes"]]
        patterns = codes if book.grid else codes.view(np.uint16)
        rows, columns = trellis.shape[:2]
        for row, column in ((0, 0), (rows // 2, columns // 2), (rows - 1, columns - 1)):
            tile = ind.decode_tiles([[trellis[row, column].tolist()]], book)
            here = patterns[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            assert here.tolist() == tile, case["name"]
        flat = codes.astype("<i2") if book.grid else codes.view("<u2")
        assert hashlib.sha256(flat.tobytes()).hexdigest() == case["decode_digest"]


def test_weights(kit: Path, stored: dict[str, Any]) -> None:
    tensors = stored["weights"]
    chosen = smallest(cases(kit, "weights"))
    chosen += [case for case in cases(kit, "weights") if case["name"].startswith("edge/")]
    compared = 0
    for case in chosen:
        if "weight" not in case["tensors"] or case["in_features"] * case["out_features"] > MOST_WEIGHTS:
            continue
        weight, expected = tensors[case["tensors"]["weight"]], as_floats(exact(case, tensors))
        assert weight.shape == expected.shape
        assert (np.abs(weight - expected) <= 2.0**-48 * np.abs(expected)).all(), case["name"]
        assert case["decode_digest"] == ind.decode_digest(
            decoded(case, tensors)[0], grid=make_vectors.codebook(case["codebook"]).grid
        )
        compared += 1
    assert compared >= 45


def test_hashes_of_rounded_weights(kit: Path, stored: dict[str, Any]) -> None:
    """Of the four smallest with an irrational factor and the four without, and of the ties."""
    tensors = stored["weights"]
    found = [case for case in cases(kit, "weights") if case["in_features"] * case["out_features"] <= 3000]
    found = [case for case in found if not case["refused"]]
    irrational = [
        case for case in found if (case["rotation"]["in"] in (32, 128)) != (case["rotation"]["out"] in (32, 128))
    ]
    rational = [case for case in found if case not in irrational]
    ties = [case for case in found if "ties" in case["name"] or "subnormal" in case["name"]]
    assert len(ties) == 2
    for case in irrational[:4] + rational[:4] + ties:
        weight = exact(case, tensors)
        for dtype, form in (("float32", "I"), ("float16", "H"), ("bfloat16", "H")):
            bits = [ind.round_root(negative, square, dtype) for row in weight for negative, square in row]
            packed = struct.pack(f"<{len(bits)}{form}", *bits)
            assert hashlib.sha256(packed).hexdigest() == case["sha256"][dtype], (case["name"], dtype)


def test_products(kit: Path, stored: dict[str, Any]) -> None:
    tensors = stored["matmul"]
    found = smallest(cases(kit, "matmul"))
    found += [case for case in cases(kit, "matmul") if case["name"].endswith(("-inputs", "-inputs-bias"))]
    compared = 0
    for case in found:
        if case["in_features"] * case["out_features"] > MOST_WEIGHTS:
            continue
        weight = as_floats(exact(case, tensors))
        x = tensors[case["tensors"]["x"]].astype(np.float64)
        bias = tensors[case["tensors"]["bias"]].astype(np.float64) if "bias" in case["tensors"] else 0.0
        y = tensors[case["tensors"]["y"]]
        size = np.abs(x) @ np.abs(weight).T + np.abs(bias)
        assert (np.abs(x @ weight.T + bias - y) <= 2.0**-40 * size).all(), case["name"]
        compared += 1
    assert compared >= 20


def test_experts_of_mixed_width(kit: Path, stored: dict[str, Any]) -> None:
    """The weights of a bank, from the files of the checkpoint alone: which codebook an expert has, by its letter."""
    folder = kit / "checkpoints/mixed-experts"
    block = json.loads((folder / "config.json").read_text("ascii"))["quantization_config"]
    tensors: dict[str, np.ndarray] = {}
    for shard in folder.glob("*.safetensors"):
        held = {name: tensor for name, tensor in read_16_bit(shard).items() if ".esp_" in name}
        tensors.update(held)
    ((bank, content),) = block["expert_banks"].items()
    weights = stored["load"]
    seen = set()
    for projection, entry in content["projections"].items():
        for expert, letter in enumerate(entry["assignment"]):
            name = f"{bank}.{expert}.{projection}"
            if letter == "-":
                assert f"{name}.esp_trellis" not in tensors
                continue
            if expert > 2:
                continue
            case = {**entry, "codebook": entry["codebooks"][int(letter)], "tensors": {}}
            case["tensors"] = {key: f"{name}.esp_{key}" for key in ("trellis", "suh", "svh")}
            expected = as_floats(exact(case, tensors))
            weight = weights[f"mixed-experts/{name}.weight"]
            assert (np.abs(weight - expected) <= 2.0**-48 * np.abs(expected)).all(), name
            seen.add(case["codebook"])
    assert len(seen) == 3


def test_outputs_of_expert_banks(kit: Path, stored: dict[str, Any]) -> None:
    """From the weights of the kit and the plain experts of the shards, in another order of sums, with another exp."""
    compared = 0
    for case in cases(kit, "experts"):
        tensors = {key: stored["experts"][name] for key, name in case["tensors"].items()}
        checkpoint = case["folder"].partition("/")[2]
        y = np.zeros_like(tensors["y"])
        for token, (ids, shares) in enumerate(zip(tensors["expert_ids"], tensors["expert_weights"], strict=True)):
            assert len(set(ids.tolist())) == ids.size
            for expert, share in zip(ids.tolist(), shares.tolist(), strict=True):
                gate, up, down = (
                    weight_of(kit, stored, checkpoint, f"{case['bank']}.{expert}.{name}_proj")
                    for name in ("gate", "up", "down")
                )
                x = tensors["x"][token].astype(np.float64)
                gated = gate @ x
                y[token] += share * (down @ (gated / (1 + np.exp(-gated)) * (up @ x)))
        slack = 2.0**-36 * np.abs(y).max(axis=1, keepdims=True)
        assert (np.abs(y - tensors["y"]) <= slack).all(), case["name"]
        # A bound that would let zeros pass shows nothing.
        zeros_pass = np.abs(tensors["y"]) <= tensors["bound_bfloat16"]
        assert zeros_pass.mean() < 0.3, case["name"]
        compared += 1
    assert compared == 12


def weight_of(kit: Path, stored: dict[str, Any], checkpoint: str, name: str) -> np.ndarray:
    found = stored["load"].get(f"{checkpoint}/{name}.weight")
    if found is not None:
        return np.asarray(found)
    for shard in (kit / "checkpoints" / checkpoint).glob("*.safetensors"):
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:start]).get(f"{name}.weight")
        if entry is not None:
            patterns = np.frombuffer(data[start:][slice(*entry["data_offsets"])], "<u2").reshape(entry["shape"])
            return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    raise AssertionError(name)


def read_16_bit(shard: Path) -> dict[str, np.ndarray]:
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[start:][slice(*entry["data_offsets"])], "<i2").reshape(entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] in ("I16", "F16")
    }


def power(cell: str) -> float:
    base, _, exponent = cell.partition("^")
    return number(base) ** number(exponent) if exponent else number(base)


def test_tolerances_are_those_of_the_pages() -> None:
    stated = {row[0].strip("`"): number(row[1]) for row in table("rotation.md", "6", 0)}
    assert stated == dict(LARGEST_VALUE)
    for name, section, index, allowed in (
        ("rotation.md", "6", 1, WEIGHT),
        ("conformance.md", "7", 0, PRODUCT),
        ("conformance.md", "7.1", 0, BANK),
    ):
        rows = {row[0]: tuple(power(cell) for cell in row[1:]) for row in table(name, section, index)}
        assert rows == {dtype: tuple(terms) for dtype, terms in allowed.items()}


def test_largest_values_of_the_codebooks() -> None:
    for name in ind.codebook_names(make_vectors.GRIDS):
        book = make_vectors.codebook(name)
        assert max(abs(book.value(code)) for code in set(book.codes)) == LARGEST_VALUE[name.partition("@")[0]]


def test_bounds_by_hand() -> None:
    weight = np.array([[1.0, -2.0], [0.0, 0.0]])
    suh, svh = np.array([0.5, 2.0, 9.0], np.float16), np.array([-1.0, 0.0, 9.0], np.float16)
    bound = weight_bound(weight, suh, svh, "e2m1", "float16")
    assert bound.tolist() == [
        [2.0**-9 + 2.0**-10 * 6 * 0.5 + 2.0**-24, 2.0**-9 * 2 + 2.0**-10 * 6 * 2 + 2.0**-24],
        [0.0, 0.0],
    ]
    x = np.array([[3.0, 0.0], [0.0, 0.0]], np.float32)
    product = np.array([[3.0, 7.0], [5.0, 0.0]])
    bias = np.array([-1.0, 0.0], np.float32)
    bound = product_bound(product, x, suh, svh, bias, "int5", "bfloat16")
    assert bound.tolist() == [[2.0**-7 * 4 + 2.0**-7 * 14 * 1.5, 0.0], [2.0**-7 * 6, 0.0]]
    bound = product_bound(product, x, suh, svh, None, "int5", "float16")
    assert bound.tolist() == [[2.0**-9 * 3 + 2.0**-9 * 14 * 1.5 + 2.0**-24 * 7, 0.0], [0.0, 0.0]]
