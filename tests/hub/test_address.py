"""How a repository is named, and told apart from a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier_format.errors import UsageError
from espalier_format.hub.address import HubAddress, local_path, locate


@pytest.mark.parametrize(
    ("text", "repo_id", "revision"),
    [
        ("org/name", "org/name", None),
        ("hf://org/name", "org/name", None),
        ("org/name@main", "org/name", "main"),
        ("hf://org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("Org-1/na.me_2@0123abc", "Org-1/na.me_2", "0123abc"),
        ("hf://gpt2", "gpt2", None),
    ],
)
def test_repository(text: str, repo_id: str, revision: str | None) -> None:
    assert locate(text) == HubAddress(repo_id, revision)


@pytest.mark.parametrize(
    "text",
    [
        "./org/name",
        "../name",
        "/org/name",
        "~/name",
        "org/name/",
        "org/name.safetensors",
        "name",
        "a/b/c",
        "org/na me",
        "org/name@",
        "org/-name",
        ".",
    ],
)
def test_path_although_nothing_is_there(text: str) -> None:
    assert isinstance(locate(text), Path)


def test_path_object_is_a_path() -> None:
    assert locate(Path("org/name")) == Path("org/name")


def test_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(locate("org/name"), HubAddress)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to("nowhere")
    assert locate("org/name") == Path("org/name")
    assert locate("hf://org/name") == HubAddress("org/name")


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf:///name", "hf://a/b/c", "hf://datasets/a/b", "hf://a/b@", "hf://a/b@x y", "hf://a/..", "hf://a/b?c"],
)
def test_scheme_with_something_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"org/name"):
        locate(text)


def test_names_of_remote_files_print_as_addresses() -> None:
    """Under every Python that is supported: how paths are subclassed differs between 3.11 and 3.12."""
    root = HubAddress("org/name", "refs/pr/1").root
    assert str(root) == "hf://org/name@refs/pr/1"
    assert f"{root / 'sub' / 'config.json'}" == "hf://org/name@refs/pr/1/sub/config.json"
    assert (root / "config.json").name == "config.json"
    assert not (root / "config.json").exists()


def test_operation_on_files_says_how_to_get_them(tmp_path: Path) -> None:
    assert local_path(tmp_path, "to convert it") == tmp_path
    with pytest.raises(UsageError, match=r"hf download org/name --local-dir name"):
        local_path("org/name", "to convert it")
