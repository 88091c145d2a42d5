"""A Hub on loopback, a client for it, and real checkpoints to put there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub.hub_server import TOKEN, HubServer
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from espalier_format.hub.client import HubClient
from espalier_format.operations.convert import convert_checkpoint


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, token or setting of whoever runs the tests is seen; uploads go over LFS, which the server speaks.

    huggingface_hub reads its settings when it is imported, which another test may have done long ago.
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
    close_session()


@pytest.fixture
def client(hub: HubServer) -> HubClient:
    """A client that may see and write everything, and loses patience soon."""
    return HubClient(hub.endpoint, TOKEN, first_pause=0.01, timeout=5.0)


@pytest.fixture(scope="session")
def made(llama_exl3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama fixture as an Espalier checkpoint with decode digests; not to be changed."""
    folder = tmp_path_factory.mktemp("hub") / "llama-espalier"
    convert_checkpoint(llama_exl3, folder, to="espalier", digests=True)
    return folder


@pytest.fixture
def espalier(made: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(made, tmp_path / "llama-espalier"))


@pytest.fixture
def run(hub: HubServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own, as a user with a token does."""

    def command(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf-home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": TOKEN,
            **variables,
        }
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "espalier_format", *map(str, arguments)],
            env={name: value for name, value in environment.items() if value},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=False,
        )

    return command
