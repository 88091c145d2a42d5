"""Lists on the pages of spec/ that the code has too: errors, limits, dtypes, fields, components, tolerances.

Each is read from the page; the code is the other side. Not checked: that the code does what the pages
say; that is what the tests of each part are for.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import independent as ind
import numpy as np
import pytest
from make_vectors import GRIDS
from pages import SPEC, code, flat, indented, number, sections, table, tables, text

from espalier_format import errors, limits
from espalier_format.checkpoint.components import NOT_DECODER, Component, component_of
from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.container.hashing import GIT_BLOB_MAX_BYTES
from espalier_format.container.header import DTYPE_BITS
from espalier_format.container.json_document import parse_json
from espalier_format.container.lfs_pointer import POINTER_BEGINNING
from espalier_format.container.names import PROGRESS_NAME
from espalier_format.converters.exl3_listing import tensor_list_sha256
from espalier_format.kernels import reference
from espalier_format.schema.config import (
    CodebookConstants,
    ModuleSpec,
    QuantizationConfig,
    Source,
    parse_quantization_config,
)
from espalier_format.schema.expert_bank import ExpertBank, Projection
from espalier_format.schema.manifest import UNLISTED_FILES, FileEntry, Manifest


def all_errors() -> dict[str, type[errors.EspalierError]]:
    found, pending = {}, [errors.EspalierError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.code and kind.__module__ == "espalier_format.errors":
            found[kind.code] = kind
    return found


def test_error_codes() -> None:
    assert [code(row[0]) for row in table("errors.md", "2")] == re.findall(
        r"── (?!Refused|Inconsistent)\w+Error +([a-z-]+)", errors.__doc__ or ""
    )
    assert {code(row[0]) for row in table("errors.md", "2")} == set(all_errors())


def test_examples_of_bad_checkpoints() -> None:
    """Named where the corpus has any of that code; the corpus has all codes that a file alone can cause."""
    corpus = json.loads((SPEC / "vectors/refusals.json").read_text("utf-8"))["cases"]
    codes = {case["code"] for case in corpus.values()}
    for name, _, example in table("errors.md", "2"):
        assert corpus[code(example)]["code"] == code(name) if code(name) in codes else example == "–"


def test_exit_codes() -> None:
    rows = {int(row[0]): row[2] for row in table("errors.md", "3")}
    assert list(rows) == [0, 1, 2]
    assert re.findall(r"`([a-z-]+)`", rows[1]) == [
        code(row[0]) for row in table("errors.md", "2") if all_errors()[code(row[0])].exit_code == 1
    ]
    assert {kind.exit_code for kind in all_errors().values()} == {1, 2}


def test_every_code_in_the_text_is_one_of_the_list() -> None:
    """Words in backticks and parentheses after a refusal are codes."""
    known = set(all_errors())
    for page in SPEC.glob("*.md"):
        for item in re.findall(r"(?<!\w)\(`([a-z-]+)`(?:, `([a-z-]+)`)?\)", flat(page.read_text("utf-8"))):
            for name in filter(None, item):
                assert name in known or name == "config", (page.name, name)
    for row in table("errors.md", "4"):
        assert set(re.findall(r"`([a-z-]+)`", row[2])) <= known
    for page, section in (("espalier-v1.md", "4.1"), ("exl3.md", "2")):
        rows = tables(sections(page)[section])
        last = next(rows for rows in rows if code(rows[0][-1]) in known)
        assert {code(row[-1]) for row in last} <= known


def test_limits() -> None:
    stated = {code(row[2]): int(row[1].split()[0].replace(",", "")) for row in table("errors.md", "5")}
    assert stated == {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert f"N ≤ {limits.MAX_HEADER_BYTES:,}" in text("espalier-v1.md")
    assert f"header of more than {limits.MAX_WRITTEN_HEADER_BYTES:,} bytes" in text("espalier-v1.md")


def test_what_a_git_lfs_pointer_begins_with() -> None:
    assert f"ASCII text `{POINTER_BEGINNING.decode('ascii')}`: that is a Git LFS pointer" in text("espalier-v1.md")


def test_sign_of_a_writer_that_has_not_finished() -> None:
    assert f"an entry `{PROGRESS_NAME}`" in flat(sections("exl3.md")["1"])


def test_dtypes() -> None:
    rows = next(rows for rows in tables(sections("espalier-v1.md")["4.1"]) if rows[0][0].isdigit())
    assert {name: int(bits) for bits, names in rows for name in names.split(", ")} == dict(DTYPE_BITS)


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (b'{"a": NaN, "b": [Infinity, -Infinity]}', None),
        (b'{"a": 1} \n\t', None),
        (b'{"a": "\\ud800"}', None),
        (b"[" * 64 + b"]" * 64, None),
        (b"[" * 65 + b"]" * 65, errors.LimitError),
        (b'\xef\xbb\xbf{"a": 1}', errors.MalformedError),
        (b'{"a": 1, "\\u0061": 2}', errors.MalformedError),
        (b'{"a": {"b": 1, "b": 1}}', errors.MalformedError),
        (b'{"a": "\xff"}', errors.MalformedError),
        (b'{"a": 1} x', errors.MalformedError),
        (b'{"' + b"a" * (limits.MAX_CONFIG_STRING_BYTES + 1) + b'": 1}', errors.LimitError),
        (b'{"' + b"a" * limits.MAX_CONFIG_STRING_BYTES + b'": 1}', None),
    ],
)
def test_rules_of_json(document: bytes, kind: type[errors.EspalierError] | None) -> None:
    """errors.md §6, one rule each."""
    if kind is None:
        parse_json(document, path="config.json")
    else:
        with pytest.raises(kind):
            parse_json(document, path="config.json")


def fields(page: str, section: str, index: int = 0) -> list[str]:
    return [name for row in table(page, section, index) for name in re.findall(r"`(\w+)`", row[0])]


@pytest.mark.parametrize(
    ("model", "page", "section", "index"),
    [
        (QuantizationConfig, "config.md", "2", 0),
        (CodebookConstants, "config.md", "3", 0),
        (ModuleSpec, "config.md", "4", 0),
        (ExpertBank, "config.md", "5", 0),
        (Projection, "config.md", "5", 1),
        (Source, "config.md", "7", 0),
        (Manifest, "manifest.md", "2", 0),
        (FileEntry, "manifest.md", "3", 0),
    ],
)
def test_fields(model: Any, page: str, section: str, index: int) -> None:
    assert sorted(fields(page, section, index)) == sorted(model.model_fields)


def test_defaults_of_the_source() -> None:
    for row in table("config.md", "7"):
        if row[3]:
            field = Source.model_fields[code(row[0])]
            default = field.get_default(call_default_factory=True)
            assert json.loads(code(row[3])) == (list(default) if isinstance(default, tuple) else default)


def test_files_that_a_manifest_leaves_out() -> None:
    bullets = sections("manifest.md")["3"].partition("A name is relative")[0]
    assert set(re.findall(r"`([^`]+)`", bullets)) - {"files"} == UNLISTED_FILES
    assert f"at most {GIT_BLOB_MAX_BYTES:,} bytes (10 MiB)" in flat(text("manifest.md"))
    assert GIT_BLOB_MAX_BYTES == 10 * 2**20


def json_examples() -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text("config.md"), re.DOTALL)]


def test_examples_of_configs_are_accepted() -> None:
    dense, experts, source = json_examples()
    for block in (dense, experts, {**dense, "source": source}):
        assert parse_quantization_config(block).to_json() == {
            **block,
            **({"source": Source.model_validate(source).to_json()} if "source" in block else {}),
        }


def rules() -> list[tuple[str, str]]:
    block = re.search(r"```text\n(.*?)```", sections("config.md")["8"], re.DOTALL)
    assert block is not None
    return [tuple(re.split(r"  +", line, maxsplit=1)) for line in block[1].splitlines()]


def component_by_the_page(name: str) -> str:
    return next(c for c, pattern in rules() if re.search(rf"(?:^|\.)(?:{pattern})(?:\.|$)", name))


NAMES = (
    "lm_head", "head", "heads", "model.head", "head.weight", "model.language_model.lm_head", "score", "lm_head_norm",
    "model.embed_tokens", "model.embeddings.word_embeddings", "transformer.wte", "ngram_embedding.shard_0",
    "model.layers.3.self_attn.q_proj", "model.layers.3.attn.c_attn", "model.layers.3.linear_attn.in_proj_qkv",
    "model.layers.3.mlp.up_proj", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj",
    "model.layers.3.block_sparse_moe.gate",
    "model.layers.3.mlp.experts.17.w1", "model.layers.3.mlp.shared_expert.up_proj",
    "model.layers.3.mlp.shared_expert_gate",
    "model.layers.3.input_layernorm", "model.layers.3.mlp.router.proj", "model.visual.blocks.0.attn.q_proj",
    "vision_tower.encoder.layers.0.mlp.fc1", "audio_tower.layers.0.self_attn.k_proj", "multi_modal_projector.linear_1",
    "mtp.layers.0.mlp.experts.3.up_proj", "mtp.fc", "model.layers.61.eh_proj", "model.layers.61.shared_head.head",
    "model.mtp_block.self_attn.o_proj", "Vision.x", "model.layers.3.mixer.in_proj", "backbone.layers.0.mamba.in_proj",
)  # fmt: skip


def test_components() -> None:
    assert {component for component, _ in rules()} == {component.value for component in Component}
    assert rules()[-1] == ("other", ".*")
    for name in NAMES:
        assert component_by_the_page(name) == component_of(name).value, name
    assert len({component_by_the_page(name) for name in NAMES}) == len(Component)
    for name, component in table("config.md", "8"):
        assert component_by_the_page(code(name)) == component == component_of(code(name)).value
    assert "all whose component is not head, mtp or vision" in flat(sections("config.md")["8"])
    assert {component.value for component in NOT_DECODER} == {"head", "mtp", "vision"}


def test_names_of_codebooks() -> None:
    assert list(CODEBOOKS) == ind.codebook_names(GRIDS)


def test_digest_of_a_list_of_tensors() -> None:
    lines = b"a.safetensors\tx.weight\tF16\t2,3\na.safetensors\ty\tI32\t\n"
    body = sections("exl3.md")["6"]
    assert "a shard `a.safetensors` with `x.weight`, F16 of shape (2, 3), and `y`, I32 without dimensions" in flat(body)
    assert indented(body) == [hashlib.sha256(lines).hexdigest()]
    listing = [("a.safetensors", "y", "I32", ()), ("a.safetensors", "x.weight", "F16", (2, 3))]
    assert tensor_list_sha256(listing) == hashlib.sha256(lines).hexdigest()


def tolerances() -> dict[str, tuple[float, float, float]]:
    def power(cell: str) -> float:
        return 2.0 ** number(cell.removeprefix("2^")) if cell.startswith("2^") else number(cell)

    return {row[0]: (power(row[1]), power(row[2]), power(row[3])) for row in table("rotation.md", "6", 1)}


def test_tolerance_admits_exllamav3(fixtures: Any) -> None:
    """Its fp16 pipeline, which rounds four times, is within tolerance, and not by a wide margin."""
    from safetensors.numpy import load_file

    largest = {code(row[0]): number(row[1]) for row in table("rotation.md", "6", 0)}
    relative, scaled, least = tolerances()["float16"]
    tensors = load_file(fixtures / "exl3" / "kat.safetensors")
    keys = [name.removesuffix(".expect_weight") for name in tensors if name.endswith(".expect_weight")]
    assert keys
    for key in keys:
        family, _, width = key.partition(".k")
        suh, svh = tensors[f"{key}.suh"], tensors[f"{key}.svh"]
        book = get_codebook(f"exl3-{family}@{width}")
        exact = reference.decode_weight(tensors[f"{key}.trellis"], suh, svh, book, 128, 128)
        scale = np.abs(suh.astype(np.float64)[:, None] * svh.astype(np.float64)) * largest[f"exl3-{family}"]
        allowed = relative * np.abs(exact) + scaled * scale + least
        error = np.abs(tensors[f"{key}.expect_weight"].astype(np.float64) - exact)
        assert (error <= allowed).all()
        assert (error > allowed / 8).any()


def test_tolerance_of_the_torch_decoder_is_tighter() -> None:
    torch_decoder = pytest.importorskip("espalier_format.kernels.torch_decoder")
    assert set(torch_decoder.TOLERANCE) == set(tolerances())
    for name, (relative, absolute) in torch_decoder.TOLERANCE.items():
        assert relative <= tolerances()[name][0]
        assert absolute <= tolerances()[name][2]
