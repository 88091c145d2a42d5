"""EXL3 to Espalier and back: every tensor bit for bit, every config value, every other file.

Files are compared as bytes, and tensors as the safetensors library reads them, so that nothing rests on the
package's own reader. Not checked here: that exllamav3 loads the result; for what it wrote itself the result is
the same file.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from builders import INDEX, MARKERS, Draft, Exl3Module, Tensor, bf16, exl3_draft, llama_config, llama_modules

from espalier_format.checkpoint import open_checkpoint
from espalier_format.converters.report import ConversionReport
from espalier_format.operations.convert import convert_checkpoint

MANIFEST = "espalier_manifest.json"


def there_and_back(exl3: Path, work: Path) -> tuple[Path, Path, tuple[ConversionReport, ConversionReport]]:
    espalier, back = work / "espalier", work / "back"
    return (
        espalier,
        back,
        (convert_checkpoint(exl3, espalier, to="espalier"), convert_checkpoint(espalier, back, to="exl3")),
    )


def files(folder: Path) -> dict[str, bytes]:
    """All files but our manifest, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def tensors(folder: Path) -> dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Per shard: name to dtype, shape and bytes, read by the safetensors library."""
    return {
        path.name: {
            name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
            for name, entry in safetensors.deserialize(path.read_bytes())
        }
        for path in sorted(folder.glob("*.safetensors"))
    }


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("fixture", ["llama_exl3", "qmoe_exl3"])
def test_checkpoints_of_exllamav3_come_back_byte_for_byte(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(fixture)
    espalier, back, reports = there_and_back(source, tmp_path)
    assert files(back) == files(source)
    assert reports[0].warnings == reports[1].warnings == ()
    stored, original = (
        {name: value for shard in tensors(folder).values() for name, value in shard.items()}
        for folder in (espalier, source)
    )
    renamed = {
        name.replace(".trellis", ".esp_trellis").replace(".suh", ".esp_suh").replace(".svh", ".esp_svh"): value
        for name, value in original.items()
        if not name.endswith((".mcg", ".mul1"))
    }
    assert stored == renamed


# Each scenario makes a checkpoint; a scenario that cannot come back byte for byte says so in the tests below.
HEAD = Exl3Module("lm_head", 192, 90, 6)


def llama(**changes: Any) -> list[Exl3Module]:
    return [Exl3Module(*shape, **changes) for shape in llama_modules()] + [HEAD]


def plain_llama() -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": bf16(rng.normal(size=(90, 192))),
        "model.norm.weight": bf16(rng.normal(size=192)),
    }


def llama_draft(modules: list[Exl3Module] | None = None, *, num_shards: int = 1, **more: Any) -> Draft:
    chosen = llama() if modules is None else modules
    return exl3_draft(chosen, plain_llama(), num_shards=num_shards, config=llama_config(**more))


def experts(widths: list[float | None], *, hidden: int = 192, inner: int = 64, **changes: Any) -> Draft:
    """A layer of experts; None makes a plain one."""
    prefix = "model.layers.0.mlp.experts"
    shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    modules, plain = [], plain_llama()
    for number, bits in enumerate(widths):
        for projection, shape in shapes.items():
            name = f"{prefix}.{number}.{projection}"
            if bits is None:
                plain[f"{name}.weight"] = bf16(np.random.default_rng(number).normal(size=shape[::-1]))
            else:
                modules.append(Exl3Module(name, *shape, bits, "mul1"))
    settings = {"model_type": "qwen3_moe", "moe_intermediate_size": inner, **changes}
    return exl3_draft(modules, plain, config=llama_config(**settings))


def old_style() -> Draft:
    draft = llama_draft()
    for key in ("head_bits", "codebook"):
        del draft.block[key]
    draft.block["version"] = "0.0.1"
    draft.files.clear()
    return draft


def without_block() -> Draft:
    draft = llama_draft()
    assert draft.config is not None
    del draft.config["quantization_config"]
    draft.files.clear()
    return draft


def null_block() -> Draft:
    draft = without_block()
    assert draft.config is not None
    draft.config = {"quantization_config": None, **draft.config}
    return draft


def block_in_the_middle() -> Draft:
    draft = llama_draft()
    assert draft.config is not None
    draft.config = {"first": 1, "quantization_config": draft.block, **draft.config}
    return draft


def tied(top: bool | None, nested: bool | None) -> Draft:
    draft = llama_draft()
    assert draft.config is not None
    if top is not None:
        draft.config["tie_word_embeddings"] = top
    if nested is not None:
        draft.config["text_config"] = {"model_type": "llama", **llama_config(), "tie_word_embeddings": nested}
    return draft


def row_table() -> Draft:
    draft = llama_draft()
    rng = np.random.default_rng(1)
    draft["model.ngram.trellis"] = Tensor.of(rng.integers(0, 9, size=(7, 41)), "I16")
    draft["model.embed_tokens.trellis"] = Tensor.of(rng.integers(0, 9, size=(90, 33)), "I16")
    draft["model.embed_tokens.signs"] = Tensor.of(rng.normal(size=(1, 256)), "F16")
    return draft


def ngram_file(*, listed: bool) -> Draft:
    """exllamav3 does not list the n-gram tables in its index."""
    draft = llama_draft(num_shards=2)
    if not listed:
        draft.index = draft.right_index()
    draft.shards["ngram_embedding.safetensors"] = {
        "model.ngram.trellis": Tensor.of(np.arange(70).reshape(7, 10), "I16"),
        "model.ngram.head_offsets": Tensor.of(np.arange(3), "I64"),
    }
    draft.metadata["ngram_embedding.safetensors"] = {"format": "exl3_ngram_trellis", "K": "4"}
    return draft


def other_files() -> Draft:
    draft = llama_draft()
    draft.files |= {
        "README.md": b"# read me\r\n",
        "tokenizer.json": b"{}",
        "templates/chat/a.jinja": b"\x00\xff",
        "empty.txt": b"",
        "exl3_quantization_config.json": b"taken already",
        "exl3_exl3_quantization_config.json": b"taken too",
    }
    return draft


def storage_that_disagrees() -> Draft:
    draft = llama_draft()
    document = json.loads(draft.files["quantization_config.json"])
    document["tensor_storage"]["lm_head"]["bits_per_weight"] = 3
    document["tensor_storage"]["gone"] = {"stored_tensors": {"gone.trellis": {"shape": [1], "n_bytes": 2}}}
    draft.files["quantization_config.json"] = json.dumps(document).encode()
    return draft


def with_old_noise_in_padding() -> Draft:
    """Before March 2026 svh was not zero in the padding."""
    draft = llama_draft()
    for name in draft.names():
        if name.endswith((".suh", ".svh")):
            noise = np.random.default_rng(7).normal(size=draft[name].shape)
            draft[name] = Tensor.of(noise, "F16")
    return draft


def with_negative_zero_bias() -> Draft:
    draft = llama_draft([Exl3Module(*shape, bias="F16") for shape in llama_modules()])
    name = "model.layers.0.self_attn.k_proj.bias"
    values = draft[name].array().copy()
    values[-1] = -0.0
    draft[name] = Tensor.of(values, "F16")
    return draft


def irregular_sizes() -> Draft:
    draft = experts([2, 2])
    odd = exl3_draft([Exl3Module("model.layers.0.mlp.experts.2.up_proj", 192, 300, 2, "mul1")], {}, storage=False)
    for name in odd.names():
        draft[name] = odd[name]
    return draft


def without_a_projection() -> Draft:
    draft = experts([2, 2, 2])
    for kind in ("suh", "svh", "mul1", "trellis"):
        del draft[f"model.layers.0.mlp.experts.1.up_proj.{kind}"]
    return draft


SCENARIOS: dict[str, Callable[[], Draft]] = {
    "mcg": llama_draft,
    "3inst": lambda: llama_draft(llama(marker=None)),
    "mul1, half-integer": lambda: llama_draft(llama(bits=2.5, marker="mul1")),
    "mixed codebooks and widths": lambda: llama_draft(
        [
            replace(module, bits=bits, marker=marker)
            for module, bits, marker in zip(
                llama(),
                (1, 1.5, 2, 8, 3.5, 5, 6, 7),
                (None, "mul1", "mcg", None, "mul1", "mcg", "mul1", None),
                strict=True,
            )
        ]
    ),
    "packed su and sv": lambda: llama_draft(llama(packed_su=True, packed_sv=True)),
    "packed su only": lambda: llama_draft(llama(packed_su=True)),
    "packed sv only": lambda: llama_draft(llama(packed_sv=True)),
    "padded bias": lambda: llama_draft(llama(bias="F16")),
    "padded F32 bias": lambda: llama_draft(llama(bias="F32")),
    "padded BF16 bias": lambda: llama_draft(llama(bias="BF16")),
    "bias of the true size": lambda: llama_draft(llama(bias="F16", unpadded_bias=True)),
    "-0 in the padding of a bias": with_negative_zero_bias,
    "noise in the padding of scales": with_old_noise_in_padding,
    "several shards": lambda: llama_draft(num_shards=3),
    "no block in config.json": without_block,
    "a null block": null_block,
    "block in the middle": block_in_the_middle,
    "first version": old_style,
    "tied at the top": lambda: tied(top=True, nested=None),
    "tied in text_config": lambda: tied(top=None, nested=True),
    "tied twice": lambda: tied(top=True, nested=True),
    "tied, no head": lambda: llama_draft(llama()[:-1], tie_word_embeddings=True),
    "row tables": row_table,
    "n-gram file": lambda: ngram_file(listed=True),
    "n-gram file that the index leaves out": lambda: ngram_file(listed=False),
    "unknown architecture": lambda: llama_draft(model_type="never-heard-of"),
    "no architecture": lambda: exl3_draft(llama(bias="F16"), plain_llama()),
    "other files": other_files,
    "stale quantization_config.json": storage_that_disagrees,
    "experts of one width": lambda: experts([2, 2, 2, 2]),
    "experts of mixed width": lambda: experts([1, 2.5, 3, 8, 2.5]),
    "plain experts among quantized": lambda: experts([None, 2, None, 3]),
    "experts of different size": irregular_sizes,
    "an expert without one projection": without_a_projection,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_everything_comes_back(scenario: str, tmp_path: Path) -> None:
    source = SCENARIOS[scenario]().write(tmp_path / "exl3")
    _, back, _ = there_and_back(source, tmp_path)
    assert tensors(back) == tensors(source)
    assert files(back) == files(source)
    assert list(config(back).items()) == list(config(source).items())


def test_tensors_of_any_writer_come_back(tmp_path: Path) -> None:
    """Padded header, metadata, shuffled order: no exllamav3 file, so the shard is another one with equal tensors."""
    draft = llama_draft()
    (shard,) = draft.shards.values()
    names = sorted(shard, key=lambda name: name[::-1])
    draft.shards = {"model.safetensors": {name: shard[name] for name in names}}
    draft.pad, draft.metadata = True, {"model.safetensors": {"format": "pt", "made_by": "somebody"}}
    source = draft.write(tmp_path / "exl3")
    _, back, _ = there_and_back(source, tmp_path)
    assert tensors(back) == tensors(source)
    with safetensors.safe_open(back / "model.safetensors", "np") as file:
        assert file.metadata() == {"made_by": "somebody"}


def test_a_header_in_another_order_than_the_data(tmp_path: Path) -> None:
    source = llama_draft().write(tmp_path / "exl3")
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = dict(reversed(json.loads(data[8 : 8 + length]).items()))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    _, back, _ = there_and_back(source, tmp_path)
    assert tensors(back) == tensors(source)


def test_missing_index_stays_missing(tmp_path: Path) -> None:
    draft = llama_draft(num_shards=3)
    draft.index = None
    source = draft.write(tmp_path / "exl3")
    espalier, back, (first, second) = there_and_back(source, tmp_path)
    assert (espalier / INDEX).is_file()
    assert files(back) == files(source)
    assert first.warnings == second.warnings == ()


@pytest.mark.parametrize("spoil", ["unlisted", "wrong shard", "missing shard", "no json"])
def test_stale_index_is_reported_and_made_anew(spoil: str, tmp_path: Path) -> None:
    draft = llama_draft(num_shards=3)
    index = draft.right_index()
    shards = list(draft.shards)
    if spoil == "unlisted":
        del index["weight_map"]["lm_head.trellis"]
    elif spoil == "wrong shard":
        index["weight_map"]["lm_head.trellis"] = shards[0]
    elif spoil == "missing shard":
        index["weight_map"]["lm_head.trellis"] = "model-00009-of-00003.safetensors"
    draft.index = index
    source = draft.write(tmp_path / "exl3")
    if spoil == "no json":
        (source / INDEX).write_text("{")
    espalier, back, (first, second) = there_and_back(source, tmp_path)
    assert any(INDEX in warning for warning in first.warnings)
    assert second.warnings == ()
    assert tensors(back) == tensors(source)
    for folder in (espalier, back):
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        assert weight_map == {name: shard for shard, held in tensors(folder).items() for name in held}
    for changed in (files(back), files(source)):
        changed.pop(INDEX)
    assert {name for name in files(back) if files(back)[name] != files(source)[name]} == {INDEX}


def test_repeated_tensors_are_written_once(tmp_path: Path) -> None:
    draft = llama_draft(num_shards=2)
    first, second = draft.shards.values()
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.trellis"):
        second[name] = first[name]
    draft.shards["model-copy.safetensors"] = {"model.norm.weight": first["model.norm.weight"]}
    source = draft.write(tmp_path / "exl3")
    espalier, back, (report, _) = there_and_back(source, tmp_path)
    original = {name: value for shard in tensors(source).values() for name, value in shard.items()}
    restored = [item for shard in tensors(back).values() for item in shard.items()]
    assert len(restored) == len(original)
    assert dict(restored) == original
    assert any("stored twice" in warning for warning in report.warnings)
    assert "3 repeated tensors are left out, and do not come back on the way back" in report.warnings
    assert any("model-copy.safetensors" in warning for warning in report.warnings)
    with open_checkpoint(espalier) as checkpoint:
        assert len(checkpoint.modules) == 8


def test_checkpoint_without_config_json(tmp_path: Path) -> None:
    draft = llama_draft()
    draft.config = None
    source = draft.write(tmp_path / "exl3")
    _, back, _ = there_and_back(source, tmp_path)
    assert files(back) == files(source)


def test_converting_twice_gives_the_same_bytes(qmoe_exl3: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        convert_checkpoint(qmoe_exl3, tmp_path / name, to="espalier")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert MANIFEST in one


def test_three_times_there_and_back(tmp_path: Path) -> None:
    source = llama_draft(llama(bias="F16", packed_su=True), num_shards=2).write(tmp_path / "0")
    for turn in range(3):
        shutil.rmtree(tmp_path / "espalier", ignore_errors=True)
        convert_checkpoint(tmp_path / str(turn), tmp_path / "espalier", to="espalier")
        convert_checkpoint(tmp_path / "espalier", tmp_path / str(turn + 1), to="exl3")
    assert files(tmp_path / "3") == files(source)


def test_markers_have_their_constant(tmp_path: Path) -> None:
    source = llama_draft(llama(bits=2, marker="mul1")).write(tmp_path / "exl3")
    _, back, _ = there_and_back(source, tmp_path)
    marker = tensors(back)["model.safetensors"]["model.layers.0.mlp.up_proj.mul1"]
    assert marker == ("I32", (), MARKERS["mul1"].to_bytes(4, "little"))
