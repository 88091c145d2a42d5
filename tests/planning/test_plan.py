"""What a plan says a checkpoint holds, against the headers of checkpoints that hold it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import Bank, Module, espalier_draft, read_safetensors

import espalier_format
from espalier_format.errors import (
    CodebookError,
    FormatVersionError,
    MissingFileError,
    SchemaError,
    SourceError,
    UsageError,
)
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.planning import Plan, plan, usual_parallelism
from espalier_format.schema import parse_quantization_config

MODULES = (
    Module("model.layers.0.self_attn.q_proj", 96, 80, "int5@3", (32, 0)),
    Module("model.layers.0.mlp.down_proj", 130, 250, "exl3-mcg@4", (128, 256)),
    Module("lm_head", 96, 90, "int8@6", (64, 32)),
)
BANKS = (
    Bank(
        "model.layers.0.mlp.experts",
        {"gate_proj": (96, 48), "down_proj": (48, 96)},
        ("e2m1@1", "e2m1@2", "int5@3"),
        "0120-210",
        (32, 32),
    ),
)


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of the tensors of quantized modules, as the test's own reader finds them."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in folder.glob("*.safetensors"):
        tensors, _ = read_safetensors(shard)
        found |= {name: (held.dtype, held.shape) for name, held in tensors.items() if ".esp_" in name}
    return found


def planned(made: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in made.tensors()}


@pytest.fixture(params=["llama", "qmoe", "mixed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "mixed":
        return espalier_draft(MODULES, BANKS, num_shards=2).write(tmp_path / "espalier")
    convert_checkpoint(request.getfixturevalue(f"{request.param}_exl3"), tmp_path / "espalier", to="espalier")
    return tmp_path / "espalier"


def test_it_plans_the_tensors_that_the_headers_hold(folder: Path) -> None:
    made = espalier_format.plan(folder)
    expected = headers(folder)
    assert planned(made) == expected
    sizes = {"I16": 2, "F16": 2}
    total = 0
    for dtype, shape in expected.values():
        count = sizes[dtype]
        for extent in shape:
            count *= extent
        total += count
    assert made.nbytes == total == sum(tensor.nbytes for tensor in made.tensors())
    assert total == sum(module.nbytes for module in made.modules.values())


def test_it_says_of_each_module_what_an_open_checkpoint_says(folder: Path) -> None:
    made = espalier_format.plan(folder)
    with espalier_format.open_checkpoint(folder) as checkpoint:
        assert made.modules.keys() == checkpoint.modules.keys()
        for name, module in checkpoint.modules.items():
            found = made.modules[name]
            assert (found.name, found.codebook) == (name, module.codebook)
            assert (found.in_features, found.out_features) == (module.in_features, module.out_features)
            assert (found.rotation_in, found.rotation_out) == module.rotation
            assert (found.size_source, found.component) == (module.size_source, module.component)
            assert found.weights == module.weights
        assert made.weights == sum(module.weights for module in checkpoint.modules.values())
        assert made.codebooks == tuple(sorted({module.codebook.name for module in checkpoint.modules.values()}))
        views = {
            name: {key: tuple(experts) for key, experts in view.projections.items()}
            for name, view in checkpoint.expert_banks.items()
        }
    found = {
        name: {
            key: tuple(None if expert is None else expert.name for expert in projection.experts)
            for key, projection in bank.projections.items()
        }
        for name, bank in made.banks.items()
    }
    assert found == views


def test_a_bank_of_mixed_width() -> None:
    bank = plan(espalier_draft(MODULES, BANKS).config or {}).banks["model.layers.0.mlp.experts"]
    gate = bank.projections["gate_proj"]
    assert (bank.num_experts, len(gate.experts), gate.plain_experts) == (8, 8, (4,))
    assert gate.codebooks == ("e2m1@1", "e2m1@2", "int5@3")
    tile = {"0": 16, "1": 32, "2": 48, "-": 0}  # halfwords
    # 48 outputs fill two blocks of 32
    halfwords = sum((96 // 16) * (64 // 16) * tile[character] for character in "0120-210")
    assert gate.nbytes == 2 * halfwords + 7 * 2 * (96 + 64)
    assert bank.nbytes == sum(projection.nbytes for projection in bank.projections.values())


def test_a_plan_is_where_the_kernels_operand_holds_the_experts() -> None:
    """Sizes that are no multiples of 64 halfwords, a plain expert, and projections in another order than the bank's."""
    torch = pytest.importorskip("torch")
    from espalier_format.kernels.expert_bank import ExpertBankOperand

    sizes = {"down_proj": (48, 48), "gate_proj": (48, 48), "up_proj": (48, 48)}
    banks = (Bank("model.layers.0.mlp.experts", sizes, ("e2m1@1", "int5@3"), "00-1", (0, 0)),)
    bank = plan(espalier_draft((), banks).config or {}).banks["model.layers.0.mlp.experts"]
    experts = {
        name: [
            torch.zeros(48, 48)
            if expert is None
            else (
                torch.full(expert.trellis_shape, number + 1, dtype=torch.int16),
                torch.ones(48, dtype=torch.float16),
                torch.ones(48, dtype=torch.float16),
                expert.codebook,
            )
            for number, expert in enumerate(projection.experts)
        ]
        for name, projection in bank.projections.items()
    }
    rotations = dict.fromkeys(experts, (0, 0))
    operand = ExpertBankOperand.from_experts(experts, hidden=48, intermediate=48, rotations=rotations)
    assert list(bank.trellis_offsets) == ["gate_proj", "up_proj", "down_proj"]
    assert [list(starts) for starts in bank.trellis_offsets.values()] == operand.offsets.tolist()
    assert bank.trellis_halfwords == operand.trellis.numel()
    assert bank.trellis_offsets["gate_proj"] == (0, 192, -1, 384)
    for name, starts in bank.trellis_offsets.items():
        for number, expert in enumerate(bank.projections[name].experts):
            if expert is not None:
                size = math.prod(expert.trellis_shape)
                assert bool((operand.trellis[starts[number] : starts[number] + size] == number + 1).all())


def test_the_offsets_need_no_torch() -> None:
    code = "import sys, espalier_format.planning; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_is_enough(tmp_path: Path) -> None:
    """In any form, and without a shard beside it."""
    draft = espalier_draft(MODULES, BANKS)
    assert draft.config is not None
    (tmp_path / "config.json").write_text(json.dumps(draft.config))
    expected = plan(draft.config)
    for form in (tmp_path, str(tmp_path), draft.block, parse_quantization_config(draft.block)):
        assert plan(form) == expected
    assert expected.ignore == tuple(draft.block["ignore"])


def test_what_is_refused(tmp_path: Path, llama_exl3: Path) -> None:
    draft = espalier_draft(MODULES, BANKS)
    wrong = {**draft.block, "format_version": 2}
    with pytest.raises(FormatVersionError):
        plan({"quantization_config": wrong})
    with pytest.raises(SourceError, match="exl3"):
        plan(llama_exl3)
    with pytest.raises(SchemaError, match="there is no quantization_config"):
        plan({"model_type": "llama"})
    with pytest.raises(SchemaError):
        plan({"quantization_config": 1})
    with pytest.raises(MissingFileError):
        plan(tmp_path)
    with pytest.raises(MissingFileError):
        plan(tmp_path / "nowhere")
    draft.block["codebooks"]["int5@3"]["multiplier"] = "0x00000001"
    with pytest.raises(CodebookError):
        plan(draft.config or {})


def test_a_plan_cannot_be_changed() -> None:
    made: Any = plan(espalier_draft(MODULES, BANKS).config or {})
    with pytest.raises(AttributeError):
        made.ignore = ()
    with pytest.raises(TypeError):
        made.modules["x"] = None
    with pytest.raises(TypeError):
        made.banks["model.layers.0.mlp.experts"].projections["x"] = None
    with pytest.raises(AttributeError):
        next(iter(made.modules.values())).in_features = 1


def test_as_many_modules_as_large_models_have() -> None:
    config = espalier_draft(MODULES, BANKS).block
    spec = {"in_features": 2048, "out_features": 512, "rotation": {"in": 128, "out": 128}, "size_source": "exact"}
    projection = {**spec, "codebooks": ["e2m1@1", "e2m1@2"], "assignment": "01" * 128}
    names = ("gate_proj", "up_proj", "down_proj")
    for layer in range(1, 120):
        config["expert_banks"][f"model.layers.{layer}.mlp.experts"] = {
            "num_experts": 256,
            "projections": dict.fromkeys(names, projection),
        }
    made = plan(config)
    assert len(made.modules) == 3 + 7 * 2 + 119 * 256 * 3
    tiles = (2048 // 16) * (512 // 16)
    each = 2 * (tiles * 16 + tiles * 32) // 2 + 2 * (2048 + 512)
    assert made.nbytes - plan(espalier_draft(MODULES, BANKS).block).nbytes == 119 * 256 * 3 * each


def test_ranks_share_the_bytes() -> None:
    names = ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "in_proj_qkv")
    modules = [Module(f"model.layers.0.x.{name}", 256, 128, "int5@3", (32, 32)) for name in names]
    bank = Bank("model.layers.0.mlp.experts", {"up_proj": (128, 64)}, ("e2m1@1", "e2m1@2"), "01", (32, 32))
    made = plan(espalier_draft(modules, [bank]).config or {})
    ranks = [made.rank(rank, 2) for rank in range(2)]
    for name, module in made.modules.items():
        kinds = {"o_proj": "row", "down_proj": "row", "in_proj_qkv": "replicated"}
        kind = kinds.get(name.rpartition(".")[2], "column")
        assert usual_parallelism(name) == kind
        whole_suh, whole_svh, whole_trellis = module.tensors
        for rank in ranks:
            suh, svh, trellis = rank.modules[name].tensors
            assert (suh.name, svh.name, trellis.name) == (whole_suh.name, whole_svh.name, whole_trellis.name)
            assert suh.nbytes * (2 if kind == "row" else 1) == whole_suh.nbytes
            assert svh.nbytes * (2 if kind == "column" else 1) == whole_svh.nbytes
            assert trellis.nbytes * (1 if kind == "replicated" else 2) == whole_trellis.nbytes
    for rank in ranks:
        assert rank.nbytes == sum(tensor.nbytes for held in rank.modules.values() for tensor in held.tensors)
    assert made.rank(0, 1).nbytes == made.nbytes
    assert made.rank(1, 2, lambda _name: "replicated").nbytes == made.nbytes


def test_a_split_that_cannot_be_is_refused_with_the_reason() -> None:
    made = plan(espalier_draft([Module("lm_head", 128, 192, "int5@3", (128, 128))], []).config or {})
    with pytest.raises(UsageError, match=r"lm_head: a rank would hold 0 to 96 .* is within a rotation block of 128"):
        made.rank(0, 2)
    with pytest.raises(UsageError, match="lm_head: 192 features cannot be split equally over 5 ranks"):
        made.rank(0, 5)
    with pytest.raises(UsageError, match="no such rank"):
        made.rank(2, 2)
    assert made.rank(1, 2, lambda _name: "replicated").nbytes == made.nbytes


def test_it_loads_no_torch_and_leaves_the_function_where_it_is() -> None:
    script = """if True:
        import sys, espalier_format as ef
        first = ef.plan
        import espalier_format.planning, espalier_format.quantize.plan
        assert callable(first) and ef.plan is first is espalier_format.planning.plan
        assert "torch" not in sys.modules
        """
    subprocess.run([sys.executable, "-c", script], check=True)
