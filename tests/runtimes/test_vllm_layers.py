"""How modules of a checkpoint become layers of vLLM's models: names, parts, checks. None of it needs vLLM."""

from __future__ import annotations

import copy
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from builders import DEFAULT_BANKS, DEFAULT_MODULES, Draft, espalier_draft

from espalier_format.errors import (
    DigestError,
    IndexMismatchError,
    MissingTensorError,
    ShapeError,
    SourceError,
    UsageError,
)
from espalier_format.runtimes.tensor_parallel import FeatureRange
from espalier_format.runtimes.vllm import register
from espalier_format.runtimes.vllm.completeness import check_folder
from espalier_format.runtimes.vllm.folder_check import FolderCheck
from espalier_format.runtimes.vllm.layer_names import LayerNames, constituents
from espalier_format.runtimes.vllm.layer_parts import LayerShape, layer_parts, output_ranges, part_of_shard
from espalier_format.schema.config import ModuleSpec, parse_quantization_config
from espalier_format.schema.expert_bank import Rotation


class Prefixes:
    """A mapper as vLLM's documentation describes it: tensors whose names begin with a key get another beginning."""

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = prefixes

    def apply_dict(self, values: dict[str, str]) -> Mapping[str, str]:
        return {self._renamed(name): value for name, value in values.items()}

    def _renamed(self, name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in self._prefixes.items() if name.startswith(old)), name)


def _module(out_features: int, in_features: int = 128, block: int = 32, source: str = "exact") -> ModuleSpec:
    rotation = Rotation.model_validate({"in": block, "out": block})
    return ModuleSpec(
        codebook="e2m1@2", in_features=in_features, out_features=out_features, rotation=rotation, size_source=source
    )


def test_a_vllm_that_does_not_fit_runs_other_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls every plugin before it loads any model, and lets its exceptions through."""
    monkeypatch.delitem(sys.modules, "espalier_format.runtimes.vllm.config", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization", None)
    register()
    assert "Espalier checkpoints cannot be loaded" in caplog.text


def test_the_entry_point_names_the_function() -> None:
    """As pyproject.toml states it; whether it is installed is another matter."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"espalier": f"{register.__module__}:{register.__name__}"}


def test_names_follow_the_mappers() -> None:
    """One mapper after the other, as of a model with vision that contains a text model; "lm_head." ends with a dot."""
    layer = "model.language_model.layers.0"
    names = LayerNames(["lm_head", "mtp.fc", f"{layer}.mlp.up_proj"], [f"{layer}.mlp.experts"])
    names.rename(Prefixes({"lm_head.": "text.lm_head.", "model.language_model.": "text.model."}))
    names.rename(Prefixes({"model.language_model.": "model."}))
    assert names.module("text.model.layers.0.mlp.up_proj") == f"{layer}.mlp.up_proj"
    assert names.module("text.lm_head") == "lm_head"
    assert names.module("mtp.fc") == "mtp.fc"
    assert names.module(f"{layer}.mlp.up_proj") is None
    assert names.bank("text.model.layers.0.mlp.experts") == f"{layer}.mlp.experts"
    assert names.bank("text.model.layers.0.mlp.experts.routed_experts") == f"{layer}.mlp.experts"
    assert names.within("text.model.layers.0.mlp") == f"{layer}.mlp.up_proj"
    assert names.within("text.model.layers.0.ml") is None


def test_constituents_of_a_merged_layer() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert constituents("a.0.qkv_proj", packed) == ("a.0.q_proj", "a.0.k_proj", "a.0.v_proj")
    assert constituents("a.0.o_proj", packed) == ("a.0.o_proj",)


def test_query_key_value_over_two_ranks() -> None:
    """Queries are split, key and value heads too."""
    modules = {"q": _module(256), "k": _module(128, block=64), "v": None}
    parts = layer_parts(modules, LayerShape(128, 128, (128, 64, 64), rank=1, world=2))
    assert [part.slice.outputs if part.slice else None for part in parts] == [
        (FeatureRange(128, 256),),
        (FeatureRange(64, 128),),
        None,
    ]
    assert [part_of_shard(parts, shard) for shard in ("q", "k", "v")] == [0, 1, 2]


def test_key_heads_that_ranks_share() -> None:
    """Four ranks and two key heads of 64: ranks 2 and 3 hold the second."""
    held = []
    for rank in range(4):
        parts = layer_parts(
            {"q": _module(512), "k": _module(128), "v": _module(128)}, LayerShape(128, 128, (128, 64, 64), rank, 4)
        )
        held.append(parts[1].slice.outputs[0].start if parts[1].slice else None)
    assert held == [0, 0, 64, 64]


def test_one_module_for_several_partitions() -> None:
    """Linear attention: in_proj_qkv fills three partitions; of each, a rank holds its share."""
    shape = LayerShape(128, 128, (64, 64, 128, 128), rank=1, world=2)
    qkv, z = layer_parts({"in_proj_qkv": _module(512), "in_proj_z": _module(256)}, shape)
    assert (qkv.partitions, z.partitions) == ((0, 1, 2), (3,))
    assert qkv.slice is not None
    assert qkv.slice.outputs == (FeatureRange(64, 128), FeatureRange(192, 256), FeatureRange(384, 512))
    assert qkv.slice.svh == ((64, 128), (192, 256), (384, 512))
    assert part_of_shard((qkv, z), (0, 1, 2)) == 0
    assert part_of_shard((qkv, z), 3) == 1


def test_a_module_that_is_fused_in_the_checkpoint() -> None:
    (part,) = layer_parts({"qkv_proj": _module(512)}, LayerShape(128, 128, (128, 64, 64), rank=0, world=2))
    assert part.slice is not None
    assert part.slice.outputs == (FeatureRange(0, 128), FeatureRange(256, 320), FeatureRange(384, 448))
    assert part_of_shard((part,), None) == 0


def test_a_slice_of_the_inputs() -> None:
    (part,) = layer_parts({"down_proj": _module(96, 256)}, LayerShape(256, 128, (96,), rank=1, world=2))
    assert part.slice is not None
    assert part.slice.inputs == FeatureRange(128, 256)
    assert part.slice.suh == ((128, 256),)


def test_sizes_that_only_the_model_knows() -> None:
    """Stored at 128 and 256: the model says 100 and 250."""
    (part,) = layer_parts({"model.up": _module(256, 128, 128, "padded")}, LayerShape(100, 100, (250,), rank=0, world=1))
    assert part.slice is not None
    assert (part.slice.in_features, part.slice.out_features) == (100, 250)
    with pytest.raises(ShapeError, match=r"model\.up: the module has another size"):
        layer_parts({"model.up": _module(256, 128, 128, "padded")}, LayerShape(100, 100, (100,), rank=0, world=1))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (_module(128), LayerShape(128, 128, (96,), 0, 1)),
        (_module(128), LayerShape(96, 96, (128,), 0, 1)),
        (_module(128), LayerShape(128, 128, (64,), 0, 1)),
        (_module(192), LayerShape(128, 128, (64,), 0, 4)),
    ],
)
def test_another_size(spec: ModuleSpec, shape: LayerShape) -> None:
    with pytest.raises(ShapeError, match=r"model\.up: the module has another size"):
        layer_parts({"model.up": spec}, shape)


def test_a_cut_names_the_module() -> None:
    with pytest.raises(UsageError, match=r"^model\.o_proj: a rank would hold 0 to 96 of the 192 in_features"):
        layer_parts({"model.o_proj": _module(128, 192, 64)}, LayerShape(192, 96, (128,), 0, 2))


def test_a_shard_that_is_not_there() -> None:
    parts = layer_parts({"a": _module(64), "b": _module(64)}, LayerShape(128, 128, (64, 64), 0, 1))
    for shard in (2, "w1", None):
        with pytest.raises(UsageError):
            part_of_shard(parts, shard)


def test_a_plain_weight_of_another_size() -> None:
    shape = LayerShape(128, 128, (64, 32), 0, 2)
    assert output_ranges((64,), 128, shape) == (FeatureRange(0, 64),)
    assert output_ranges((32,), 32, shape) == (FeatureRange(0, 32),)
    for sizes, whole in (((64,), 96), ((64, 32), 96), ((64,), 256)):
        with pytest.raises(ShapeError):
            output_ranges(sizes, whole, shape)


def test_a_complete_folder(tmp_path: Path) -> None:
    """The modules with a bias are told: vLLM leaves out a bias that its model does not have."""
    draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
    found = check_folder(draft.write(tmp_path), parse_quantization_config(draft.block))
    assert found == {"model.layers.0.self_attn.q_proj", "lm_head"}


def test_folders_that_are_not_complete(tmp_path: Path) -> None:
    draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
    config = parse_quantization_config(draft.block)
    other = espalier_draft(DEFAULT_MODULES[:1], [])
    with pytest.raises(SourceError, match="differ"):
        check_folder(other.write(tmp_path / "other"), config)
    name = "model.layers.0.mlp.experts.3.down_proj.esp_svh"
    del draft[name]
    with pytest.raises(MissingTensorError, match=name):
        check_folder(draft.write(tmp_path / "missing"), config)


def test_only_shards_must_have_the_size_in_the_manifest(tmp_path: Path) -> None:
    draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
    config = parse_quantization_config(draft.block)
    folder = draft.write(tmp_path)
    shard = next(folder.glob("*.safetensors"))

    def manifest(name: str, size: int) -> None:
        (folder / "espalier_manifest.json").write_text(
            '{"manifest_version": 1, "producer": {"name": "t", "version": "1"}, "decode_digests": {}, "files": '
            f'{{"{name}": {{"size": {size}, "sha256": "{"0" * 64}", "git_blob_sha1": "{"0" * 40}"}}}}}}'
        )

    manifest("config.json", 1)
    check_folder(folder, config)
    manifest(shard.name, shard.stat().st_size)
    check_folder(folder, config)
    manifest(shard.name, shard.stat().st_size + 1)
    with pytest.raises(DigestError, match=r"size differs from the manifest"):
        check_folder(folder, config)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _download(draft: Draft, cache: Path, reference: str = "main") -> Path:
    """As huggingface_hub stores the repository "someone/model": files of a commit, and which commit a branch is."""
    repository = cache / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / reference).write_text(COMMIT)
    return draft.write(repository / "snapshots" / COMMIT)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_model_from_the_hub_is_checked_after_the_download(tmp_path: Path, revision: str | None) -> None:
    """Before, nothing is there. The check is the one of a local folder, and is made once."""
    pytest.importorskip("huggingface_hub")
    draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
    check = FolderCheck(parse_quantization_config(draft.block))
    check.before_loading("someone/model", revision)
    check.will_load(str(tmp_path), loads=True)
    folder = _download(draft, tmp_path)
    biases = {"model.layers.0.self_attn.q_proj", "lm_head"}
    assert check.after_loading() == biases
    next(folder.glob("*.safetensors")).unlink()
    assert check.after_loading() == biases


def test_a_model_from_the_hub_that_is_not_complete(tmp_path: Path) -> None:
    """A quantized tensor that config.json names, and a norm that only the index names and no layer here looks at."""
    pytest.importorskip("huggingface_hub")
    for number, (name, error) in enumerate(
        (("lm_head.esp_suh", MissingTensorError), ("model.norm.weight", IndexMismatchError))
    ):
        draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
        config = parse_quantization_config(draft.block)
        if error is IndexMismatchError:
            draft.index = copy.deepcopy(draft.right_index())
        del draft[name]
        cache = tmp_path / str(number)
        _download(draft, cache, "release")
        check = FolderCheck(config)
        check.before_loading("someone/model", "release")
        check.will_load(str(cache), loads=True)
        with pytest.raises(error, match=name):
            check.after_loading()


@pytest.mark.parametrize("address", ["someone/model", "s3://bucket/model/of/someone"])
def test_a_download_that_is_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str) -> None:
    """Said once, not passed over."""
    pytest.importorskip("huggingface_hub")
    check = FolderCheck(parse_quantization_config(espalier_draft().block))
    check.before_loading(address, None)
    check.will_load(str(tmp_path), loads=True)
    assert check.after_loading() is None
    assert check.after_loading() is None
    assert [record.getMessage().startswith(f"{address}: its files were not found") for record in caplog.records] == [
        True
    ]


def test_dummy_weights_need_no_download(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = FolderCheck(parse_quantization_config(espalier_draft().block))
    check.before_loading("someone/model", None)
    check.will_load(str(tmp_path), loads=False)
    assert check.after_loading() is None
    assert not caplog.records


def test_a_local_folder_is_checked_before(tmp_path: Path) -> None:
    draft = espalier_draft(DEFAULT_MODULES, DEFAULT_BANKS)
    check = FolderCheck(parse_quantization_config(draft.block))
    check.before_loading(str(draft.write(tmp_path / "right")), None)
    assert check.after_loading() == {"model.layers.0.self_attn.q_proj", "lm_head"}
    del draft["lm_head.esp_suh"]
    with pytest.raises(MissingTensorError, match=r"lm_head\.esp_suh"):
        check.before_loading(str(draft.write(tmp_path / "wrong")), None)
