"""Ways to load a checkpoint with transformers: options, the Hub's cache, devices; and the registration."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime_models import LLAMA, QWEN35_MOE, BankRecipe, espalier_model
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import DependencyError, UsageError
from espalier_format.runtimes import transformers as runtime
from espalier_format.runtimes.transformers.experts import QuantizedExperts
from espalier_format.runtimes.transformers.linear import QuantizedLinear

AUTO = transformers.AutoModelForCausalLM
IDS = torch.arange(3, 19)[None]
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers needs accelerate for device_map"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return espalier_model(LLAMA, folder / "source", num_shards=3).write(folder / "espalier")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    draft = espalier_model(QWEN35_MOE, folder / "source", bank=BankRecipe(assignment="-021"))
    return draft.write(folder / "espalier")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_from_pretrained_reports_nothing_unusual(moe: Path) -> None:
    """Not even the vision part, which the text model leaves out and the experts, which are read apart."""
    _, report = AUTO.from_pretrained(moe, output_loading_info=True)
    assert {key: found for key, found in report.items() if found} == {}


@pytest.mark.parametrize("options", [{"low_cpu_mem_usage": True}, {"disable_mmap": True}, {"use_safetensors": True}])
def test_options_that_change_nothing(options: dict[str, Any], moe: Path) -> None:
    plain = logits(runtime.load(moe, dtype=torch.float32))
    assert torch.equal(logits(runtime.load(moe, dtype=torch.float32, **options)), plain)


def test_the_dtype_of_config_json_is_the_default(moe: Path) -> None:
    assert runtime.load(moe).dtype == torch.bfloat16
    assert runtime.load(moe, dtype="float16").dtype == torch.float16


@pytest.mark.capability("transformers", "device_map")
@needs_accelerate
@pytest.mark.parametrize("place", ["cpu", "auto", {"": "cpu"}])
def test_device_map(place: Any, moe: Path) -> None:
    plain = logits(runtime.load(moe, dtype=torch.float32))
    assert torch.equal(logits(runtime.load(moe, dtype=torch.float32, device_map=place)), plain)


@needs_accelerate
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_layers_on_disk(offload_buffers: bool, llama: Path, moe: Path, tmp_path: Path) -> None:
    """Compressed weights are buffers: they go to the disk only with ``offload_buffers``; experts do not."""
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.1", "lm_head")
    places = {**dict.fromkeys(parts, "cpu"), "model.layers.0": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "disk", "offload_buffers": offload_buffers}
    plain = logits(runtime.load(llama, dtype=torch.float32))
    model = runtime.load(llama, dtype=torch.float32, **options)
    assert (model.model.layers[0].mlp.up_proj.esp_trellis.device.type == "meta") == offload_buffers
    assert torch.equal(logits(model), plain)
    with pytest.raises(UsageError, match="experts cannot be offloaded to disk"):
        runtime.load(moe, dtype=torch.float32, **options)


def compressed(model: Any) -> Any:
    """The first layer of a model whose weights are compressed: experts, or a linear one."""
    kinds = (QuantizedExperts, QuantizedLinear)
    return next(module for kind in kinds for module in model.modules() if isinstance(module, kind))


@needs_accelerate
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_operands_stay_where_hooks_only_move_inputs(name: str, request: pytest.FixtureRequest) -> None:
    """As with a device_map of several GPUs, where accelerate hooks every layer without offloading any."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    model = runtime.load(request.getfixturevalue(name), dtype=torch.float32)
    plain = logits(model)
    layer = compressed(model)
    hooks = {
        "alone": AlignDevicesHook("cpu"),
        "one of several": SequentialHook(AlignDevicesHook("cpu"), AlignDevicesHook("cpu")),
        "with parameters offloaded, of which it has none": AlignDevicesHook("cpu", offload=True),
    }
    for what, hook in hooks.items():
        add_hook_to_module(layer, hook)
        assert torch.equal(logits(model), plain)
        kept = layer.operand()
        assert torch.equal(logits(model), plain)
        assert layer.operand() is kept, what


@needs_accelerate
@pytest.mark.parametrize("several", [False, True])
def test_operands_go_where_tensors_do(several: bool, llama: Path) -> None:
    """What is offloaded is not held, and what moves is not held where it was."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    model = runtime.load(llama, dtype=torch.float32)
    plain = logits(model)
    layer = compressed(model)
    moved = weakref.ref(layer.esp_trellis)
    layer.to("meta")
    assert moved() is None

    model = runtime.load(llama, dtype=torch.float32)
    layer = compressed(model)
    hook = AlignDevicesHook("cpu", offload=True, offload_buffers=True)
    add_hook_to_module(layer, SequentialHook(AlignDevicesHook("cpu"), hook) if several else hook)
    assert torch.equal(logits(model), plain)
    assert layer.esp_trellis.device.type == "meta"
    assert layer._operand is None


def cache(folder: Path, checkpoint: Path) -> Path:
    """Lay the files out as the Hub's client does: links in ``snapshots/<revision>`` to files in ``blobs``."""
    repository, revision = folder / "models--someone--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / revision
    for part in (repository / "refs", repository / "blobs", snapshot):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_from_the_cache_of_the_hub(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    checkpoint: Path = request.getfixturevalue(name)
    snapshot = cache(tmp_path, checkpoint)
    plain = logits(runtime.load(checkpoint, dtype=torch.float32))
    by_id = runtime.load("someone/tiny", dtype=torch.float32, cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(logits(by_id), plain)
    assert torch.equal(logits(runtime.load(snapshot, dtype=torch.float32)), plain)


def test_in_a_subfolder(moe: Path) -> None:
    plain = logits(runtime.load(moe, dtype=torch.float32))
    assert torch.equal(logits(runtime.load(moe.parent, subfolder=moe.name, dtype=torch.float32)), plain)


def test_the_model_without_its_head(llama: Path) -> None:
    """What embeddings are made with; the quantized head has no place in it."""
    model = transformers.AutoModel.from_pretrained(llama, dtype=torch.float32)
    whole = runtime.load(llama, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)


def test_the_config_of_a_loaded_model_is_that_of_the_checkpoint(moe: Path) -> None:
    model = runtime.load(moe)
    with open_checkpoint(moe) as checkpoint:
        block = checkpoint.config["quantization_config"]
    assert model.config.to_dict()["quantization_config"] == block
    assert dict(model.config.quantization_config) == block
    assert model.config.quantization_config.update(bits=3) == {"bits": 3}
    assert '"quant_method": "espalier"' in repr(model.config)


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(runtime) == (0, 14)


def test_registration_may_be_repeated() -> None:
    for _ in range(2):
        importlib.reload(runtime)
    assert AUTO_QUANTIZER_MAPPING["espalier"] is runtime.EspalierQuantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["espalier"] is runtime.EspalierConfig


def test_transformers_has_the_hooks_that_are_used() -> None:
    hooks = {name for name in vars(runtime.EspalierQuantizer) if callable(getattr(HfQuantizer, name, None))}
    assert hooks >= {
        "_process_model_before_weight_loading",
        "_process_model_after_weight_loading",
        "is_serializable",
        "update_dtype",
        "update_device_map",
        "update_weight_conversions",
        "_dequantize",
    }
    assert isinstance(HfQuantizer.is_trainable, property)
    assert HfQuantizer.__abstractmethods__ == {"is_serializable", "is_trainable"}


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
try:
    import espalier_format.runtimes.transformers
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_what_is_not_installed_is_named(module: str) -> None:
    command = [sys.executable, "-c", WITHOUT, module]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.startswith(f"{DependencyError.__name__} ")
    assert module in output
