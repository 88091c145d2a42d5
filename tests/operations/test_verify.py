"""``verify_checkpoint``: each check finds what it is for, all findings are reported, and nothing is changed.

What opening a checkpoint refuses has its own tests (tests/checkpoint); here it is one finding among others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
from builders import Exl3Module, Tensor, espalier_draft, exl3_draft

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import MissingFileError, UsageError, WriteError
from espalier_format.kernels.reference import decode_codes
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.verify import verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from espalier_format.operations.verify_report import VerifyReport

MANIFEST = "espalier_manifest.json"
ALL_CHECKS = ["structure", "safetensors", "index", "bits", "scales", "manifest", "digests"]


@pytest.fixture(scope="module")
def converted(llama_exl3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the shipped checkpoint, with digests; tests copy it before they spoil it."""
    destination = tmp_path_factory.mktemp("verify") / "espalier"
    convert_checkpoint(llama_exl3, destination, to="espalier", digests=True)
    return destination


@pytest.fixture
def espalier(converted: Path, tmp_path: Path) -> Path:
    """Give a copy that may be spoilt."""
    return Path(shutil.copytree(converted, tmp_path / "espalier"))


def outcomes(report: VerifyReport) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def codes(report: VerifyReport) -> list[str]:
    return [finding.code for finding in report.findings]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_good_checkpoint_passes_every_check(converted: Path) -> None:
    before = content(converted)
    report = verify_checkpoint(converted, deep=True)
    assert outcomes(report) == dict.fromkeys(ALL_CHECKS, "passed")
    assert (report.exit_code, report.findings, report.warnings, report.recorded) == (0, (), (), 0)
    assert content(converted) == before


def test_without_deep_nothing_is_decoded(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError

    monkeypatch.setattr("espalier_format.checkpoint.base.Checkpoint.digest", refuse)
    assert "digests" not in outcomes(verify_checkpoint(converted))
    with pytest.raises(AssertionError):
        verify_checkpoint(converted, deep=True)


def test_path_with_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        verify_checkpoint(tmp_path / "nothing")


def test_without_manifest_warns(tmp_path: Path) -> None:
    report = verify_checkpoint(espalier_draft().write(tmp_path / "e"), deep=True)
    assert outcomes(report)["manifest"] == "skipped"
    assert report.exit_code == 0
    assert any("manifest" in warning for warning in report.warnings)


def test_bits_mismatch(tmp_path: Path) -> None:
    draft = espalier_draft()
    draft.block["bits"] += 0.000001
    draft.block["head_bits"] = None
    report = verify_checkpoint(draft.write(tmp_path / "e"))
    assert codes(report) == ["bits-mismatch", "bits-mismatch"]
    assert report.exit_code == 1
    assert report.findings[0].got == draft.block["bits"]


def test_non_finite_scales_are_all_found(tmp_path: Path) -> None:
    draft = espalier_draft()
    spoilt = ["lm_head.esp_suh", "model.layers.0.mlp.experts.3.down_proj.esp_svh"]
    for name, value in zip(spoilt, (np.inf, np.nan), strict=True):
        values = draft[name].array().copy()
        values[-1] = value
        draft[name] = Tensor.of(values, "F16")
    report = verify_checkpoint(draft.write(tmp_path / "e"))
    assert codes(report) == ["non-finite-scale"] * 2
    assert {finding.tensor for finding in report.findings} == set(spoilt)
    assert report.exit_code == 1


def test_every_wrong_file_is_found(espalier: Path) -> None:
    """One changed byte, a wrong size, a missing file, an extra one; README.md may be edited."""
    shard = bytearray((espalier / "model.safetensors").read_bytes())
    shard[-1] ^= 1
    (espalier / "model.safetensors").write_bytes(shard)
    (espalier / "tokenizer.json").write_text("{}")
    (espalier / "generation_config.json").unlink()
    (espalier / "extra.txt").write_text("?")
    (espalier / "README.md").write_text("edited")
    report = verify_checkpoint(espalier)
    assert {Path(str(finding.path)).name for finding in report.findings} == {
        "model.safetensors", "tokenizer.json", "generation_config.json", "extra.txt",
    }  # fmt: skip
    assert set(codes(report)) == {"digest-mismatch"}
    assert report.exit_code == 1


def test_each_hash_of_the_manifest_counts(espalier: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["config.json"]["git_blob_sha1"] = "0" * 40
        manifest["files"]["tokenizer.json"]["sha256"] = "0" * 64

    edit_json(espalier / MANIFEST, change)
    report = verify_checkpoint(espalier)
    assert codes(report) == ["digest-mismatch", "digest-mismatch"]
    assert [finding.expected for finding in report.findings] == ["0" * 40, "0" * 64]


def test_a_wrong_file_is_one_finding(espalier: Path) -> None:
    """Though a changed byte changes both hashes. The line of the check counts the files."""
    config = (espalier / "tokenizer.json").read_bytes()
    (espalier / "tokenizer.json").write_bytes(bytes([config[0] ^ 1]) + config[1:])
    (espalier / "generation_config.json").write_text("{}")
    (espalier / "extra.txt").write_text("?")
    report = verify_checkpoint(espalier)
    assert [finding.message for finding in report.findings] == [
        "the manifest does not list this file",
        "size differs from the manifest",
        "SHA-256 differs from the manifest",
    ]
    listed = len(json.loads((espalier / MANIFEST).read_text())["files"])
    detail = next(check.detail for check in report.checks if check.name == "manifest")
    assert detail == f"2 of {listed} files wrong; 1 not listed"


def test_half_a_download_is_a_finding(tmp_path: Path) -> None:
    modules = [Exl3Module("model.layers.0.mlp.up_proj", 128, 128), Exl3Module("lm_head", 128, 256)]
    folder = exl3_draft(modules, num_shards=2).write(tmp_path / "e")
    (folder / "model-00002-of-00002.safetensors").unlink()
    report = verify_checkpoint(folder)
    assert (codes(report), report.exit_code) == (["missing-file"], 2)
    assert "is the download complete?" in report.findings[0].message


def test_link_out_of_the_folder_is_refused(espalier: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.json").write_bytes((espalier / "tokenizer.json").read_bytes())
    (espalier / "tokenizer.json").unlink()
    (espalier / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    report = verify_checkpoint(espalier)
    assert set(codes(report)) == {"path-escape"}
    assert report.exit_code == 2


def test_digest_mismatch(espalier: Path) -> None:
    """A wrong digest, one of a module that does not exist, and one that is left out, which is no finding."""

    def change(manifest: dict[str, Any]) -> None:
        digests = manifest["decode_digests"]
        digests["lm_head"] = "0" * 64
        digests["no.such.module"] = "1" * 64
        del digests["model.layers.0.mlp.up_proj"]

    edit_json(espalier / MANIFEST, change)
    report = verify_checkpoint(espalier, deep=True)
    assert codes(report) == ["digest-mismatch"] * 2
    assert [finding.tensor for finding in report.findings] == ["lm_head", "no.such.module"]
    assert report.exit_code == 1


def test_changed_trellis_changes_its_digest(espalier: Path) -> None:
    """With a manifest whose hashes were made to fit, only the digest can tell."""
    with open_checkpoint(espalier) as checkpoint:
        trellis = checkpoint.modules["lm_head"].trellis
        position = trellis.shard.header.data_start + trellis.info.start
    shard = bytearray((espalier / "model.safetensors").read_bytes())
    shard[position] ^= 0x10
    (espalier / "model.safetensors").write_bytes(shard)

    def refit(manifest: dict[str, Any]) -> None:
        entry = manifest["files"]["model.safetensors"]
        entry["sha256"] = hashlib.sha256(shard).hexdigest()
        if "git_blob_sha1" in entry:
            entry["git_blob_sha1"] = hashlib.sha1(b"blob %d\0" % len(shard) + shard).hexdigest()

    edit_json(espalier / MANIFEST, refit)
    report = verify_checkpoint(espalier, deep=True)
    assert [(finding.code, finding.tensor) for finding in report.findings] == [("digest-mismatch", "lm_head")]


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "malformed"), ("[]", "schema"), ('{"manifest_version": 2}', "format-version")],
)
def test_unreadable_manifest_is_one_finding_among_others(espalier: Path, text: str, code: str) -> None:
    (espalier / MANIFEST).write_text(text)
    edit_json(espalier / "config.json", lambda config: config["quantization_config"].update(bits=1.0))
    report = verify_checkpoint(espalier, deep=True)
    assert codes(report) == ["bits-mismatch", code]
    assert report.exit_code == 2


def test_refused_checkpoint_still_has_its_files_checked(espalier: Path) -> None:
    shard = (espalier / "model.safetensors").read_bytes()
    (espalier / "model.safetensors").write_bytes(shard[:-1])
    (espalier / "tokenizer.json").unlink()
    report = verify_checkpoint(espalier, deep=True)
    assert codes(report) == ["truncated", "digest-mismatch", "digest-mismatch"]
    assert report.format is None
    assert report.exit_code == 2


def test_contradiction_is_no_refusal(espalier: Path) -> None:
    """What contradicts itself but can be read is exit code 1, found at opening or later."""
    edit_json(espalier / "model.safetensors.index.json", lambda index: index["weight_map"].popitem())
    report = verify_checkpoint(espalier)
    assert codes(report)[0] == "index-mismatch"
    assert report.exit_code == 1


class OtherReader:
    """Stands for a safetensors library that reads another shape of one tensor."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __enter__(self) -> Self:
        self.reader.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.reader.__exit__(*reason)

    def keys(self) -> list[str]:
        return list(self.reader.keys())

    def get_slice(self, name: str) -> Any:
        return self.reader.get_slice("lm_head.esp_suh" if name == "lm_head.esp_svh" else name)


def test_second_reader_must_agree(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is known that both accept and read differently, so the other reader is made to be wrong."""
    import safetensors

    genuine = safetensors.safe_open
    monkeypatch.setattr("safetensors.safe_open", lambda *args, **more: OtherReader(genuine(*args, **more)))
    report = verify_checkpoint(converted)
    assert [(finding.code, finding.tensor) for finding in report.findings] == [("malformed", "lm_head.esp_svh")]


def test_dtypes_of_newer_libraries_are_left_out_of_the_second_reading(tmp_path: Path) -> None:
    plain = {"a.weight": Tensor("F8_E8M0", (3,), b"abc"), "b.weight": Tensor.of([1, 2], "I32")}
    folder = exl3_draft([Exl3Module("model.x", 128, 128)], plain).write(tmp_path / "e")
    report = verify_checkpoint(folder)
    assert report.exit_code == 0
    assert "left out 1" in next(check.detail for check in report.checks if check.name == "safetensors")


def test_exl3_and_plain_checkpoints(qmoe_exl3: Path, fixtures: Path, tmp_path: Path) -> None:
    """What applies is done: an EXL3 folder is decoded as well, a file of another method is only read."""
    report = verify_checkpoint(qmoe_exl3, deep=True)
    assert outcomes(report) == {
        "structure": "passed", "safetensors": "passed", "index": "skipped", "bits": "skipped",
        "scales": "passed", "manifest": "skipped", "digests": "skipped",
    }  # fmt: skip
    assert report.checks[-1].detail == "168 modules decode; no digests"
    plain = verify_checkpoint(fixtures / "compressed-tensors" / "w4a16_g128_sym.safetensors", deep=True)
    assert [name for name, outcome in outcomes(plain).items() if outcome == "passed"] == ["structure", "safetensors"]
    assert (plain.exit_code, plain.warnings) == (0, ())


def test_one_module_is_no_plural(tmp_path: Path) -> None:
    folder = exl3_draft([Exl3Module("model.x", 128, 128)]).write(tmp_path / "e")
    assert verify_checkpoint(folder, deep=True).checks[-1].detail == "1 module decodes; no digests"
    convert_checkpoint(folder, tmp_path / "o", to="espalier", digests=True)
    detail = verify_checkpoint(tmp_path / "o", deep=True).checks[-1].detail
    assert detail == "1 module, 16,384 weights decoded, all compared"


def test_stale_index_of_an_exl3_checkpoint(tmp_path: Path) -> None:
    modules = [Exl3Module("model.layers.0.mlp.up_proj", 128, 128), Exl3Module("lm_head", 128, 256)]
    draft = exl3_draft(modules, num_shards=2)
    fresh = verify_checkpoint(draft.write(tmp_path / "fresh"))
    draft.index = draft.right_index()
    draft.index["weight_map"].popitem()
    stale = verify_checkpoint(draft.write(tmp_path / "stale"))
    assert (outcomes(fresh)["index"], outcomes(stale)["index"]) == ("passed", "skipped")
    assert stale.exit_code == 0
    assert stale.warnings


def test_output_of_the_way_back_has_a_manifest(converted: Path, tmp_path: Path) -> None:
    convert_checkpoint(converted, tmp_path / "exl3", to="exl3")
    assert outcomes(verify_checkpoint(tmp_path / "exl3"))["manifest"] == "passed"


class TestRecord:
    """``--record``."""

    @staticmethod
    def without_digests(folder: Path) -> dict[str, str]:
        digests: dict[str, str] = json.loads((folder / MANIFEST).read_text())["decode_digests"]
        edit_json(folder / MANIFEST, lambda manifest: manifest.pop("decode_digests"))
        return digests

    def test_adds_all_digests(self, espalier: Path) -> None:
        expected = self.without_digests(espalier)
        (espalier / MANIFEST).chmod(0o640)
        others = {name: data for name, data in content(espalier).items() if name != MANIFEST}
        report = verify_checkpoint(espalier, deep=True, record=True)
        manifest = json.loads((espalier / MANIFEST).read_text())
        assert report.recorded == len(expected) == 15
        assert manifest["decode_digests"] == expected
        assert (espalier / MANIFEST).stat().st_mode & 0o777 == 0o640
        assert {name: data for name, data in content(espalier).items() if name != MANIFEST} == others
        assert verify_checkpoint(espalier, deep=True).exit_code == 0

    def test_says_how_and_what(self, espalier: Path) -> None:
        """That there are none and how to add them; that they were there already; that nothing was added, and why."""

        def digests(**options: bool) -> tuple[str, str]:
            check = verify_checkpoint(espalier, deep=True, **options).checks[-1]
            return check.outcome, check.detail

        self.without_digests(espalier)
        assert digests() == ("skipped", "15 modules decode; no digests (add them: --deep --record)")
        assert digests(record=True) == ("skipped", "15 modules decode; no digests")
        assert digests(record=True)[1].endswith("all compared; nothing to record")
        (espalier / "extra.txt").write_text("?")
        assert digests(record=True)[1].endswith("all compared; nothing recorded")

    def test_digests_are_those_of_the_reference_decoder(self, tmp_path: Path, espalier: Path) -> None:
        self.without_digests(espalier)
        verify_checkpoint(espalier, deep=True, record=True)
        recorded = json.loads((espalier / MANIFEST).read_text())["decode_digests"]
        with open_checkpoint(espalier) as checkpoint:
            for name in ("lm_head", "model.layers.0.self_attn.k_proj"):
                module = checkpoint.modules[name]
                words = decode_codes(module.trellis.array(), module.codebook).view(np.int16).astype("<i2")
                assert recorded[name] == hashlib.sha256(words.tobytes()).hexdigest()

    def test_completes_digests_that_are_there(self, espalier: Path) -> None:
        expected = json.loads((espalier / MANIFEST).read_text())["decode_digests"]
        edit_json(espalier / MANIFEST, lambda manifest: manifest["decode_digests"].pop("lm_head"))
        assert verify_checkpoint(espalier, deep=True, record=True).recorded == 1
        assert json.loads((espalier / MANIFEST).read_text())["decode_digests"] == expected

    def test_changes_nothing_when_complete(self, espalier: Path) -> None:
        before = (espalier / MANIFEST).stat()
        assert verify_checkpoint(espalier, deep=True, record=True).recorded == 0
        after = (espalier / MANIFEST).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_records_nothing_when_something_is_wrong(self, espalier: Path) -> None:
        self.without_digests(espalier)
        (espalier / "tokenizer.json").write_text("{}")
        before = content(espalier)
        report = verify_checkpoint(espalier, deep=True, record=True)
        assert (report.recorded, report.exit_code) == (0, 1)
        assert content(espalier) == before

    def test_failed_write_leaves_the_manifest(self, espalier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.without_digests(espalier)
        before = content(espalier)

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("espalier_format.container.atomic_file.os.fsync", full)
        with pytest.raises(WriteError, match="No space left"):
            verify_checkpoint(espalier, deep=True, record=True)
        assert content(espalier) == before

    def test_usage(self, espalier: Path, llama_exl3: Path) -> None:
        with pytest.raises(UsageError, match="record needs deep"):
            verify_checkpoint(espalier, record=True)
        with pytest.raises(UsageError, match="with a manifest, as convert writes it, and this one is exl3"):
            verify_checkpoint(llama_exl3, deep=True, record=True)
        (espalier / MANIFEST).unlink()
        with pytest.raises(UsageError, match=f"with a manifest, as convert writes it, and this one has no {MANIFEST}"):
            verify_checkpoint(espalier, deep=True, record=True)
