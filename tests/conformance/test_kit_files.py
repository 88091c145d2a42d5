"""The written kit: pinned, complete, and readable with json, struct and safetensors alone."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.codec.trellis import unpack_states
from espalier_format.conformance import write_kit
from espalier_format.conformance.kit import KIT_FILE, kit_document, pinned_hashes
from espalier_format.conformance.refusals import refusal_cases
from espalier_format.conformance.suite import Options, cases_of
from espalier_format.errors import DigestError, OutputExistsError, WriteError
from espalier_format.operations.verify import verify_checkpoint

PINS = Path(__file__).parents[2] / "spec" / "vectors" / KIT_FILE
GROUPS = ("open", "codes", "weights", "load", "matmul", "experts")
BLOCKS = (0, 32, 64, 128, 256)


def group(kit: Path, kind: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((kit / f"{kind}.json").read_text("ascii"))
    return document


def cases(kit: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group(kit, kind)["cases"]
    return found


def test_every_file_is_pinned(kit: Path) -> None:
    """After a change of the kit: python tests/conformance/make_pins.py. Changing it is a new version of the kit."""
    files = {path.relative_to(kit).as_posix(): path for path in kit.rglob("*") if path.is_file()}
    document = json.loads(PINS.read_text("ascii"))
    assert {
        name: sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != KIT_FILE
    } == document["files"]
    assert (kit / KIT_FILE).read_bytes() == PINS.read_bytes()
    assert document["groups"] == [f"{kind}.json" for kind in GROUPS]
    assert kit_document(document["groups"], document["files"]) == PINS.read_bytes()
    assert (document["kit_version"], document["format_version"]) == (1, 1)


def test_the_kit_is_of_the_size_that_is_said(kit: Path) -> None:
    total = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
    assert round(total / 1e6) == 47
    text = " ".join((PINS.parents[1] / "conformance.md").read_text("utf-8").split())
    assert "about 47 MB in JSON and safetensors" in text


def test_every_codebook_with_every_block_on_either_side(kit: Path) -> None:
    found = cases(kit, "weights")
    for side in ("in", "out"):
        met = {(case["codebook"], case["rotation"][side]) for case in found}
        assert met == set(product(CODEBOOKS, BLOCKS))
    assert {(case["rotation"]["in"], case["rotation"]["out"]) for case in found} == set(product(BLOCKS, BLOCKS))
    assert {case["codebook"] for case in cases(kit, "codes") if case["error"] is None} == set(CODEBOOKS)
    products = cases(kit, "matmul")
    assert {case["codebook"] for case in products} == set(CODEBOOKS)
    for side in ("in", "out"):
        assert {case["rotation"][side] for case in products} == set(BLOCKS)


def test_sizes_are_odd_and_smaller_than_padded(kit: Path) -> None:
    tensors = load_file(kit / "weights.safetensors")
    cropped = {"in": 0, "out": 0}
    for case in cases(kit, "weights"):
        names = case["tensors"]
        for side, true, scales in (("in", case["in_features"], "suh"), ("out", case["out_features"], "svh")):
            unit = case["rotation"][side] or 16
            padded = tensors[names[scales]].size
            assert padded == -(-true // unit) * unit
            cropped[side] += true < padded and true % 2 == 1
        tiles = tensors[names["trellis"]].shape
        assert (16 * tiles[0], 16 * tiles[1]) == (tensors[names["suh"]].size, tensors[names["svh"]].size)
        assert tiles[2] == get_codebook(case["codebook"]).halfwords_per_tile
    assert min(cropped.values()) > 100


def test_zero_scales_of_both_signs_and_subnormal_ones(kit: Path) -> None:
    tensors = load_file(kit / "weights.safetensors")
    for case in cases(kit, "weights"):
        for side, true in (("suh", case["in_features"]), ("svh", case["out_features"])):
            patterns = tensors[case["tensors"][side]].view(np.uint16)
            if case["name"].startswith("edge/") or true < 11:
                continue
            assert {0x0000, 0x8000, 0x0001, 0x83FF} <= set(patterns[:true].tolist()), case["name"]
            assert not patterns[true:].any()
    padding = [case for case in cases(kit, "weights") if "numbers-in-the-padding" in case["name"]]
    for case in padding:
        assert tensors[case["tensors"]["suh"]][case["in_features"] :].any()
        assert tensors[case["tensors"]["svh"]][case["out_features"] :].any()
    assert len(padding) == 2


def test_only_what_is_meant_to_be_zero_is_zero(kit: Path) -> None:
    """Any decoder is right about a weight without a number in it."""
    tensors = load_file(kit / "weights.safetensors")
    weights = {case["name"]: case["tensors"]["weight"] for case in cases(kit, "weights") if "weight" in case["tensors"]}
    zero = {name for name, weight in weights.items() if not tensors[weight].any()}
    assert zero == {"edge/all-outputs-zero"}
    products = load_file(kit / "matmul.safetensors")
    zero = set()
    for case in cases(kit, "matmul"):
        names = case["tensors"]
        bias = products[names["bias"]] if "bias" in names else 0
        if (products[names["y"]] == bias).all():
            zero.add(case["name"])
    assert len(zero) == 3
    assert all("all-outputs-zero" in name or "zero-inputs" in name for name in zero)


def test_inputs_times_suh_overflow_float16_where_outputs_do_not(kit: Path) -> None:
    tensors = load_file(kit / "matmul.safetensors")
    steep = [case for case in cases(kit, "matmul") if "steep" in case["name"]]
    assert len(steep) == 4
    assert max(case["rows"] for case in steep) > 64  # where programs decode the weight first
    for case in steep:
        names = case["tensors"]
        scaled = tensors[names["x"]] * tensors[names["suh"]][: case["in_features"]].astype(np.float32)
        assert (np.abs(scaled).max(axis=1) > 65504).all()
        assert "float16" in case["dtypes"]
        assert 0.5 < np.abs(tensors[names["y"]]).max() < 1000


def test_each_trellis_of_codes_visits_every_state(kit: Path) -> None:
    """`unpack_states` is compared with the independent decoder in tests/spec."""
    tensors = load_file(kit / "codes.safetensors")
    for case in cases(kit, "codes"):
        if case["error"] is None:
            visited = np.unique(unpack_states(tensors[case["tensors"]["trellis"]]))
            assert visited.size == 65536, case["name"]


def test_no_weight_is_close_to_the_limit_of_float16(kit: Path) -> None:
    """There a decoder within tolerance may refuse or not, so a case could not be judged."""
    tensors = load_file(kit / "weights.safetensors")
    for case in cases(kit, "weights"):
        largest = np.abs(tensors[case["tensors"]["weight"]]).max() if "weight" in case["tensors"] else np.inf
        assert largest > 70000 if case["refused"] else largest < 60000, case["name"]
    products = load_file(kit / "matmul.safetensors")
    for case in cases(kit, "matmul"):
        assert ("float16" not in case["dtypes"]) or np.abs(products[case["tensors"]["y"]]).max() < 60000


def test_inputs_are_exact_in_the_dtypes_that_are_stated(kit: Path) -> None:
    tensors = load_file(kit / "matmul.safetensors")
    for case in cases(kit, "matmul"):
        assert case["dtypes"] in (["float32", "float16", "bfloat16"], ["float32", "bfloat16"])
        for key in ("x", "bias"):
            if key not in case["tensors"]:
                continue
            array = tensors[case["tensors"][key]]
            assert not (array.view(np.uint32) & 0xFFFF).any(), case["name"]
            if "float16" in case["dtypes"]:
                assert (array.astype(np.float16) == array).all(), case["name"]
        assert tensors[case["tensors"]["x"]].shape == (case["rows"], case["in_features"])
    rows = {case["rows"] for case in cases(kit, "matmul")}
    assert {1, 2, 3, 8, 9, 17, 33, 65, 200} <= rows
    assert {"bias" in case["tensors"] for case in cases(kit, "matmul")} == {True, False}


def test_no_two_tensors_have_one_content_by_mistake(kit: Path) -> None:
    """A label that is used twice would make cases that test nothing new."""
    tensors = load_file(kit / "weights.safetensors")
    contents = {tensor.tobytes() for name, tensor in tensors.items() if name.endswith(".trellis")}
    assert len(contents) == sum(name.endswith(".trellis") for name in tensors)


def test_valid_checkpoints_are_valid(kit: Path) -> None:
    valid = [case for case in cases(kit, "open") if case["error"] is None]
    assert len(valid) == 4
    for case in valid:
        report = verify_checkpoint(kit / case["folder"], deep=True)
        assert [str(finding) for check in report.checks for finding in check.findings] == []
    assert any((kit / case["folder"] / "espalier_manifest.json").exists() for case in valid)


def test_a_checkpoint_has_experts_of_mixed_width_and_biases(kit: Path) -> None:
    config = json.loads((kit / "checkpoints/mixed-experts/config.json").read_text("ascii"))["quantization_config"]
    ((_, bank),) = config["expert_banks"].items()
    for projection in bank["projections"].values():
        assert len(projection["codebooks"]) == 3
        assert len(projection["assignment"]) == bank["num_experts"] == 7
    assert any("-" in projection["assignment"] for projection in bank["projections"].values())
    dtypes = set()
    for shard in (kit / "checkpoints/dense").glob("*.safetensors"):
        data = shard.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        dtypes |= {entry["dtype"] for name, entry in header.items() if name.endswith(".bias")}
    assert dtypes == {"BF16", "F16", "F32"}


def test_the_refused_folders_are_the_corpus(kit: Path) -> None:
    stated = {case["folder"]: case for case in cases(kit, "open") if case["error"] is not None}
    assert set(stated) == {f"refused/{case.name}" for case in refusal_cases()}
    for case in refusal_cases():
        files = {
            path.relative_to(kit / "refused" / case.name).as_posix(): path.read_bytes()
            for path in (kit / "refused" / case.name).rglob("*")
            if path.is_file()
        }
        assert files == case.files
        entry = stated[f"refused/{case.name}"]
        assert (entry["error"], entry["operation"], entry["reader"]) == (case.code, case.operation, case.reader)


def test_files_and_cases_in_python_are_the_same(kit: Path) -> None:
    for kind in GROUPS[1:]:
        files = {
            f"{kind}/{case['name']}" + (f"/{dtype}" if kind != "codes" else "")
            for case in cases(kit, kind)
            for dtype in case.get("dtypes", ("float32", "float16", "bfloat16"))
        }
        assert files == {case.name for case in cases_of(kind, Options())}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", GROUPS)
def test_keys_are_those_of_the_page(kit: Path, kind: str) -> None:
    page = (PINS.parents[1] / "conformance.md").read_text("utf-8")
    section = page[page.index("## 9.") : page.index("## 10.")]
    document = group(kit, kind)
    for key in document.keys() | {key for case in document["cases"] for key in case}:
        assert f"`{key}`" in section, key
    for case in document["cases"]:
        for key in case.get("tensors", {}):
            assert f"`{key}`" in section, key
        assert case.get("reader", "espalier") in {"espalier", "exl3", "plain"}


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    around = tmp_path / "absent" / ".." / ".." / tmp_path.name
    for target in (tmp_path, tmp_path / "precious.txt", tmp_path / "precious.txt" / "kit", around):
        with pytest.raises(OutputExistsError):
            write_kit(target)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_kit_that_drifts_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {**pinned_hashes(), "open.json": "0" * 64}
    monkeypatch.setattr("espalier_format.conformance.writer.pinned_hashes", lambda: pins)
    with pytest.raises(DigestError, match=r"open\.json"):
        write_kit(tmp_path / "kit")


@pytest.mark.parametrize("name", ["x" * 300, "null\0byte"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(WriteError, match="cannot write the kit"):
        write_kit(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WriteError, match="No space left"):
        write_kit(tmp_path / "kit")
