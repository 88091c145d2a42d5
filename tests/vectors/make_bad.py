"""Make the corpus of bad checkpoints, ``spec/vectors/refusals.json``: ``python tests/vectors/make_bad.py``.

Each case is one valid checkpoint, spoiled in one way, so that it can only be refused for that. A test
compares the committed corpus with what this script makes. Cases that are large by nature (a million
nested arrays) are made in the tests instead.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import pack_refusals
from builders import INDEX, Bank, Draft, Exl3Module, Module, Tensor, codebook_constants, espalier_draft, exl3_draft

CORPUS = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "refusals.json"
SHARD = "model-00002-of-00002.safetensors"
BANK = "layers.0.experts"
UP = "layers.0.up_proj"
REMOVE = object()


@dataclass(frozen=True)
class Case:
    """``code`` is the error code, ``operation`` what finds it: "open", "verify" or "verify --deep"."""

    name: str
    code: str
    why: str
    make: Callable[[Path], None]
    operation: str = "open"


CASES: dict[str, Case] = {}


def case(code: str, name: str, why: str, operation: str = "open") -> Callable[[Callable[[Path], None]], None]:
    """Register a function that writes the case into a folder."""

    def register(make: Callable[[Path], None]) -> None:
        CASES[name] = Case(name, code, why, make, operation)

    return register


def espalier() -> Draft:
    """The valid checkpoint that most cases spoil: two modules, one bank with a plain expert, two shards."""
    modules = (Module(UP, 32, 24, "e2m1@1", (0, 0), bias="F16"), Module("lm_head", 32, 20, "int6@4", (32, 0)))
    banks = (Bank(BANK, {"w1": (16, 16)}, ("e2m1@1", "e2m1@2"), "01-", (0, 0)),)
    plain = {
        "embed_tokens.weight": Tensor("BF16", (20, 32), bytes(1280)),
        "norm.weight": Tensor("F32", (32,), bytes(128)),
    }
    return espalier_draft(modules, banks, plain, num_shards=2)


def exl3(bits: float = 1, marker: str | None = "mcg", **how: Any) -> Draft:
    """The valid EXL3 checkpoint of the other cases: one module."""
    return exl3_draft([Exl3Module(UP, 128, 128, bits, marker, **how)], {"norm.weight": Tensor("F32", (4,), bytes(16))})


def manifest_of(folder: Path) -> dict[str, Any]:
    """A right manifest of the files in a folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        blob = sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        files[path.name] = {"size": len(data), "sha256": sha256(data).hexdigest(), "git_blob_sha1": blob}
    return {"manifest_version": 1, "producer": {"name": "make_bad", "version": "1"}, "files": files}


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def config_case(code: str, name: str, path: tuple[str | int, ...], value: object, why: str) -> None:
    """Register a case that changes one value of ``quantization_config``."""

    def make(folder: Path) -> None:
        draft = espalier()
        target: Any = draft.block
        for key in path[:-1]:
            target = target[key]
        if value is REMOVE:
            del target[path[-1]]
        else:
            target[path[-1]] = value
        draft.write(folder)

    case(code, name, why)(make)


def tensor_case(code: str, name: str, tensor: str, value: Tensor | None, why: str, source: Callable[[], Draft]) -> None:
    """Register a case that adds, replaces or (None) removes one tensor."""

    def make(folder: Path) -> None:
        draft = source()
        if value is None:
            del draft[tensor]
        else:
            draft[tensor] = value
        draft.write(folder)

    case(code, name, why)(make)


def zeros(dtype: str, *shape: int) -> Tensor:
    size = {"F16": 2, "BF16": 2, "I16": 2, "I32": 4, "F32": 4}[dtype]
    return Tensor(dtype, shape, bytes(size * int(np.prod(shape))))


# The config
PROJECTION = ("expert_banks", BANK, "projections", "w1")
for args in (
    ("format-version", "version-2", ("format_version",), 2, "a later format version"),
    ("format-version", "version-missing", ("format_version",), REMOVE, "no format version"),
    ("format-version", "version-string", ("format_version",), "1", "the version is a string"),
    ("format-version", "version-boolean", ("format_version",), True, "the version is a boolean, which equals 1"),
    ("format-version", "version-float", ("format_version",), 1.0, "the version is 1.0"),
    ("required-feature", "feature", ("required_features",), ["sparse-tiles"], "requires a feature of no version"),
    ("codebook", "codebook-unknown", ("modules", UP, "codebook"), "e2m1@3", "this grid has no such width"),
    ("codebook", "codebook-spelling", ("modules", UP, "codebook"), "e2m1@1.0", "the width is spelled 1, not 1.0"),
    ("codebook", "codebook-not-stated", ("codebooks", "int6@4"), REMOVE, "lm_head uses a codebook without constants"),
    ("codebook", "codebook-multiplier", ("codebooks", "int6@4", "multiplier"), "0x3015A78D", "another multiplier"),
    ("codebook", "codebook-sha256", ("codebooks", "int6@4", "sha256"), "0" * 64, "another table"),
    ("codebook", "codebook-addend", ("codebooks", "int6@4", "addend"), "0x00000001", "only exl3-3inst has an addend"),
    ("schema", "addend-null", ("codebooks", "int6@4", "addend"), None, "null where a field is to be left out"),
    ("schema", "source-null", ("source",), None, "null where a field is to be left out"),
    ("schema", "name-surrogate", ("producer", "name"), "\ud800", "half of a surrogate pair in a field"),
    ("schema", "experts-too-many", ("expert_banks", BANK, "num_experts"), 2**20 + 1, "more than an assignment holds"),
    ("schema", "unknown-key", ("group_size",), 128, "an unknown key"),
    ("schema", "missing-key", ("ignore",), REMOVE, "a required key is missing"),
    ("schema", "bits-nan", ("bits",), float("nan"), "bits is NaN"),
    ("schema", "bits-string", ("bits",), "2", "bits is a string"),
    ("schema", "size-zero", ("modules", UP, "in_features"), 0, "a size of 0"),
    ("schema", "size-huge", ("modules", UP, "in_features"), 2**31 + 1, "a size above 2^31"),
    ("schema", "size-float", ("modules", UP, "in_features"), 32.0, "a size is not an integer"),
    ("schema", "rotation-48", ("modules", UP, "rotation", "in"), 48, "a rotation block that does not exist"),
    ("schema", "rotation-false", ("modules", UP, "rotation", "in"), False, "false is not 0"),
    ("schema", "rotation-float", ("modules", "lm_head", "rotation", "in"), 32.0, "32.0 is no integer"),
    ("schema", "rotation-key", ("modules", UP, "rotation"), {"in_": 0, "out": 0}, "in_ is an unknown key, and no in"),
    ("schema", "module-name", ("modules", "layers..q_proj"), {}, "an empty part in a module name"),
    ("schema", "assignment-length", (*PROJECTION, "assignment"), "01-1", "one character too many for three experts"),
    ("schema", "assignment-index", (*PROJECTION, "assignment"), "02-", "2 is beyond the two codebooks"),
    ("schema", "assignment-letter", (*PROJECTION, "assignment"), "0A-", "an upper-case letter"),
    ("schema", "bank-codebook-unused", (*PROJECTION, "assignment"), "00-", "no expert uses the second codebook"),
    ("schema", "bank-codebooks-order", (*PROJECTION, "codebooks"), ["e2m1@2", "e2m1@1"], "not sorted by width"),
    ("schema", "bank-without-projections", ("expert_banks", BANK, "projections"), {}, "a bank of nothing"),
    ("schema", "ignore-order", ("ignore",), ["b", "a"], "ignore is not sorted"),
    ("schema", "ignore-quantized", ("ignore",), ["lm_head"], "ignore names a quantized module"),
    ("schema", "padded-size", ("modules", UP, "size_source"), "padded", "a padded size that is no multiple of 16"),
    (
        "path-escape",
        "carried-file-long",
        ("source",),
        {"format": "exl3", "carried_files": {"a": "b" * 256}},
        "a name of 256 bytes",
    ),
    (
        "path-escape",
        "carried-file-deep",
        ("source",),
        {"format": "exl3", "carried_files": {"a/" * 32 + "b": "c"}},
        "a name of 33 parts",
    ),
    (
        "schema",
        "carried-file-twice",
        ("source",),
        {"format": "exl3", "carried_files": {"a": "c", "b": "c"}},
        "two files were given one name",
    ),
    ("path-escape", "carried-file", ("source",), {"format": "exl3", "carried_files": {"a": "../a"}}, "leads out"),
):
    config_case(*args)


@case("schema", "module-in-bank", "a module is also an expert of a bank")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["modules"][f"{BANK}.0.w1"] = draft.block["modules"][UP]
    draft.write(folder)


@case("schema", "module-in-bank-zeros", "any run of digits counts as the number of an expert")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["modules"][f"{BANK}.007.w1"] = draft.block["modules"][UP]
    draft.write(folder)


@case("schema", "module-control", "a line feed in a module name")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["modules"]["x\n"] = draft.block["modules"][UP]
    draft.write(folder)


@case("codebook", "codebook-addend-missing", "exl3-3inst is stated without its addend")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["modules"][UP]["codebook"] = "exl3-3inst@1"
    draft.block["codebooks"]["exl3-3inst@1"] = codebook_constants("exl3-3inst@1")
    del draft.block["codebooks"]["exl3-3inst@1"]["addend"]
    draft.write(folder)


@case("schema", "bank-key", "the key of a bank does not end in the part experts")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["expert_banks"] = {"layers.0.moe": draft.block["expert_banks"][BANK]}
    draft.write(folder)


@case("schema", "codebook-unused", "a codebook is stated that nothing uses")
def _(folder: Path) -> None:
    draft = espalier()
    draft.block["modules"]["lm_head"]["codebook"] = "e2m1@1"
    draft.write(folder)


@case("schema", "block-array", "quantization_config is an array")
def _(folder: Path) -> None:
    draft = espalier()
    draft.config = {"quantization_config": []}
    draft.write(folder)


@case("malformed", "config-truncated", "config.json ends early")
def _(folder: Path) -> None:
    text = (espalier().write(folder) / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text[: len(text) // 2], encoding="utf-8")


@case("malformed", "config-key-twice", "config.json names a key twice")
def _(folder: Path) -> None:
    text = (espalier().write(folder) / "config.json").read_text(encoding="utf-8")
    text = text.replace('"format_version": 1', '"format_version": 2, "format_version": 1')
    (folder / "config.json").write_text(text, encoding="utf-8")


@case("malformed", "config-utf8", "config.json is not UTF-8")
def _(folder: Path) -> None:
    path = espalier().write(folder) / "config.json"
    path.write_bytes(path.read_bytes().replace(b"builders", b"build\xffers"))


@case("limit", "config-depth", "config.json is nested 65 deep")
def _(folder: Path) -> None:
    draft = espalier()
    deep: Any = 1
    for _number in range(64):
        deep = [deep]
    draft.config = {"deep": deep, **(draft.config or {})}
    draft.write(folder)


@case("missing-file", "config-missing", "shards of an Espalier checkpoint without config.json")
def _(folder: Path) -> None:
    draft = espalier()
    draft.config = None
    draft.write(folder)


@case("format-version", "config-without-block", "shards of an Espalier checkpoint, but no quantization_config")
def _(folder: Path) -> None:
    draft = espalier()
    draft.config = {"architectures": ["LlamaForCausalLM"]}
    draft.write(folder)


for name, block, why in (
    ("config-block-null", None, "shards of an Espalier checkpoint, but quantization_config is null"),
    ("config-other-method", {"quant_method": "exl3"}, "shards of an Espalier checkpoint, but the config says EXL3"),
):

    @case("format-version", name, why)
    def _(folder: Path, block: object = block) -> None:
        draft = espalier()
        draft.config = {"quantization_config": block}
        draft.write(folder)


@case("unsupported-source", "no-shard", "an Espalier checkpoint without a shard")
def _(folder: Path) -> None:
    draft = espalier_draft((), (), {})
    draft.shards = {}
    draft.write(folder)


@case("unsupported-source", "no-safetensors", "a folder without safetensors files")
def _(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"]})


# Shards against the config
for args in (
    ("missing-tensor", "trellis-missing", f"{UP}.esp_trellis", None, "a module without its trellis"),
    ("missing-tensor", "suh-missing", f"{UP}.esp_suh", None, "a module without its suh"),
    ("missing-tensor", "expert-missing", f"{BANK}.1.w1.esp_svh", None, "an expert without its svh"),
    ("missing-tensor", "plain-expert-missing", f"{BANK}.2.w1.weight", None, "an expert that is stored nowhere"),
    ("unexpected-tensor", "module-unlisted", "x.esp_suh", zeros("F16", 16), "a quantized tensor of no module"),
    ("unexpected-tensor", "esp-name-unknown", f"{UP}.esp_scale", zeros("F16", 1), "an esp_ tensor of no known kind"),
    ("unexpected-tensor", "plain-expert-quantized", f"{BANK}.2.w1.esp_suh", zeros("F16", 16), "expert 2 is plain"),
    ("unexpected-tensor", "expert-beyond-bank", f"{BANK}.3.w1.esp_suh", zeros("F16", 16), "the bank has 3 experts"),
    ("dtype", "trellis-dtype", f"{UP}.esp_trellis", zeros("F16", 2, 2, 16), "a trellis must be I16"),
    ("dtype", "suh-dtype", f"{UP}.esp_suh", zeros("BF16", 32), "suh must be F16"),
    ("dtype", "bias-dtype", f"{UP}.bias", zeros("I32", 24), "a bias must be floating-point"),
    ("shape", "trellis-width", f"{UP}.esp_trellis", zeros("I16", 2, 2, 32), "a trellis of 2 bits, the config says 1"),
    ("shape", "trellis-transposed", f"{BANK}.0.w1.esp_trellis", zeros("I16", 16, 1, 1), "dimensions in another order"),
    ("shape", "suh-short", f"{UP}.esp_suh", zeros("F16", 16), "suh is shorter than the padded input"),
    ("shape", "bias-padded", f"{UP}.bias", zeros("F16", 32), "a bias has the true size, 24, not the padded one"),
    ("shape", "plain-expert-shape", f"{BANK}.2.w1.weight", zeros("BF16", 16, 32), "not the size of the bank"),
):
    tensor_case(*args, espalier)


@case("unexpected-tensor", "exl3-module", "a module in the form of EXL3 among Espalier's")
def _(folder: Path) -> None:
    draft = espalier()
    draft["x.trellis"], draft["x.suh"] = zeros("I16", 1, 1, 16), zeros("F16", 16)
    draft.write(folder)


@case("unexpected-tensor", "exl3-module-beside", "a module of the config is there in the form of EXL3 too")
def _(folder: Path) -> None:
    draft = espalier()
    draft[f"{UP}.trellis"], draft[f"{UP}.suh"] = zeros("I16", 1, 1, 16), zeros("F16", 16)
    draft.write(folder)


@case("duplicate-tensor", "tensor-twice", "two shards hold one tensor")
def _(folder: Path) -> None:
    draft = espalier()
    draft.shards[SHARD]["norm.weight"] = draft["norm.weight"]
    draft.write(folder)


for name, metadata, why in (
    ("shard-version-missing", None, "a shard with esp_ tensors without metadata"),
    ("shard-version-absent", {"format": "pt"}, "a shard with esp_ tensors that states no version"),
    ("shard-version-2", {"format": "pt", "espalier_format_version": "2"}, "a shard of a later version"),
):

    @case("format-version", name, why)
    def _(folder: Path, metadata: dict[str, str] | None = metadata) -> None:
        draft = espalier()
        del draft.metadata[SHARD]
        if metadata is not None:
            draft.metadata[SHARD] = metadata
        draft.write(folder)


# The index
def index_case(code: str, name: str, why: str, spoil: Callable[[dict[str, Any]], object]) -> None:
    def make(folder: Path) -> None:
        draft = espalier()
        draft.index = draft.right_index()
        spoil(draft.index)
        draft.write(folder)

    case(code, name, why)(make)


index_case(
    "index-mismatch",
    "index-other-shard",
    "names another shard",
    lambda i: i["weight_map"].update({"norm.weight": SHARD}),
)
index_case("index-mismatch", "index-incomplete", "does not list a tensor", lambda i: i["weight_map"].pop("norm.weight"))
index_case(
    "index-mismatch", "index-extra", "lists a tensor of no shard", lambda i: i["weight_map"].update({"x": SHARD})
)
index_case(
    "index-mismatch",
    "index-no-shard",
    "names a shard that is not there",
    lambda i: i["weight_map"].update({"x": "y.safetensors"}),
)
index_case(
    "index-mismatch", "index-total-size", "states another total size", lambda i: i["metadata"].update(total_size=1)
)
index_case("schema", "index-without-map", "has no weight_map", lambda i: i.pop("weight_map"))
index_case("schema", "index-metadata", "metadata is an array", lambda i: i.update(metadata=[]))
index_case(
    "schema",
    "index-size-float",
    "the total size is no integer",
    lambda i: i["metadata"].update(total_size=float(i["metadata"]["total_size"])),
)
index_case("schema", "index-surrogate", "names half of a pair", lambda i: i["weight_map"].update({"\ud800": SHARD}))
index_case(
    "path-escape", "index-dot", "a part that is a dot", lambda i: i["weight_map"].update({"norm.weight": f"./{SHARD}"})
)
index_case(
    "path-escape",
    "index-below",
    "a shard that is not at the top level",
    lambda i: i["weight_map"].update({"norm.weight": f"below/{SHARD}"}),
)
index_case(
    "path-escape",
    "index-escape",
    "leads to a file outside",
    lambda i: i["weight_map"].update({"norm.weight": "../x.safetensors"}),
)
index_case(
    "path-escape",
    "index-absolute",
    "leads to an absolute path",
    lambda i: i["weight_map"].update({"norm.weight": "/etc/passwd"}),
)


@case("missing-file", "index-missing", "an Espalier checkpoint without its index")
def _(folder: Path) -> None:
    draft = espalier()
    draft.index = None
    draft.write(folder)


@case("index-mismatch", "stray-shard", "a shard that the index does not name")
def _(folder: Path) -> None:
    draft = espalier()
    draft.index = draft.right_index()
    draft.shards["stray.safetensors"] = {"x": zeros("F16", 1)}
    draft.write(folder)


@case("index-mismatch", "shard-empty", "a shard without tensors, which no index can name")
def _(folder: Path) -> None:
    draft = espalier()
    draft.index = draft.right_index()
    draft.shards["stray.safetensors"] = {}
    draft.write(folder)


# Files that are not safetensors: one tensor "a" of 16 bytes, spoiled
def around_a_shard() -> Draft:
    """An Espalier checkpoint without quantized modules, whose one shard is replaced."""
    return espalier_draft((), (), {"a": zeros("F32", 4)})


def file_case(code: str, name: str, why: str, header: object, data: int = 16, length: int | None = None) -> None:
    def make(folder: Path) -> None:
        around_a_shard().write(folder)
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        content = struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)
        (folder / "model.safetensors").write_bytes(content)

    case(code, name, why)(make)


def entry(start: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


GOOD = {"a": entry(0, 16)}
CUT = json.dumps(GOOD, separators=(",", ":")).encode()[:-9]
"""A header that is no JSON: a reader that takes what is there, and does not compare N with the file, says malformed."""

for args in (
    ("truncated", "header-truncated", "the file ends within its header", CUT, 0, 1000),
    ("truncated", "data-truncated", "the file ends within its data", GOOD, 15),
    ("malformed", "data-trailing", "bytes after the last tensor", GOOD, 17),
    ("malformed", "data-hole", "bytes between two tensors", {"a": entry(0, 4), "b": entry(8, 16)}),
    ("overlapping-data", "data-overlap", "two tensors share bytes", {"a": entry(0, 12), "b": entry(8, 16)}),
    ("overlapping-data", "data-same", "two tensors are the same bytes", {"a": entry(0, 16), "b": entry(0, 16)}),
    ("overlapping-data", "data-empty-inside", "an empty tensor within another", {"a": entry(0, 16), "b": entry(8, 8)}),
    ("malformed", "header-surrogate", "half of a surrogate pair", {"\ud800": entry(0, 16)}),
    ("malformed", "offsets-float", "an offset is no integer", {"a": {**entry(0, 16), "data_offsets": [0, 16.0]}}),
    ("malformed", "offsets-minus-zero", "an offset is written -0", json.dumps(GOOD).replace("[0,", "[-0,").encode()),
    ("malformed", "offsets-beyond", "offsets beyond 2^63 - 1", {"a": entry(2**63, 2**63 + 16)}),
    ("shape", "shape-side", "a side beyond 2^63 - 1 of an empty tensor", {"a": entry(0, 0, shape=[0, 2**63])}, 0),
    ("limit", "header-huge", "a header that claims 2^60 bytes", GOOD, 16, 2**60),
    ("limit", "header-depth", "a header nested too deep", b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"),
    ("malformed", "header-empty", "an empty header", b""),
    ("malformed", "header-array", "the header is an array", []),
    ("malformed", "header-json", "the header is no JSON", b'{"a":'),
    (
        "malformed",
        "header-key-twice",
        "the header names a tensor twice",
        json.dumps(GOOD).encode()[:-1] + b', "a": {}}',
    ),
    ("malformed", "header-field", "a tensor without offsets", {"a": {"dtype": "F32", "shape": [4]}}),
    (
        "malformed",
        "offsets-reversed",
        "a tensor ends before it starts",
        {"a": {**entry(0, 16), "data_offsets": [16, 0]}},
    ),
    ("malformed", "shape-negative", "a negative size", {"a": entry(0, 16, shape=[-4])}),
    ("dtype", "dtype-unknown", "a dtype that safetensors does not know", {"a": entry(0, 16, "F32X")}),
    ("shape", "shape-bytes", "the shape does not fit the bytes", {"a": entry(0, 16, shape=[5])}),
    ("shape", "shape-overflow", "more elements than 2^63", {"a": entry(0, 16, shape=[2**40, 2**40])}),
):
    file_case(*args)


@case("truncated", "length-truncated", "the file ends within the length of its header")
def _(folder: Path) -> None:
    around_a_shard().write(folder)
    (folder / "model.safetensors").write_bytes(bytes(7))


# EXL3
for args in (
    (
        "codebook",
        "exl3-marker-value",
        f"{UP}.mcg",
        Tensor("I32", (), struct.pack("<I", 0xCBAC1FEF)),
        "another multiplier",
    ),
    ("codebook", "exl3-two-markers", f"{UP}.mul1", Tensor("I32", (), struct.pack("<I", 0x83DCD12D)), "both markers"),
    ("dtype", "exl3-marker-dtype", f"{UP}.mcg", zeros("F32"), "a marker must be I32"),
    ("shape", "exl3-marker-shape", f"{UP}.mcg", zeros("I32", 1), "a marker has no dimensions"),
    ("missing-tensor", "exl3-suh-missing", f"{UP}.suh", None, "neither suh nor su"),
    ("missing-tensor", "exl3-trellis-missing", f"{UP}.trellis", None, "scales without a trellis"),
    ("unexpected-tensor", "exl3-scale", f"{UP}.scale", zeros("F16", 1), "no version of EXL3 has this tensor"),
    ("unexpected-tensor", "exl3-suh-and-su", f"{UP}.su", zeros("I16", 8), "both suh and su"),
    ("dtype", "exl3-suh-dtype", f"{UP}.suh", zeros("BF16", 128), "suh must be F16"),
    ("shape", "exl3-width", f"{UP}.trellis", zeros("I16", 8, 8, 20), "a trellis of 20 words, 1.25 bits"),
    ("shape", "exl3-width-72", f"{UP}.trellis", zeros("I16", 8, 8, 72), "a trellis of 72 words, 4.5 bits"),
    ("shape", "exl3-bias", f"{UP}.bias", zeros("F16", 100), "a bias of neither the padded nor the true size"),
    ("shape", "exl3-size", f"{UP}.trellis", zeros("I16", 4, 8, 16), "64 inputs, no multiple of 128"),
    ("shape", "exl3-rank", f"{UP}.trellis", zeros("I16", 8, 8, 4, 4), "a trellis of four dimensions"),
):
    tensor_case(*args, exl3)


@case("codebook", "exl3-half-rate", "1.5 bits need the mul1 codebook")
def _(folder: Path) -> None:
    exl3(1.5, "mcg").write(folder)


@case("duplicate-tensor", "exl3-duplicates", "two shards hold different tensors of one name")
def _(folder: Path) -> None:
    draft = exl3()
    draft.shards["second.safetensors"] = {"norm.weight": Tensor.of(np.ones(4), "F32")}
    draft.write(folder)


@case("missing-file", "exl3-peer-missing", "the second of two numbered shards is not there")
def _(folder: Path) -> None:
    draft = exl3()
    draft.shards = {"model-00001-of-00002.safetensors": draft.shards.popitem()[1]}
    draft.write(folder)


@case("missing-file", "exl3-shard-missing", "the index lists a trellis in a shard that is not there")
def _(folder: Path) -> None:
    draft = exl3()
    draft.index = draft.right_index()
    draft.index["weight_map"]["layers.1.up_proj.trellis"] = "second.safetensors"
    draft.write(folder)


@case("missing-file", "exl3-unfinished", "a writer was killed before config.json was there")
def _(folder: Path) -> None:
    draft = exl3()
    draft.config = None
    draft.files[".espalier-in-progress/lock"] = b""
    draft.write(folder)


@case("missing-file", "plain-peer-missing", "the first of two numbered shards is not there")
def _(folder: Path) -> None:
    tensors = {"a": zeros("F32", 4)}
    Draft({"architectures": ["LlamaForCausalLM"]}, {SHARD: tensors}, index=None).write(folder)


@case("malformed", "lfs-pointer", "a shard is a Git LFS pointer")
def _(folder: Path) -> None:
    around_a_shard().write(folder)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 16\n"
    (folder / "model.safetensors").write_text(pointer, encoding="ascii")


# What only verify finds
@case("non-finite-scale", "scale-nan", "suh holds a NaN", "verify")
def _(folder: Path) -> None:
    draft = espalier()
    scales = draft[f"{UP}.esp_suh"].array().copy()
    scales[3] = np.nan
    draft[f"{UP}.esp_suh"] = Tensor.of(scales, "F16")
    draft.write(folder)


@case("non-finite-scale", "exl3-scale-infinite", "svh holds an infinity", "verify")
def _(folder: Path) -> None:
    draft = exl3()
    scales = draft[f"{UP}.svh"].array().copy()
    scales[127] = -np.inf
    draft[f"{UP}.svh"] = Tensor.of(scales, "F16")
    draft.write(folder)


@case("non-finite-scale", "exl3-padding-nan", "the padding of suh holds a NaN", "verify")
def _(folder: Path) -> None:
    draft = exl3_draft([Exl3Module(UP, 100, 128, 1)], {})
    draft[f"{UP}.weight"] = Tensor("U8", (128, 100), bytes(12800))
    scales = draft[f"{UP}.suh"].array().copy()
    scales[120] = np.nan
    draft[f"{UP}.suh"] = Tensor.of(scales, "F16")
    draft.write(folder)


for name, field, value in (("bits", "bits", 1.5), ("head-bits", "head_bits", None)):

    @case("bits-mismatch", name, f"{field} is not the average of the modules", "verify")
    def _(folder: Path, field: str = field, value: object = value) -> None:
        draft = espalier()
        draft.block[field] = value
        draft.write(folder)


def manifest_case(
    code: str, name: str, why: str, spoil: Callable[[dict[str, Any]], object], operation: str = "verify"
) -> None:
    def make(folder: Path) -> None:
        espalier().write(folder)
        manifest = manifest_of(folder)
        spoil(manifest)
        write_json(folder / "espalier_manifest.json", manifest)

    case(code, name, why, operation)(make)


manifest_case(
    "digest-mismatch", "file-hash", "another SHA-256", lambda m: m["files"]["config.json"].update(sha256="0" * 64)
)
manifest_case(
    "digest-mismatch",
    "file-blob",
    "another git hash",
    lambda m: m["files"]["config.json"].update(git_blob_sha1="0" * 40),
)
manifest_case("digest-mismatch", "file-size", "another size", lambda m: m["files"]["config.json"].update(size=1))
manifest_case(
    "digest-mismatch",
    "file-missing",
    "lists a file that is not there",
    lambda m: m["files"].update({"x": m["files"][INDEX]}),
)
manifest_case("digest-mismatch", "file-unlisted", "does not list a file", lambda m: m["files"].pop(INDEX))
manifest_case(
    "digest-mismatch",
    "decode-digest",
    "other codes",
    lambda m: m.update(decode_digests={UP: "0" * 64}),
    "verify --deep",
)
manifest_case(
    "format-version", "manifest-version", "a manifest of a later version", lambda m: m.update(manifest_version=2)
)
manifest_case("schema", "manifest-null", "null where a field is to be left out", lambda m: m.update(command=None))
manifest_case("schema", "manifest-surrogate", "half of a pair", lambda m: m["producer"].update(name="\ud800"))
manifest_case(
    "schema",
    "manifest-hidden",
    "lists a file below a hidden folder",
    lambda m: m["files"].update({".cache/x": m["files"][INDEX]}),
)
manifest_case(
    "schema", "manifest-blob-missing", "no git hash of a small file", lambda m: m["files"][INDEX].pop("git_blob_sha1")
)
manifest_case(
    "schema",
    "manifest-blob-large",
    "a git hash of a file above 10 MiB",
    lambda m: m["files"][INDEX].update(size=10 * 2**20 + 1),
)
manifest_case("schema", "manifest-key", "an unknown key in the manifest", lambda m: m.update(signature="x"))
manifest_case(
    "schema",
    "manifest-lists-itself",
    "lists itself",
    lambda m: m["files"].update({"espalier_manifest.json": m["files"][INDEX]}),
)
manifest_case(
    "path-escape", "manifest-escape", "lists a file outside", lambda m: m["files"].update({"../x": m["files"][INDEX]})
)


for code, name, text, why in (
    ("malformed", "manifest-truncated", '{"manifest_version": 1', "the manifest ends early"),
    ("limit", "manifest-depth", "[" * 65 + "]" * 65, "the manifest is nested 65 deep"),
):

    @case(code, name, why, "verify")
    def _(folder: Path, text: str = text) -> None:
        (espalier().write(folder) / "espalier_manifest.json").write_text(text, encoding="utf-8")


def reader_of(name: str) -> str:
    """Who must refuse a case with its code: every reader of Espalier, or one that reads EXL3 or plain ones too."""
    if name == "plain-peer-missing":
        return "plain"
    return "exl3" if name.startswith("exl3-") and not name.startswith("exl3-module") else "espalier"


def sorted_cases() -> list[Case]:
    return sorted(CASES.values(), key=lambda c: (c.code, c.name))


def valid_drafts() -> dict[str, Draft]:
    """The valid checkpoints that the cases spoil."""
    return {"espalier": espalier(), "exl3": exl3(), "one-tensor": around_a_shard()}


def write_all(folder: Path) -> None:
    """Write the whole corpus into ``folder``, a folder per case."""
    for found in sorted_cases():
        found.make(folder / found.name)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        bases = {name: pack_refusals.read_folder(d.write(work / "base" / name)) for name, d in valid_drafts().items()}
        write_all(work / "bad")
        cases = {
            found.name: {
                "code": found.code,
                "operation": found.operation,
                "reader": reader_of(found.name),
                "why": found.why,
                "content": pack_refusals.read_folder(work / "bad" / found.name),
            }
            for found in sorted_cases()
        }
    CORPUS.write_bytes(pack_refusals.dumps(pack_refusals.document(bases, cases)))


if __name__ == "__main__":
    main()
