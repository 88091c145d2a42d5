"""Checkpoint.decode, codes and digest: the right decoder gets the right operands.

That the decoders themselves are right is checked in tests/kernels; here expected values come from the
exact definition, written out with dense matrices.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import DEFAULT_BANKS, DEFAULT_MODULES, Draft, Exl3Module, Module, Tensor, espalier_draft, exl3_draft

from espalier_format.checkpoint import Checkpoint, open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.dtype_names import DtypeName
from espalier_format.codec.rounding import OutputDtype
from espalier_format.errors import (
    DependencyError,
    MissingTensorError,
    NonFiniteScaleError,
    ScaleOverflowError,
    UsageError,
)

EXPERT = "model.layers.0.mlp.experts.3.gate_proj"
MODULES = [*DEFAULT_MODULES, Module(EXPERT, 96, 64, "int5@3", (32, 32))]


@pytest.fixture(scope="module")
def draft() -> Draft:
    return espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)


@pytest.fixture(scope="module")
def checkpoint(draft: Draft, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_checkpoint(draft.write(tmp_path_factory.mktemp("espalier"))) as opened:
        yield opened


def codes_by_definition(words: np.ndarray, codebook: str) -> np.ndarray:
    """Decode one position at a time from a string of bits, in the words of the specification."""
    book = get_codebook(codebook)
    codes = np.zeros((16 * words.shape[0], 16 * words.shape[1]), book.code_dtype)
    steps = [book.half_steps // 2 + (book.half_steps % 2) * (i % 2) for i in range(256)]
    ends = np.cumsum(steps)
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            tile = words[row, column].view(np.uint16)
            ring = "".join(f"{tile[j ^ 1]:016b}" for j in range(len(tile)))
            for i in range(256):
                state = int((ring + ring)[len(ring) + ends[i] - 16 : len(ring) + ends[i]], 2)
                t, j = divmod(i, 8)
                r = 2 * (t % 4) + (j & 1) + 8 * ((j >> 1) & 1)
                c = (t >> 2) + 8 * ((j >> 2) & 1)
                codes[16 * row + r, 16 * column + c] = book.codes[state]
    return codes


def rotation(size: int, block: int) -> np.ndarray:
    """The orthonormal block-diagonal Hadamard matrix."""
    if block == 0:
        return np.eye(size)
    index = np.arange(block)
    signs = np.array([[(-1) ** int(i & j).bit_count() for j in index] for i in index])
    return np.kron(np.eye(size // block), signs / np.sqrt(block))


def weight_by_definition(draft: Draft, module: Module) -> np.ndarray:
    words, suh, svh = (draft[f"{module.name}.esp_{kind}"].array() for kind in ("trellis", "suh", "svh"))
    values = codes_by_definition(words, module.codebook).astype(np.float64) * get_codebook(module.codebook).value_scale
    rotated = rotation(len(suh), module.rotation[0]) @ values @ rotation(len(svh), module.rotation[1])
    weight = suh.astype(np.float64)[:, None] * rotated * svh.astype(np.float64)
    return weight[: module.in_features, : module.out_features].T


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.codebook)
def test_decode_codes_and_digest(checkpoint: Checkpoint, draft: Draft, module: Module) -> None:
    """float32 within one rounding of the definition; float64 sums of the definition are not exact themselves."""
    expected = weight_by_definition(draft, module)
    decoded = checkpoint.decode(module.name)
    assert decoded.dtype == np.float32
    assert decoded.shape == (module.out_features, module.in_features)
    assert np.abs(decoded - expected).max() <= 2.0**-23 * np.abs(expected).max()
    codes = codes_by_definition(draft[f"{module.name}.esp_trellis"].array(), module.codebook)
    found = checkpoint.codes(module.name)
    assert found.dtype == codes.dtype
    assert found.tobytes() == codes.tobytes()
    words = codes.astype("<i2") if codes.dtype == np.int8 else codes.view("<i2")
    assert checkpoint.digest(module.name) == hashlib.sha256(words.tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_round_the_float32_value_again_only_at_ties(checkpoint: Checkpoint, dtype: str) -> None:
    """Rounding twice differs from rounding once at midpoints only, where it is off by one step."""
    full = checkpoint.decode("lm_head")
    narrow = checkpoint.decode("lm_head", dtype)
    twice = cast_reference(full, dtype)
    difference = np.abs(narrow.view(np.int16).astype(int) - twice.view(np.int16).astype(int))
    assert difference.max() <= 1
    assert (difference != 0).mean() < 0.01


@pytest.mark.parametrize(("short", "dtype"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_short_names_of_dtypes(checkpoint: Checkpoint, short: DtypeName, dtype: DtypeName) -> None:
    """Of quantized and plain weights, as arrays and as tensors; a name that is none is refused whatever is decoded."""
    torch = pytest.importorskip("torch")
    for name in ("lm_head", "model.embed_tokens.weight"):
        found, expected = checkpoint.decode(name, short), checkpoint.decode(name, dtype)
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
        assert checkpoint.decode(name, short, "cpu").dtype == getattr(torch, dtype)
        with pytest.raises(UsageError, match="got bfloat"):
            checkpoint.decode(name, "bfloat")  # type: ignore[call-overload]


def cast_reference(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return values.astype(np.float16)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def test_a_device_gives_torch_tensors(checkpoint: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    for name in ("lm_head", "model.embed_tokens.weight"):
        for dtype in ("float32", "float16", "bfloat16"):
            tensor = checkpoint.decode(name, dtype, "cpu")
            assert tensor.dtype == getattr(torch, dtype)
            expected = torch.from_numpy(checkpoint.decode(name, "float32").copy())
            assert tensor.shape == expected.shape
            assert (tensor.float() - expected).abs().max() <= 2.0**-7 * expected.abs().max()


def test_without_torch_a_device_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("lm_head", "model.embed_tokens.weight"):
        with pytest.raises(DependencyError, match=r"needs torch: pip install torch$"):
            checkpoint.decode(name, "float32", "cpu")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", ""])
def test_a_device_that_cannot_be_used_is_refused(checkpoint: Checkpoint, device: str) -> None:
    """In one line that names it, whatever torch raises; "cuda" is the common case where there is no GPU."""
    torch = pytest.importorskip("torch")
    for wanted in {device} | (set() if torch.cuda.is_available() else {"cuda"}):
        for name in ("lm_head", "model.embed_tokens.weight"):
            with pytest.raises(UsageError, match=f'device "{wanted}" is not available: .'):
                checkpoint.decode(name, "bfloat16", wanted)
        with pytest.raises(UsageError, match="is not available"):
            checkpoint.digest("lm_head", wanted)


def test_plain_tensors_are_cast(checkpoint: Checkpoint, draft: Draft) -> None:
    stored = draft["model.embed_tokens.weight"].array()
    exact = (stored.astype(np.uint32) << 16).view(np.float32)
    assert checkpoint.decode("model.embed_tokens.weight").tobytes() == exact.tobytes()
    assert checkpoint.decode("model.embed_tokens.weight", "bfloat16").tobytes() == stored.tobytes()
    narrow = checkpoint.decode("model.embed_tokens.weight", "float16")
    assert narrow.tobytes() == exact.astype(np.float16).tobytes()


def test_refusals(tmp_path: Path) -> None:
    draft = espalier_draft()
    draft["ids"] = Tensor("I32", (2,), bytes(8))
    draft["huge"] = Tensor.of([1e6], "F32")
    draft["lm_head.esp_svh"] = Tensor.of(np.full(256, np.nan), "F16")
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        for call in (checkpoint.decode, checkpoint.codes, checkpoint.digest, checkpoint.tensor, checkpoint.module):
            with pytest.raises(MissingTensorError, match="nowhere"):
                call("nowhere")
        with pytest.raises(UsageError):
            checkpoint.decode("lm_head", "float64")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            checkpoint.decode("huge", "int8")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            checkpoint.decode("ids")
        with pytest.raises(ScaleOverflowError) as overflow:
            checkpoint.decode("huge", "float16")
        assert (overflow.value.tensor, overflow.value.path) == ("huge", str(checkpoint.tensors["huge"].shard.path))
        with pytest.raises(NonFiniteScaleError):
            checkpoint.decode("lm_head")
        assert checkpoint.digest("lm_head")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_errors_name_the_module_and_its_file(tmp_path: Path, device: str | None) -> None:
    if device is not None:
        pytest.importorskip("torch")
    draft = espalier_draft((Module("a.m", 128, 128, "int8@6"),), ())
    for kind, scale in (("suh", 2000), ("svh", 300)):
        draft[f"a.m.esp_{kind}"] = Tensor("F16", (128,), np.full(128, scale, "<f2").tobytes())
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        with pytest.raises(ScaleOverflowError, match="too large for float16") as overflow:
            checkpoint.decode("a.m", "float16", device) if device else checkpoint.decode("a.m", "float16")
        assert overflow.value.tensor == "a.m"
        assert overflow.value.path == str(checkpoint.modules["a.m"].trellis.shard.path)


def test_an_exl3_module_decodes_like_the_same_espalier_module(tmp_path: Path) -> None:
    source = exl3_draft([Exl3Module("m", 128, 128, 2.5, "mul1")])
    other = espalier_draft((Module("m", 128, 128, "exl3-mul1@2.5"),), ())
    for kind in ("suh", "svh", "trellis"):
        other[f"m.esp_{kind}"] = source[f"m.{kind}"]
    with open_checkpoint(source.write(tmp_path / "a")) as one, open_checkpoint(other.write(tmp_path / "b")) as two:
        assert one.digest("m") == two.digest("m")
        assert one.decode("m").tobytes() == two.decode("m").tobytes()


def test_known_answers(fixtures: Path) -> None:
    """The codes of exllamav3 itself, bit for bit."""
    with open_checkpoint(fixtures / "exl3" / "kat.safetensors") as checkpoint:
        for name in checkpoint.modules:
            expected = checkpoint.tensor(f"{name}.expect_inner")
            assert checkpoint.codes(name).view(np.uint16).tobytes() == expected.view(np.uint16).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_without_dimensions_on_a_device(tmp_path: Path, dtype: OutputDtype) -> None:
    pytest.importorskip("torch")
    draft = Draft({"model_type": "llama"}, {"model.safetensors": {"a": Tensor("BF16", (), b"\x80\x3f")}})
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        value = checkpoint.decode("a", dtype, device="cpu")
    assert (tuple(value.shape), float(value)) == ((), 1.0)
