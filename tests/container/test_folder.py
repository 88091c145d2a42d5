from __future__ import annotations

import os
from pathlib import Path

import pytest

from espalier_format.container import folder as folder_module
from espalier_format.container.folder import CheckpointFolder, check_name
from espalier_format.container.shard import Shard
from espalier_format.errors import LimitError, MissingFileError, PathError, SourceError


@pytest.mark.parametrize("name", ["a", "a.safetensors", "sub/a", "a..b", "..a", ".gitattributes", "é", "a b", "ab:c"])
def test_safe_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "/etc/passwd",
        "../a",
        "a/../../b",
        "a/..",
        "a//b",
        "a/",
        "./a",
        "a/./b",
        "..\\a",
        "a\\b",
        "C:/a",
        "c:a",
        "a\0",
        "a\nb",
        "a\x7f",
        "a\x85",
        "\udc80",
    ],
)
def test_path_error_for_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(PathError) as caught:
        check_name(name, path="index.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(PathError):
        CheckpointFolder(tmp_path).resolve(name)


def test_files_and_shards(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "b.safetensors",
        "a.safetensors",
        "sub/deep/x.txt",
        "sub/c.safetensors",
        ".gitattributes",
        ".git/config",
        ".cache/huggingface/x",
        "sub/.hidden/y",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    folder = CheckpointFolder(tmp_path)
    assert folder.files() == [
        ".gitattributes",
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "sub/c.safetensors",
        "sub/deep/x.txt",
    ]
    assert folder.shard_names() == ["a.safetensors", "b.safetensors"]
    assert folder.resolve("sub/deep/x.txt") == (tmp_path / "sub/deep/x.txt").resolve()
    assert folder.has("config.json")
    assert not folder.has("no.json")


def test_special_files_are_no_files_but_shards_stay_listed(tmp_path: Path) -> None:
    """So that `Shard` refuses them, and nobody takes the checkpoint for complete without them."""
    os.mkfifo(tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "pipe")
    folder = CheckpointFolder(tmp_path)
    assert folder.files() == []
    assert folder.shard_names() == ["x.safetensors"]


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").symlink_to("../a")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    folder = CheckpointFolder(tmp_path)
    assert folder.files() == ["a", "c", "sub/b"]
    assert folder.resolve("sub/b") == (tmp_path / "a").resolve()


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").touch()
    (tmp_path / "link").symlink_to("real")
    folder = CheckpointFolder(tmp_path / "link")
    assert folder.files() == ["a"]
    assert folder.resolve("a") == (tmp_path / "real" / "a").resolve()


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd", "sub/../../outside", "."])
def test_path_error_for_links_out_of_the_folder(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").touch()
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "x.safetensors").symlink_to(target)
    folder = CheckpointFolder(root)
    with pytest.raises(PathError):
        folder.files()
    with pytest.raises(PathError):
        folder.resolve("x.safetensors")


def test_path_error_for_a_link_through_a_second_link(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "b").symlink_to("../outside")
    (root / "a").symlink_to("b")
    with pytest.raises(PathError):
        CheckpointFolder(root).resolve("a")


def test_path_error_for_linked_folders(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").touch()
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "inside" / "x").touch()
    folder = CheckpointFolder(root)
    (root / "link").symlink_to("../outside")
    with pytest.raises(PathError):
        folder.files()
    with pytest.raises(PathError):
        folder.resolve("link/x")
    (root / "link").unlink()
    (root / "link").symlink_to("inside")
    with pytest.raises(PathError):
        folder.files()
    (root / "link").unlink()
    (root / "inside" / "again").symlink_to("..")
    with pytest.raises(PathError):
        folder.files()


def test_path_error_for_circular_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(PathError):
        folder.resolve("a")
    with pytest.raises(PathError):
        folder.files()
    with pytest.raises(PathError):
        CheckpointFolder(tmp_path / "a")


def test_missing_file_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(MissingFileError):
        folder.resolve("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(MissingFileError):
        folder.resolve("dangling")
    with pytest.raises(MissingFileError):
        folder.files()
    with pytest.raises(MissingFileError):
        CheckpointFolder(tmp_path / "no")
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError):
        folder.resolve("file/x")


def test_source_error_when_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError):
        CheckpointFolder(tmp_path / "file")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A repository in the layout of the Hugging Face cache, with secrets around it."""
    repository = tmp_path / "hub" / "models--o--n"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    (blobs / "aaaa").write_text("config")
    (blobs / "bbbb").write_text("nested")
    (repository / "secret").write_text("secret")
    (blobs / "deep").mkdir()
    (blobs / "deep" / "cccc").write_text("too deep")
    other = tmp_path / "hub" / "models--o--other" / "blobs"
    other.mkdir(parents=True)
    (other / "dddd").write_text("of another model")
    (snapshot / "config.json").symlink_to("../../blobs/aaaa")
    (snapshot / "sub" / "x.json").symlink_to("../../../blobs/bbbb")
    return snapshot


def test_hugging_face_cache(cache: Path) -> None:
    folder = CheckpointFolder(cache)
    assert folder.files() == ["config.json", "sub/x.json"]
    assert folder.resolve("config.json").read_text() == "config"
    assert folder.resolve("sub/x.json").read_text() == "nested"


@pytest.mark.parametrize(
    "target",
    [
        "../../secret",
        "../../blobs/deep/cccc",
        "../../../models--o--other/blobs/dddd",
        "../../blobs",
        "../../blobs/deep",
    ],
)
def test_path_error_for_other_links_in_a_cache(cache: Path, target: str) -> None:
    (cache / "evil").symlink_to(target)
    folder = CheckpointFolder(cache)
    with pytest.raises(PathError):
        folder.files()


def test_path_error_for_a_blob_that_is_a_link(cache: Path) -> None:
    (cache / "../../blobs/eeee").symlink_to("../secret")
    (cache / "evil").symlink_to("../../blobs/eeee")
    with pytest.raises(PathError):
        CheckpointFolder(cache).resolve("evil")


def test_path_error_for_blobs_without_the_cache_layout(cache: Path) -> None:
    """The exception is for snapshots/<revision> alone, not for any folder beside a folder called blobs."""
    with pytest.raises(PathError):
        CheckpointFolder(cache / "sub").resolve("x.json")


@pytest.mark.parametrize("name", ["a" * 256, "é" * 128, "x/" * 32 + "y", "a/" + "b" * 256])
def test_path_error_for_names_too_long_or_too_deep(name: str) -> None:
    with pytest.raises(PathError, match="too long or too deep"):
        check_name(name)


def test_names_at_the_limits() -> None:
    for name in ("a" * 255, "é" * 127, "x/" * 31 + "y"):
        assert check_name(name) == name


def test_too_many_shards_are_not_all_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty links to one large shard: counting begins before the last one is read."""
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = b'{"a":' + entry + b',"b":' + entry + b"}"
    (tmp_path / "0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for number in range(1, 30):
        (tmp_path / f"{number}.safetensors").symlink_to("0.safetensors")
    opened = []
    real = folder_module.Shard

    def shard(path: Path, *, name: str) -> Shard:
        opened.append(name)
        return real(path, name=name)

    monkeypatch.setattr(folder_module, "Shard", shard)
    monkeypatch.setattr(folder_module, "MAX_TENSORS", 5)
    with pytest.raises(LimitError, match="more tensors"):
        CheckpointFolder(tmp_path).open_shards()
    assert len(opened) == 3
