"""spec/vectors/ is what the independent decoder computes, and what the project's kernels compute."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import make_vectors
import numpy as np
import pytest
from pages import SPEC, words

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.codec.trellis import pack_states, unpack_states
from espalier_format.kernels import numpy_decoder, reference

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
    files = list((SPEC / "vectors").iterdir())
    assert {file.name for file in files} == set(make_vectors.FILES)
    assert sum(file.stat().st_size for file in files) < 250_000


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


@pytest.mark.parametrize("decoder", [reference, numpy_decoder])
def test_tiles_with_the_kernels(decoder: Any) -> None:
    for name, entry in vectors("tiles.json")["tiles"].items():
        book = get_codebook(name)
        codes = decoder.decode_codes(halfwords(entry["halfwords"]).view(np.int16)[None, None], book)
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
