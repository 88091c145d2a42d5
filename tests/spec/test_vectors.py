"""spec/vectors/ is what the independent decoder computes, and what the project's kernels compute."""

from __future__ import annotations

import hashlib
import importlib
import json
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Any

import make_vectors
import numpy as np
import pytest
from pages import SPEC, words

from espalier_format.checkpoint.bits import average_bits
from espalier_format.checkpoint.components import Component, component_of
from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.codec.trellis import pack_states, unpack_states
from espalier_format.kernels import numpy_decoder, reference
from espalier_format.schema.config import ModuleSpec
from espalier_format.schema.expert_bank import ExpertBank

MODULES = json.loads((SPEC / "vectors/rotation.json").read_text("ascii"))["modules"]


FROZEN = "505c49486e7c22f38afde63b636125f8224bb2455911199c26850d77a7b12a6a"
"""SHA-256 of spec/grids.json, which never changes."""


def test_grids_are_frozen() -> None:
    assert hashlib.sha256((SPEC / "grids.json").read_bytes()).hexdigest() == FROZEN


def vectors(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SPEC / "vectors" / name).read_text("ascii"))
    return loaded


@pytest.mark.parametrize("name", make_vectors.FILES)
def test_file_is_what_the_script_writes(name: str) -> None:
    assert make_vectors.dumps(make_vectors.FILES[name]()) == (SPEC / "vectors" / name).read_bytes()


def test_folder_holds_these_files_and_stays_small() -> None:
    """Files that are made elsewhere: tests/vectors/make_bad.py, tests/conformance/make_pins.py."""
    files = list((SPEC / "vectors").iterdir())
    assert {file.name for file in files} == {*make_vectors.FILES, "refusals.json", "kit.json"}
    assert sum(file.stat().st_size for file in files) < 500_000


def test_components_of_the_code() -> None:
    pairs = vectors("components.json")["components"]
    assert [component_of(name).value for name, _ in pairs] == [component for _, component in pairs]
    assert {component for _, component in pairs} == {component.value for component in Component}


def test_averages_of_the_code() -> None:
    for entry in vectors("bits.json")["configs"]:
        modules = {name: ModuleSpec.model_validate(module) for name, module in entry["modules"].items()}
        banks = {name: ExpertBank.model_validate(bank) for name, bank in entry["expert_banks"].items()}
        computed = average_bits(modules, banks)
        assert (computed.bits, computed.head_bits) == (entry["bits"], entry["head_bits"]), entry["name"]


def test_averages_that_lie_between_two_are_among_the_vectors() -> None:
    """By decimal arithmetic: exact quotients whose seventh decimal is 5, and no more follow; one goes each way."""
    directions = set()
    for entry in vectors("bits.json")["configs"]:
        if entry["name"].startswith("tie"):
            stored = sum(
                Decimal(module["codebook"].partition("@")[2]) * module["in_features"] * module["out_features"]
                for module in entry["modules"].values()
            )
            exact = stored / sum(module["in_features"] * module["out_features"] for module in entry["modules"].values())
            assert exact * 10**7 % 10 == 5
            assert exact.quantize(Decimal("0.000001"), ROUND_HALF_EVEN) == Decimal(str(entry["bits"]))
            directions.add(Decimal(str(entry["bits"])) > exact)
    assert directions == {True, False}


def test_rounding_vectors_are_nearest() -> None:
    """Each pattern against its two neighbours, as numpy and torch's definition of bfloat16 read them."""

    def value(pattern: int, dtype: str) -> Fraction | None:
        if dtype == "bfloat16":
            pattern, dtype = pattern << 16, "float32"
        number = np.array(pattern, np.uint32 if dtype == "float32" else np.uint16).view(dtype)
        return Fraction(float(number)) if np.isfinite(number) else None

    seen: set[tuple[str, str]] = set()
    for entry in vectors("rounding.json")["values"]:
        exact = abs(Fraction(int(entry["numerator"]), int(entry["denominator"])))
        for dtype, top in (("float32", 31), ("float16", 15), ("bfloat16", 15)):
            pattern = int(entry[dtype], 16)
            assert pattern >> top == (int(entry["numerator"]) < 0)
            pattern &= (1 << top) - 1
            found, below = value(pattern, dtype), value(max(pattern - 1, 0), dtype)
            assert below is not None
            if found is None:  # overflow: from half a step above the largest finite number on
                step = below - (value(pattern - 2, dtype) or 0)
                assert exact >= below + step / 2
                seen.add((dtype, "overflow"))
                continue
            above = value(pattern + 1, dtype) or 2 * found - below
            lower, upper = (below + found) / 2, (found + above) / 2
            even = pattern % 2 == 0
            assert (lower <= exact if even else lower < exact) or pattern == 0
            assert exact <= upper if even else exact < upper
            seen.add((dtype, "tie" if exact in (lower, upper) else "plain"))
            if 0 < found < 2.0 ** (-14 if dtype == "float16" else -126):
                seen.add((dtype, "subnormal"))
    kinds = ("plain", "tie", "subnormal", "overflow")
    assert seen == {(dtype, kind) for dtype in ("float32", "float16", "bfloat16") for kind in kinds}


def halfwords(text: str) -> np.ndarray:
    return np.array(words(text), dtype=np.uint16)


def test_packing_with_the_codec() -> None:
    for width, entry in vectors("packing.json")["widths"].items():
        stored = halfwords(entry["halfwords"])
        states = unpack_states(stored)
        assert states.tolist() == words(entry["states"])
        half_steps = int(2 * float(width))
        assert (pack_states(states, half_steps).view(np.uint16) == stored).all()


def test_codebooks_of_the_codec() -> None:
    entries = vectors("codebooks.json")["codebooks"]
    assert list(entries) == list(CODEBOOKS)
    for name, entry in entries.items():
        book = get_codebook(name)
        assert (book.width, book.half_steps, book.halfwords_per_tile) == (
            entry["width"],
            entry["half_steps"],
            entry["halfwords_per_tile"],
        )
        assert (book.multiplier_hex, book.sha256) == (entry["multiplier"], entry["sha256"])
        assert book.addend == int(entry.get("addend", "0x0"), 16)
        codes = book.codes if book.is_grid else book.codes.view(np.uint16)
        read = (lambda value: value) if book.is_grid else words
        assert codes[:16].tolist() == read(entry["first16"])
        assert codes[-16:].tolist() == read(entry["last16"])
        for state, code in entry["spots"].items():
            assert codes[int(state, 16)] == (code if book.is_grid else int(code, 16))
        if book.is_grid:
            assert book.value_scale == entry["value_scale"]


def on_torch(decode: Any, book: Codebook, trellis: np.ndarray, *rest: Any) -> np.ndarray:
    """Call the torch decoder on the CPU with numpy arrays; bfloat16 comes back as bit patterns."""
    import torch

    result = decode(torch.from_numpy(trellis), *(torch.from_numpy(a.copy()) for a in rest[:2]), book, *rest[2:])
    array: np.ndarray = (result.view(torch.int16) if result.dtype == torch.bfloat16 else result).numpy()
    return array


@pytest.mark.parametrize("decoder", ["reference", "numpy_decoder", "torch_decoder"])
def test_tiles_with_the_kernels(decoder: str) -> None:
    if decoder == "torch_decoder":
        pytest.importorskip("torch")
    decode_codes = importlib.import_module(f"espalier_format.kernels.{decoder}").decode_codes
    for name, entry in vectors("tiles.json")["tiles"].items():
        book = get_codebook(name)
        trellis = halfwords(entry["halfwords"]).view(np.int16)[None, None]
        codes = on_torch(decode_codes, book, trellis) if decoder == "torch_decoder" else decode_codes(trellis, book)
        expected = entry["codes"] if book.is_grid else words(entry["codes"])
        assert (codes if book.is_grid else codes.view(np.uint16)).ravel().tolist() == expected


def module_arrays(entry: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = entry["trellis_shape"]
    stored = (
        words(entry["trellis"])
        if "trellis" in entry
        else make_vectors.noise(entry["trellis_label"], int(np.prod(shape)))
    )
    trellis = np.array(stored, dtype="<u2")
    assert hashlib.sha256(trellis.tobytes()).hexdigest() == entry["trellis_sha256"]
    scales = [halfwords(entry[side]).view(np.float16) for side in ("suh", "svh")]
    return trellis.view(np.int16).reshape(shape), scales[0], scales[1]


@pytest.mark.parametrize(
    "entry", MODULES, ids=lambda m: f"{m['codebook']}-{m['rotation']['in']}-{m['rotation']['out']}"
)
def test_modules_with_the_kernels(entry: dict[str, Any]) -> None:
    trellis, suh, svh = module_arrays(entry)
    book, rotation = get_codebook(entry["codebook"]), (entry["rotation"]["in"], entry["rotation"]["out"])
    codes = numpy_decoder.decode_codes(trellis, book)
    bits = codes.astype("<i2") if book.is_grid else codes.view("<u2")
    assert hashlib.sha256(bits.tobytes()).hexdigest() == entry["decode_digest"]
    exact = reference.decode_weight(trellis, suh, svh, book, *rotation)
    for line in entry["weights"]:
        n, k, text, *_ = line.split()
        expected = float.fromhex(text)
        # The reference is float64, not correctly rounded: a few units in the last place of a sum of |terms|.
        slack = 2.0**-46 * abs(float(suh[int(k)]) * float(svh[int(n)])) * 127
        assert abs(exact[int(k), int(n)] - expected) <= slack
    for dtype, code in (("float32", "<u4"), ("float16", "<u2"), ("bfloat16", "<u2")):
        weight = numpy_decoder.decode_weight(
            trellis, suh, svh, book, *rotation, entry["in_features"], entry["out_features"], dtype
        )
        patterns = np.ascontiguousarray(weight).view(code)
        for line in entry["weights"]:
            n, k, _, *expected_bits = line.split()
            column = ("float32", "float16", "bfloat16").index(dtype)
            assert patterns[int(n), int(k)] == int(expected_bits[column], 16), (dtype, line)
        assert hashlib.sha256(patterns.tobytes()).hexdigest() == entry[f"sha256_{dtype}"]


@pytest.mark.parametrize(
    "entry", MODULES, ids=lambda m: f"{m['codebook']}-{m['rotation']['in']}-{m['rotation']['out']}"
)
def test_modules_with_the_torch_decoder(entry: dict[str, Any]) -> None:
    """Within its tolerance of the exact weights, and nearly always the correctly rounded pattern."""
    torch_decoder = pytest.importorskip("espalier_format.kernels.torch_decoder")
    trellis, suh, svh = module_arrays(entry)
    book, rotation = get_codebook(entry["codebook"]), (entry["rotation"]["in"], entry["rotation"]["out"])
    codes = on_torch(torch_decoder.decode_codes, book, trellis)
    bits = codes.astype("<i2") if book.is_grid else codes.view("<u2")
    assert hashlib.sha256(bits.tobytes()).hexdigest() == entry["decode_digest"]
    sizes = (entry["in_features"], entry["out_features"])
    for column, dtype in enumerate(("float32", "float16", "bfloat16")):
        bound = torch_decoder.TOLERANCE[dtype]
        weight = on_torch(torch_decoder.decode_weight, book, trellis, suh, svh, *rotation, *sizes, dtype)
        patterns = weight.view("<u4" if dtype == "float32" else "<u2")
        values = (patterns.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else weight
        off = 0
        for line in entry["weights"]:
            n, k, text, *expected = line.split()
            exact = float.fromhex(text)
            # The text is the exact weight rounded to float64.
            slack = bound.relative * abs(exact) + bound.absolute + 2.0**-52 * abs(exact)
            assert abs(float(values[int(n), int(k)]) - exact) <= slack, (dtype, line)
            off += int(patterns[int(n), int(k)]) != int(expected[column], 16)
        assert off <= len(entry["weights"]) // 100, dtype
