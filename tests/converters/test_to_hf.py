"""EXL3 and Espalier to plain weights, on the two checkpoints that exllamav3 wrote.

Expected weights come from the reference decoder in float64, rounded here; exllamav3's own reconstruction is
compared with the decoders elsewhere, within its tolerance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from builders import Tensor, read_safetensors
from hf_models import cast, rounded

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.converters import hf_stream
from espalier_format.converters.to_hf import to_hf
from espalier_format.errors import OutputExistsError
from espalier_format.kernels import reference
from espalier_format.operations.convert import convert_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.converters.hf_config import DtypeChoice

HEAD_ROWS = 320  # vocab_size of both; their heads are stored with 384


def convert_to(source: Path, output: Path, dtype: DtypeChoice = "source", **options: int) -> dict[str, Tensor]:
    """Convert and return the tensors of the one shard."""
    with open_checkpoint(source) as checkpoint:
        to_hf(checkpoint, output, dtype=dtype, **options)
    return read_safetensors(output / "model.safetensors")[0]


@pytest.fixture(scope="session")
def exact_weights(llama_exl3: Path, qmoe_exl3: Path) -> dict[Path, dict[str, np.ndarray]]:
    """The float64 weight (out, in) of every module of both checkpoints."""
    found: dict[Path, dict[str, np.ndarray]] = {}
    for folder, family in ((llama_exl3, "exl3-mcg"), (qmoe_exl3, "exl3-mul1")):
        tensors, _ = read_safetensors(folder / "model.safetensors")
        weights = found[folder] = {}
        for name in tensors:
            if not name.endswith(".trellis"):
                continue
            module = name.removesuffix(".trellis")
            trellis, suh, svh = (tensors[f"{module}.{kind}"].array() for kind in ("trellis", "suh", "svh"))
            codebook = get_codebook(f"{family}@{trellis.shape[2] / 16:g}")
            weight = reference.decode_weight(trellis, suh, svh, codebook, 128, 128).T
            weights[module] = weight[:HEAD_ROWS] if module == "lm_head" else weight
    return found


def expected_tensors(folder: Path, weights: dict[str, np.ndarray], dtype: str) -> dict[str, Tensor]:
    """What must be written: decoded weights and cast plain tensors; q, k, v of the vision tower joined."""
    stored, _ = read_safetensors(folder / "model.safetensors")
    result = {f"{module}.weight": rounded(weight, dtype) for module, weight in weights.items()}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("trellis", "suh", "svh", "mcg", "mul1") and not module.endswith("attn.qkv"):
            result[name] = cast(tensor, dtype)
    for block in [name.removesuffix(".qkv.weight") for name in stored if name.endswith(".attn.qkv.weight")]:
        for kind in ("weight", "bias"):
            parts = [result.pop(f"{block}.{part}_proj.{kind}").array() for part in "qkv"]
            result[f"{block}.qkv.{kind}"] = Tensor.of(np.concatenate(parts), dtype)
    return result


def assert_same(written: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(written) == sorted(expected)
    assert [name for name, tensor in expected.items() if written[name] != tensor] == []


@pytest.mark.parametrize(("dtype", "stored"), [("source", "F16"), ("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_llama_in_every_dtype_is_the_exact_value_rounded_once(
    dtype: DtypeChoice,
    stored: str,
    llama_exl3: Path,
    exact_weights: dict[Path, dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    written = convert_to(llama_exl3, tmp_path / "hf", dtype)
    assert_same(written, expected_tensors(llama_exl3, exact_weights[llama_exl3], stored))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    original = json.loads((llama_exl3 / "config.json").read_text())
    del original["quantization_config"]
    original["dtype"] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[stored]
    assert list(config.items()) == list(original.items())


def test_llama_loads_and_runs(llama_exl3: Path, tmp_path: Path) -> None:
    written = convert_to(llama_exl3, tmp_path / "hf")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert [key for key, found in info.items() if found] == []
    assert {name: held.numpy().tobytes() for name, held in model.state_dict().items()} == {
        name: tensor.data for name, tensor in written.items()
    }
    logits = model(input_ids=torch.arange(16)[None]).logits
    assert logits.shape == (1, 16, HEAD_ROWS)
    assert torch.isfinite(logits).all()


def test_qwen3_5_moe_with_vision_and_mtp(
    qmoe_exl3: Path, exact_weights: dict[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """transformers drops ``mtp.*`` without a word, so of those only the written bytes are checked."""
    written = convert_to(qmoe_exl3, tmp_path / "hf")
    assert_same(written, expected_tensors(qmoe_exl3, exact_weights[qmoe_exl3], "BF16"))
    assert written["model.visual.blocks.1.attn.qkv.weight"].shape == (384, 128)
    assert written["model.language_model.layers.0.mlp.gate.weight"].dtype == "BF16"

    auto = transformers.AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    assert [key for key, found in info.items() if found] == []
    model.save_pretrained(tmp_path / "again")
    again, _ = read_safetensors(tmp_path / "again" / "model.safetensors")
    assert_same(again, {name: tensor for name, tensor in written.items() if not name.startswith("mtp.")})
    assert sum(name.startswith("mtp.") for name in written) == 41
    logits = model(input_ids=torch.arange(16)[None]).logits
    assert logits.shape == (1, 16, HEAD_ROWS)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["llama_exl3", "qmoe_exl3"])
def test_espalier_gives_the_same_bytes_as_the_exl3_it_came_from(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(name)
    convert_checkpoint(source, tmp_path / "espalier", to="espalier")
    convert_checkpoint(source, tmp_path / "direct", to="hf", dtype="source")
    report = convert_checkpoint(tmp_path / "espalier", tmp_path / "round", to="hf", dtype="source")
    direct = {path.name: path.read_bytes() for path in (tmp_path / "direct").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "round").iterdir()} == direct
    assert report.files == tuple(sorted(direct))
    assert report.bytes_written == sum(map(len, direct.values()))
    assert (report.source_format, report.target_format) == ("espalier", "hf")


def test_other_files_are_copied_and_the_description_of_the_quantization_is_not(
    llama_exl3: Path, tmp_path: Path
) -> None:
    convert_to(llama_exl3, tmp_path / "hf")
    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    made = {"config.json", "espalier_manifest.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == copied | made
    for name in copied:
        assert (tmp_path / "hf" / name).read_bytes() == (llama_exl3 / name).read_bytes()


def test_shards_are_cut_at_the_limit_and_listed_in_an_index(qmoe_exl3: Path, tmp_path: Path) -> None:
    whole = convert_to(qmoe_exl3, tmp_path / "one")
    with open_checkpoint(qmoe_exl3) as checkpoint:
        report = to_hf(checkpoint, tmp_path / "many", max_shard_bytes=3_000_000)
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert names == [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]
    assert set(names) < set(report.files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name in names:
        tensors, metadata = read_safetensors(tmp_path / "many" / name)
        assert metadata == {"format": "pt"}
        assert sum(len(tensor.data) for tensor in tensors.values()) <= 3_000_000
        assert {tensor for tensor, shard in index["weight_map"].items() if shard == name} == tensors.keys()
        found |= tensors
    assert list(found) == list(whole)
    assert found == whole
    assert index["metadata"] == {"total_size": sum(len(tensor.data) for tensor in whole.values())}
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def test_result_does_not_depend_on_threads_or_block_size(
    llama_exl3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert_to(llama_exl3, tmp_path / "a", threads=1)
    monkeypatch.setattr(hf_stream, "BLOCK_BYTES", 1)  # one rotation block at a time
    monkeypatch.setattr(hf_stream, "CHUNK_BYTES", 1000)
    assert convert_to(llama_exl3, tmp_path / "b", threads=3) == whole


class Recorder:
    """A progress that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.seen = 0

    def start(self, total_bytes: int, label: str) -> None:
        self.calls.append((total_bytes, label))

    def advance(self, n_bytes: int) -> None:
        assert n_bytes >= 0
        self.seen += n_bytes

    def finish(self) -> None:
        self.calls.append("finish")


def test_progress_adds_up_to_its_total(llama_exl3: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    with open_checkpoint(llama_exl3) as checkpoint:
        to_hf(checkpoint, tmp_path / "hf", progress=recorder)
    (total, label), end = recorder.calls
    tensors, _ = read_safetensors(tmp_path / "hf" / "model.safetensors")
    assert recorder.seen == total == sum(len(tensor.data) for tensor in tensors.values())
    assert (label, end) == ("to Hugging Face", "finish")


def test_an_earlier_output_is_replaced_with_force_only(llama_exl3: Path, tmp_path: Path) -> None:
    first = convert_to(llama_exl3, tmp_path / "hf", "bf16")
    with open_checkpoint(llama_exl3) as checkpoint:
        with pytest.raises(OutputExistsError):
            to_hf(checkpoint, tmp_path / "hf")
        assert read_safetensors(tmp_path / "hf" / "model.safetensors")[0] == first
        to_hf(checkpoint, tmp_path / "hf", force=True)
    assert read_safetensors(tmp_path / "hf" / "model.safetensors")[0]["lm_head.weight"].dtype == "F16"


WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "numba"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
from espalier_format.operations.convert import convert_checkpoint
print(convert_checkpoint(sys.argv[1], sys.argv[2], to="hf", dtype="bf16").modules)
"""


def test_needs_neither_torch_nor_transformers_nor_numba(llama_exl3: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT, str(llama_exl3), str(tmp_path / "without")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "15\n"
    assert read_safetensors(tmp_path / "without" / "model.safetensors")[0] == convert_to(
        llama_exl3, tmp_path / "with", "bf16"
    )
