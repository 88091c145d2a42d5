"""``inspect_checkpoint`` against figures added up from the files by other means.

Expected numbers come from safetensors headers read with json alone, from the builders' own sums, or are worked out
by hand; nothing is taken from the package's reader. How a report is printed is tests/cli's business.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from builders import (
    DEFAULT_BANKS,
    DEFAULT_MODULES,
    Exl3Module,
    Module,
    average_bits,
    bits_of_modules,
    espalier_draft,
    exl3_draft,
)

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import MissingFileError, SourceError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.inspect_report import ComponentReport, InspectReport, Storage
from espalier_format.operations.module_groups import groups_of_config, groups_of_modules


def component(report: InspectReport, name: str) -> ComponentReport:
    return next(part for part in report.components if part.name == name)


def header_of(path: Path) -> dict[str, dict[str, object]]:
    data = path.read_bytes()
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    header.pop("__metadata__", None)
    return header


def tensor_bytes(folder: Path) -> int:
    total = 0
    for shard in folder.glob("*.safetensors"):
        for entry in header_of(shard).values():
            begin, end = entry["data_offsets"]  # type: ignore[misc]
            total += end - begin  # type: ignore[has-type]
    return total


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the builders' Espalier checkpoint: all kinds of rotation, a mixed bank with one plain expert."""
    return espalier_draft().write(tmp_path_factory.mktemp("inspect") / "espalier")


@pytest.fixture(scope="module")
def qmoe_espalier(qmoe_exl3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the fixture with experts, vision and MTP."""
    destination = tmp_path_factory.mktemp("inspect") / "qmoe"
    convert_checkpoint(qmoe_exl3, destination, to="espalier")
    return destination


def test_llama_as_known(llama_exl3: Path) -> None:
    """Sizes by the config; the head's vocabulary of 320 is padded to 384."""
    report = inspect_checkpoint(llama_exl3)
    config = json.loads((llama_exl3 / "config.json").read_text())
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    assert (report.format, report.format_version, report.quant_method) == ("exl3", None, "exl3")
    assert (report.architecture, report.model_type) == ("LlamaForCausalLM", "llama")
    assert report.producer == "exllamav3 1.6.5"
    assert report.bits == 3.0
    assert report.head_bits == round(6 * 384 / 320, 6)
    head = component(report, "head").quantized
    assert (head.modules, head.weights) == (1, hidden * vocabulary)
    assert head.code_bytes == hidden * 384 * 6 // 8
    assert head.scale_bytes == 2 * (hidden + 384)
    assert component(report, "embeddings").plain.weights == hidden * vocabulary
    assert {part.name for part in report.total.storage} == {"exl3-mcg@3", "exl3-mcg@6", "F16"}
    assert report.padded_modules == ()
    assert report.expert_banks == ()


@pytest.mark.parametrize("which", ["llama_exl3", "qmoe_exl3", "qmoe_espalier", "synthetic"])
def test_every_byte_is_counted_once(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    report = inspect_checkpoint(folder)
    assert report.total.bytes == tensor_bytes(folder) == sum(part.bytes for part in report.components)
    assert sum(part.quantized.tensors + part.plain.tensors for part in report.components) == sum(
        len(header_of(shard)) for shard in folder.glob("*.safetensors")
    )
    assert {file.name: file.size for file in report.files} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }


@pytest.mark.parametrize("which", ["llama_exl3", "qmoe_exl3", "qmoe_espalier", "synthetic"])
def test_average_is_that_of_the_format(which: str, request: pytest.FixtureRequest) -> None:
    """The figure shown is the figure that ``bits`` of a config must state."""
    folder: Path = request.getfixturevalue(which)
    report = inspect_checkpoint(folder)
    with open_checkpoint(folder) as checkpoint:
        expected = bits_of_modules(checkpoint.modules.values())
    assert (report.bits, report.head_bits) == expected


def test_synthetic_components(synthetic: Path) -> None:
    report = inspect_checkpoint(synthetic)
    assert (report.bits, report.head_bits) == average_bits(DEFAULT_MODULES, DEFAULT_BANKS)
    assert (report.stated_bits, report.stated_head_bits) == (report.bits, report.head_bits)
    assert (report.format, report.format_version, report.producer) == ("espalier", 1, "builders 1")
    experts = component(report, "experts")
    # Experts 0, 1 and 3 are quantized with e2m1@1, e2m1@2 and int5@3, in two projections of 96 x 64.
    assert [(part.name, part.modules, part.weights, part.bits) for part in experts.storage if part.quantized] == [
        ("e2m1@1", 2, 2 * 96 * 64, 1.0),
        ("e2m1@2", 2, 2 * 96 * 64, 2.0),
        ("int5@3", 2, 2 * 96 * 64, 3.0),
    ]
    assert experts.plain == Storage("plain", False, 0, 2, 2 * 96 * 64, 2 * 2 * 96 * 64, 0)
    assert experts.quantized.scale_bytes == 6 * 2 * (96 + 64)
    attention = component(report, "attention")
    # q: 96 x 64 unpadded at 4 bits; o: 64 x 90, its 90 padded to 128 at 2.5 bits. The bias of q is BF16.
    assert [(part.name, part.bits) for part in attention.storage] == [
        ("exl3-mul1@2.5", round(2.5 * 128 / 90, 6)),
        ("int6@4", 4.0),
        ("BF16", 16.0),
    ]
    assert attention.plain.weights == 64
    assert component(report, "head").plain.weights == 150


def test_expert_widths(synthetic: Path, qmoe_exl3: Path, qmoe_espalier: Path) -> None:
    once = {"1": 1, "2": 1, "3": 1, "plain": 1}
    report = inspect_checkpoint(synthetic)
    assert report.expert_widths == {"experts": {"gate_proj": once, "down_proj": once}}
    assert [list(counts) for counts in report.expert_banks[0].widths.values()] == [list(once)] * 2
    expected = {
        "experts": {name: {"2.5": 32} for name in ("gate_proj", "up_proj", "down_proj")},
        "mtp": {name: {"3": 8} for name in ("gate_proj", "up_proj", "down_proj")},
    }
    for folder in (qmoe_exl3, qmoe_espalier):
        report = inspect_checkpoint(folder)
        assert report.expert_widths == expected
        assert [bank.num_experts for bank in report.expert_banks] == [8] * 5


@pytest.mark.parametrize("which", ["qmoe_espalier", "synthetic"])
def test_sums_from_the_config_are_those_from_the_tensors(which: str, request: pytest.FixtureRequest) -> None:
    """The fast path for Espalier gives what adding up the modules gives."""

    def totals(groups: object) -> dict[tuple[object, str], list[int]]:
        found: dict[tuple[object, str], list[int]] = {}
        for group in groups:  # type: ignore[attr-defined]
            entry = found.setdefault((group.component, group.codebook.name), [0] * 6)
            found[group.component, group.codebook.name] = [a + b for a, b in zip(entry, group.numbers, strict=True)]
        return found

    with open_checkpoint(request.getfixturevalue(which)) as checkpoint:
        assert checkpoint.quantization is not None
        fast = totals(groups_of_config(checkpoint.quantization))
        assert fast == totals(groups_of_modules(checkpoint.modules.values()))
        assert sum(entry[0] for entry in fast.values()) == len(checkpoint.modules)


def test_unknown_sizes_are_named(tmp_path: Path) -> None:
    folder = exl3_draft([Exl3Module("mystery.widget", 100, 100), Exl3Module("mystery.gadget", 128, 256)]).write(
        tmp_path / "exl3"
    )
    report = inspect_checkpoint(folder)
    assert set(report.padded_modules) == {"mystery.widget", "mystery.gadget"}
    assert report.warnings
    back = tmp_path / "espalier"
    convert_checkpoint(folder, back, to="espalier")
    assert set(inspect_checkpoint(back).padded_modules) == {"mystery.widget", "mystery.gadget"}


def test_padding_is_explained(llama_exl3: Path, tmp_path: Path) -> None:
    """Bits above those of the codebook have a reason, which the report gives; without padding it says nothing."""
    assert inspect_checkpoint(llama_exl3).padding_note == (
        "bits count stored padding: lm_head is stored as 384 outputs for 320"
    )
    draft = espalier_draft([Module("model.layers.0.mlp.up_proj", 100, 130, "e2m1@1", (128, 64))], ())
    assert inspect_checkpoint(draft.write(tmp_path / "both")).padding_note == (
        "bits count stored padding: model.layers.0.mlp.up_proj is stored as 128 inputs for 100 and 192 outputs for 130"
    )
    draft = espalier_draft([Module("lm_head", 128, 64, "e2m1@1", (128, 64))], ())
    assert inspect_checkpoint(draft.write(tmp_path / "none")).padding_note is None


def test_plain_checkpoint_of_another_method(fixtures: Path, tmp_path: Path) -> None:
    shard = next((fixtures / "compressed-tensors").glob("w4a16_g128_sym.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(shard.read_bytes())
    config = {"architectures": [7], "quantization_config": {"quant_method": "quark", "bits": float("inf")}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_checkpoint(tmp_path)
    assert (report.format, report.quant_method) == ("plain", "quark")
    assert (report.architecture, report.bits, report.head_bits, report.stated_bits) == (None, None, None, None)
    assert report.total.quantized.modules == 0
    assert report.total.bytes == tensor_bytes(tmp_path)


def test_lone_shard_stands_for_itself(qmoe_exl3: Path) -> None:
    """Nothing else in its folder belongs to it, and without a config fewer true sizes are known."""
    report = inspect_checkpoint(qmoe_exl3 / "model.safetensors")
    assert [file.name for file in report.files] == ["model.safetensors"]
    assert (report.format, report.architecture) == ("exl3", None)
    assert report.total.bytes == tensor_bytes(qmoe_exl3)


def test_lone_espalier_shard_is_refused(qmoe_espalier: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json"):
        inspect_checkpoint(qmoe_espalier / "model.safetensors")


def test_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        inspect_checkpoint(tmp_path)


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """A hole of 64 GiB, which would take minutes to read and not fit the memory of most machines."""
    size = 64 << 30
    header = json.dumps({"big.weight": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert inspect_checkpoint(tmp_path).total.plain.weights == size // 2
