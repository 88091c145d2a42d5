"""Files of Hessians: what is read, and what is refused with which error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Tensor, safetensors_bytes
from safetensors.numpy import save_file

from espalier_format.encoder.hessian import Hessian, check_hessian, find_hessian, input_power, read_hessian
from espalier_format.encoder.hessian_product import HessianProduct
from espalier_format.errors import (
    DtypeError,
    EspalierError,
    MalformedError,
    MissingTensorError,
    PathError,
    ShapeError,
    SourceError,
)

MODULE = "model.layers.0.self_attn.q_proj"


def good(size: int = 6) -> np.ndarray:
    inputs = np.random.default_rng(0).standard_normal((size, 40))
    return (inputs @ inputs.T).astype(np.float32)


def write(folder: Path, **tensors: Any) -> Path:
    save_file({name: np.asarray(tensor) for name, tensor in tensors.items()}, folder / f"{MODULE}.safetensors")
    return folder


@pytest.mark.parametrize("count", [np.int64(40), np.array([40])])
def test_file_is_read(tmp_path: Path, count: Any) -> None:
    found = read_hessian(write(tmp_path, hessian=good(), count=count), MODULE, 6)
    assert found is not None
    assert found.count == 40
    assert found.matrix.dtype == np.float32
    assert np.array_equal(found.matrix, good())


def test_no_file_is_no_hessian(tmp_path: Path) -> None:
    assert read_hessian(tmp_path, MODULE, 6) is None


def edited(edits: dict[tuple[int, int], float]) -> np.ndarray:
    matrix = good()
    for place, value in edits.items():
        matrix[place] = value
    return matrix


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ({"hessian": good()}, MissingTensorError, "lacks"),
        ({"count": np.int64(1)}, MissingTensorError, "lacks"),
        ({"hessian": good().astype(np.float64), "count": np.int64(1)}, DtypeError, "F32"),
        ({"hessian": good(), "count": np.int32(1)}, DtypeError, "I64"),
        ({"hessian": good(7), "count": np.int64(1)}, ShapeError, "7"),
        ({"hessian": good()[:, :5], "count": np.int64(1)}, ShapeError, "5"),
        ({"hessian": good(), "count": np.ones(2, np.int64)}, ShapeError, "2"),
        ({"hessian": good(), "count": np.int64(-1)}, SourceError, "negative"),
        ({"hessian": edited({(2, 2): np.nan}), "count": np.int64(1)}, SourceError, "NaN"),
        ({"hessian": edited({(2, 3): np.inf}), "count": np.int64(1)}, SourceError, "infinity"),
        ({"hessian": edited({(2, 2): -1.0}), "count": np.int64(1)}, SourceError, "diagonal"),
        ({"hessian": edited({(2, 3): good()[2, 3] + 1}), "count": np.int64(1)}, SourceError, "symmetric"),
        ({"hessian": edited({(2, 3): 90, (3, 2): 90}), "count": np.int64(1)}, SourceError, "semidefinite"),
    ],
)
def test_bad_file(tmp_path: Path, tensors: dict[str, Any], kind: type[EspalierError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        read_hessian(write(tmp_path, **tensors), MODULE, 6)
    assert caught.value.path == str(tmp_path / f"{MODULE}.safetensors")


def test_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.safetensors").write_bytes(b"\x10" + bytes(7) + b"not a header, no")
    with pytest.raises(MalformedError):
        read_hessian(tmp_path, MODULE, 6)


def test_rounding_of_a_calibration_is_tolerated() -> None:
    """Sums in F32 are not quite symmetric, and channels without inputs are zero."""
    matrix = good(40)
    matrix *= 1 + 1e-5 * np.random.default_rng(1).standard_normal(matrix.shape).astype(np.float32)
    matrix[7] = matrix[:, 7] = 0
    check_hessian(Hessian(matrix, 1))
    check_hessian(Hessian(np.zeros((4, 4), np.float32), 0))


def test_product_is_with_the_hessian() -> None:
    """Up to a common factor, whatever the scales it was made with."""
    rng = np.random.default_rng(2)
    matrix = good(30)
    for scales in (np.ones(30), 10.0 ** rng.uniform(-3, 3, 30), -np.ones(30)):
        rows = rng.standard_normal((9, 30)) * scales
        expected = rows @ matrix.astype(np.float64) * scales
        found = HessianProduct(Hessian(matrix, 1), scales).times(rows) * scales
        factor = np.abs(found).max() / np.abs(expected).max()
        assert np.abs(found / factor - expected).max() < 1e-5 * np.abs(expected).max()
    product = HessianProduct(Hessian(matrix, 1), np.ones(30))
    assert product.loss(2 * rows) == 4 * product.loss(rows) > 0


@pytest.mark.parametrize("form", ["absolute", "parent"])
def test_names_do_not_lead_out_of_the_folder(form: str, tmp_path: Path) -> None:
    """They come from a checkpoint, and may hold what a path gives a meaning."""
    inside, outside = tmp_path / "hessians", tmp_path / "elsewhere"
    for folder in (inside, outside):
        folder.mkdir()
        write(folder, hessian=good(), count=np.int64(1))
    module = {"absolute": str(outside / MODULE), "parent": f"../elsewhere/{MODULE}"}[form]
    for look in (lambda: read_hessian(inside, module, 6), lambda: input_power(inside, module, 6),
                 lambda: find_hessian(inside, module)):  # fmt: skip
        with pytest.raises(PathError):
            look()


def test_names_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.layers").mkdir()
    save_file({"hessian": good(), "count": np.array(3)}, tmp_path / "model.layers" / "0.up.safetensors")
    inside = tmp_path / "links"  # to another disk, say
    inside.mkdir()
    (inside / "inner.safetensors").symlink_to(tmp_path / "model.layers" / "0.up.safetensors")
    for folder, module in ((tmp_path, "model.layers/0.up"), (inside, "inner")):
        found = read_hessian(folder, module, 6)
        assert found is not None
        assert found.count == 3


def test_the_power_of_the_inputs_is_read_from_the_diagonal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file whose data is not aligned, which must not be copied."""
    size = 600
    matrix = np.full((size, size), np.nan, np.float32)
    np.fill_diagonal(matrix, np.arange(size))
    data = safetensors_bytes(
        {"x": Tensor("U8", (1,), b"x"), "hessian": Tensor.of(matrix, "F32"), "count": Tensor.of(np.array(1), "I64")}
    )
    (tmp_path / f"{MODULE}.safetensors").write_bytes(data)
    assert input_power(tmp_path, "other", size) is None
    tracemalloc.start()
    try:
        assert input_power(tmp_path, MODULE, size) == (size - 1) / 2
        assert tracemalloc.get_traced_memory()[1] < matrix.nbytes / 4
    finally:
        tracemalloc.stop()
    for value, words in ((np.nan, "NaN"), (np.inf, "NaN or an infinity"), (-1.0, "negative number on its diagonal")):
        matrix[3, 3] = value
        with pytest.raises(SourceError, match=words) as caught:
            input_power(write(tmp_path, hessian=matrix, count=np.int64(1)), MODULE, size)
        assert caught.value.path == str(tmp_path / f"{MODULE}.safetensors")
    with pytest.raises(ShapeError):
        input_power(tmp_path, MODULE, size + 1)
