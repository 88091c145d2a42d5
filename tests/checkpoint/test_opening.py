"""open_checkpoint: what a path is taken for, and plain checkpoints."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from builders import INDEX, Draft, Exl3Module, Tensor, espalier_draft, exl3_draft, safetensors_bytes

import espalier_format
from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import (
    DuplicateTensorError,
    LimitError,
    MalformedError,
    MissingFileError,
    PathError,
    SchemaError,
    SourceError,
    TruncatedError,
    UsageError,
)


@pytest.fixture
def plain() -> Draft:
    shards = {f"model-0000{n}-of-00002.safetensors": {f"t{n}": Tensor("F16", (2,), bytes(4))} for n in (1, 2)}
    return Draft({"model_type": "llama"}, shards)


def test_plain_tensors_are_a_mapping(tmp_path: Path, plain: Draft) -> None:
    """Of every format: asking for one does not go through all."""
    drafts = {
        "espalier": espalier_draft(),
        "exl3": exl3_draft([Exl3Module("lm_head", 128, 128, 1)], {"norm.weight": Tensor("F32", (4,), bytes(16))}),
        "plain": plain,
    }
    for format_name, draft in drafts.items():
        with open_checkpoint(draft.write(tmp_path / format_name)) as checkpoint:
            assert checkpoint.format == format_name
            assert isinstance(checkpoint.plain, Mapping)
            assert checkpoint.plain
            assert all(tensor.name == name for name, tensor in checkpoint.plain.items())


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (exl3_draft([Exl3Module("lm_head", 128, 128, 1)]), True),
        (espalier_draft(source={"format": "exl3"}), True),
        (espalier_draft(source={"format": "huggingface"}), False),
        (espalier_draft(), False),
    ],
)
def test_was_exl3(draft: Draft, expected: bool, tmp_path: Path) -> None:
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.was_exl3 is expected


def test_a_plain_folder(tmp_path: Path, plain: Draft) -> None:
    plain.files["notes.txt"] = b"x"
    with open_checkpoint(str(plain.write(tmp_path))) as checkpoint:
        assert checkpoint.format == "plain"
        assert tuple(checkpoint.plain) == ("t1", "t2")
        assert dict(checkpoint.modules) == {}
        assert dict(checkpoint.expert_banks) == {}
        assert checkpoint.other_files == ("notes.txt",)
        assert checkpoint.warnings == ()
        assert checkpoint.config == {"model_type": "llama"}


def test_a_plain_folder_without_config(tmp_path: Path, plain: Draft) -> None:
    plain.config = None
    with open_checkpoint(plain.write(tmp_path)) as checkpoint:
        assert checkpoint.config == {}


def test_half_a_plain_download_is_refused(tmp_path: Path, plain: Draft) -> None:
    plain.write(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model-00001-of-00002\.safetensors, which is not there"):
        open_checkpoint(tmp_path)
    open_checkpoint(tmp_path / "model-00002-of-00002.safetensors").close()


def test_a_checkpoint_prints_as_one_short_line(llama_exl3: Path) -> None:
    with open_checkpoint(llama_exl3) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint {llama_exl3}: exl3, 15 quantized modules, 66 tensors, 1 shard>"


def test_messages_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        open_checkpoint(".")
    assert str(caught.value) == ".: the folder holds no *.safetensors"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(TruncatedError) as caught_below:
        open_checkpoint("there")
    assert str(caught_below.value).startswith("there/model.safetensors: ")
    (tmp_path / "there" / "config.json").write_text("{")
    with pytest.raises(MalformedError) as caught_config:
        open_checkpoint("there")
    assert str(caught_config.value).startswith("there/config.json: ")


def test_a_plain_file(fixtures: Path) -> None:
    with open_checkpoint(fixtures / "compressed-tensors" / "w4a16_g128_sym.safetensors") as checkpoint:
        assert checkpoint.format == "plain"
        assert len(checkpoint.tensors) == len(checkpoint.plain) > 0
        assert checkpoint.other_files == ()


def test_a_lone_file_is_alone(tmp_path: Path, plain: Draft) -> None:
    """The rest of its folder, here a broken config.json, is not looked at."""
    plain.write(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with open_checkpoint(tmp_path / "model-00002-of-00002.safetensors") as checkpoint:
        assert tuple(checkpoint.plain) == ("t2",)
        assert checkpoint.config == {}


def test_a_stale_index_is_a_warning(tmp_path: Path, plain: Draft) -> None:
    plain.index = plain.right_index()
    del plain.index["weight_map"]["t1"]
    with open_checkpoint(plain.write(tmp_path)) as checkpoint:
        assert "t1" in checkpoint.warnings[0]
        assert tuple(checkpoint.plain) == ("t1", "t2")


def test_many_differences_are_one_line(tmp_path: Path, plain: Draft) -> None:
    plain.index = plain.right_index()
    plain.index["weight_map"].update({f"x{number}": "model-00001-of-00002.safetensors" for number in range(100)})
    with open_checkpoint(plain.write(tmp_path)) as checkpoint:
        assert len(checkpoint.warnings) == 1
        assert "97 more differences" in checkpoint.warnings[0]


def test_differing_duplicates(tmp_path: Path, plain: Draft) -> None:
    plain.shards["model-00002-of-00002.safetensors"]["t1"] = Tensor("F16", (2,), b"\1\0\0\0")
    plain.index = None
    with pytest.raises(DuplicateTensorError):
        open_checkpoint(plain.write(tmp_path))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nowhere.safetensors")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path)
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{", MalformedError),
        ("[]", SchemaError),
        ('{"a": 1, "a": 1}', MalformedError),
        ("[" * 65 + "]" * 65, LimitError),
        ('{"a": "' + "x" * (1024 * 1024 + 1) + '"}', LimitError),
    ],
)
def test_a_bad_config(tmp_path: Path, plain: Draft, text: str, kind: type[Exception]) -> None:
    plain.write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(kind):
        open_checkpoint(tmp_path)


def test_infinity_in_a_config_is_fine_outside_the_block(tmp_path: Path) -> None:
    """Real ones have it."""
    draft = espalier_draft(config={"rope_scale": float("inf")})
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.config["rope_scale"] == float("inf")


def test_links(tmp_path: Path) -> None:
    """Out of the folder: refused. Within a Hugging Face cache: followed."""
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(safetensors_bytes({"x": Tensor("F16", (1,), bytes(2))}))
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(PathError):
        open_checkpoint(folder)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(espalier_draft().write(tmp_path / "b").iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.format == "espalier"


def test_the_collector_is_left_alone(tmp_path: Path, plain: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the program, not to a library that it calls from one of its threads."""

    def refuse() -> None:
        raise AssertionError

    for name in ("disable", "enable", "freeze"):
        monkeypatch.setattr(gc, name, refuse)
    open_checkpoint(plain.write(tmp_path)).close()


def test_the_package_exports_it(tmp_path: Path, plain: Draft) -> None:
    with espalier_format.open_checkpoint(plain.write(tmp_path)) as checkpoint:
        assert isinstance(checkpoint, espalier_format.Checkpoint)
    assert json.loads((tmp_path / INDEX).read_text())


def test_all_public_names_exist() -> None:
    assert set(espalier_format.__all__) <= set(dir(espalier_format))
    for name in espalier_format.__all__:
        assert getattr(espalier_format, name) is not None
    with pytest.raises(AttributeError):
        espalier_format.nothing  # noqa: B018


HEAVY = "torch numba transformers huggingface_hub rich typer safetensors compressed_tensors"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import espalier_format", f"{HEAVY} numpy pydantic"),
        ("from espalier_format import open_checkpoint", f"{HEAVY} pydantic"),
        ("import espalier_format; list(espalier_format.open_checkpoint(PATH).modules.values())", HEAVY),
    ],
)
def test_imports_are_lazy(tmp_path: Path, statement: str, absent: str) -> None:
    """Opening a checkpoint must not cost the import of what only other work needs."""
    folder = espalier_draft().write(tmp_path)
    program = f"import sys; PATH = {str(folder)!r}; {statement}; print(*({set(absent.split())} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "\n"


def test_usage_error_for_an_empty_path() -> None:
    with pytest.raises(UsageError, match="empty"):
        open_checkpoint("")


def test_missing_file_error_for_a_folder_in_which_a_writer_was_killed(tmp_path: Path, plain: Draft) -> None:
    plain.config = None
    plain.write(tmp_path)
    (tmp_path / ".espalier-in-progress").mkdir()
    with pytest.raises(MissingFileError, match="never finished"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    open_checkpoint(tmp_path).close()


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 3000])
def test_paths_that_the_system_refuses(name: str) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        open_checkpoint(name)
