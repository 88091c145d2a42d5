"""The global scale: where the search starts, and that it ends near the best."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.encoder.gains import gain
from espalier_format.encoder.regularise import Regularised, regularise
from espalier_format.encoder.scale_search import minimise, search_scale
from espalier_format.encoder.tiles import encode_tiles, to_rings
from espalier_format.encoder.weight_rows import ArrayRows


def regular(source: np.ndarray, rotation: tuple[int, int], *, each: bool = True) -> Regularised:
    return regularise(ArrayRows(source.astype(np.float32)), rotation, seed=0, name="m", each=each)


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_every_codebook_has_a_gain() -> None:
    """Known for the grids; for EXL3 only that it is near what the size of the codes suggests."""
    grids = json.loads((resources.files("espalier_format.spec") / "grids.json").read_text("utf-8"))
    for name, codebook in CODEBOOKS.items():
        if codebook.is_grid:
            assert gain(codebook) == grids[codebook.family]["widths"][codebook.width]["gain"], name
        else:
            assert 0.84 < gain(codebook) * float(codebook.codes.astype(np.float64).std()) < 1.4, name


def test_gains_rise_with_the_width() -> None:
    """A finer code clips more of a normal source's tails, relative to its other errors."""
    for family in ("exl3-3inst", "exl3-mcg", "exl3-mul1"):
        mine = sorted((c for c in CODEBOOKS.values() if c.family == family), key=lambda c: c.half_steps)
        gains = [gain(codebook) for codebook in mine]
        assert gains == sorted(gains), family


def test_minimum_of_a_parabola_is_found() -> None:
    """Exactly, since the search fits one; from far away too."""
    for best in (0.4, 1.0, 1.05, 6.0):
        scale, error = minimise(lambda s, best=best: 3.0 + np.log(s / best) ** 2, 1.0)
        assert scale == pytest.approx(best, rel=1e-9)
        assert error == pytest.approx(3.0, rel=1e-9)


def test_search_stops() -> None:
    """With an error that only falls, or does not change."""
    assert minimise(lambda s: -s, 1.0)[0] > 20
    assert minimise(lambda s: 5.0, 2.0) == (2.0, 5.0)


@pytest.mark.parametrize("name", ["e2m1@2", "int6@4"])
@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy"])
def test_scale_is_near_the_best(name: str, kind: str) -> None:
    """On other tiles than those of the search, within 3 % of the best of a grid of scales."""
    source = normal(64, 128)
    if kind == "uniform":
        source = np.random.default_rng(1).uniform(-1, 1, source.shape)
    if kind == "heavy":
        source = source**3
    found, codebook = regular(source, (0, 0)), get_codebook(name)
    rings = to_rings(found.columns(0, 64))
    choice = search_scale(found, codebook, tiles=16)

    def error(scale: float) -> float:
        return float(encode_tiles(rings, codebook, scale=scale).errors.sum())

    best = min(error(choice.scale * factor) for factor in (0.8, 0.92, 1.08, 1.25))
    assert error(choice.scale) < 1.03 * best


def test_clipping_beyond_the_sample_counts() -> None:
    """One outlier that is in no tile of the sample: at 8 bits it alone would cost more than all other errors."""
    codebook = get_codebook("exl3-mul1@8")
    source = normal(64, 64)
    plain = search_scale(regular(source, (0, 0), each=False), codebook, tiles=2)
    source[20, 3] = 8.0  # in output block 1, where the sample takes the tile of inputs 32 to 47 only
    spoiled = search_scale(regular(source, (0, 0), each=False), codebook, tiles=2)
    assert spoiled.scale > 1.3 * plain.scale


def test_relative_error_is_that_of_the_tiles() -> None:
    codebook = get_codebook("e2m1@2")
    choice = search_scale(regular(normal(128, 256), (128, 128)), codebook, tiles=64)
    assert choice.relative_error == pytest.approx(0.067, rel=0.05)


def test_without_tiles_the_gain_is_the_scale() -> None:
    codebook = get_codebook("int5@3")
    assert search_scale(regular(normal(32, 32), (32, 32)), codebook, tiles=0).scale == gain(codebook)
    assert search_scale(regular(np.zeros((32, 32)), (32, 32)), codebook, tiles=8).scale == gain(codebook)


def test_search_is_the_same_for_any_threads() -> None:
    found = regular(normal(64, 64), (64, 64))
    one, two = (search_scale(found, get_codebook("e2m1@2"), tiles=5, threads=threads) for threads in (1, 2))
    assert one == two
