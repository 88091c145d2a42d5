"""The commands, each in a process of its own with HF_ENDPOINT, HF_TOKEN and HF_HOME set, as a user runs them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hub.hub_server import SIGNED_QUERY, TOKEN, Fault, HubServer, folder_files, hang_up, status
from huggingface_hub import snapshot_download

Run = Callable[..., subprocess.CompletedProcess[str]]
NAME = "org/name"


def test_inspect(hub: HubServer, run: Run, made: Path, tmp_path: Path) -> None:
    hub.add(NAME, made, private=True)
    result = run("inspect", "hf://org/name@main", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    there, here = json.loads(result.stdout), json.loads(run("inspect", made, "--json").stdout)
    assert there["path"] == "hf://org/name@main"
    assert {**there, "path": "", "files": ""} == {**here, "path": "", "files": ""}
    # With the token that `hf auth login` stores, this time.
    (tmp_path / "hf-home").mkdir(exist_ok=True)
    (tmp_path / "hf-home" / "token").write_text(TOKEN, encoding="ascii")
    people = run("inspect", NAME, HF_TOKEN="")
    assert people.stdout.startswith("org/name\n  format   Espalier 1, written by espalier-format")


def test_path_or_repository(hub: HubServer, run: Run, made: Path, llama_exl3: Path, tmp_path: Path) -> None:
    hub.add(NAME, made)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(llama_exl3)
    assert json.loads(run("inspect", "org/name", "--json").stdout)["format"] == "exl3"
    assert json.loads(run("inspect", "hf://org/name", "--json").stdout)["format"] == "espalier"
    for source in ("./org/another", "another"):
        result = run("inspect", source)
        assert (result.returncode, hub.of("GET", "another")) == (2, [])
        assert result.stderr.startswith("error[missing-file]: ")
    result = run("inspect", "org/another")
    assert result.returncode == 2
    assert result.stderr.startswith("error[hub]: hf://org/another: there is no such repository")
    assert "there is no path of this name either" in result.stderr


def test_verify_remote(hub: HubServer, run: Run, made: Path) -> None:
    repo = hub.add(NAME, made)
    assert run("verify", NAME, "--remote").returncode == 0
    files = folder_files(made)
    repo.commit("main", files | {"tokenizer.json": files["tokenizer.json"] + b" "})
    result = run("verify", NAME, "--remote", "--json")
    assert result.returncode == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["path"] == "hf://org/name/tokenizer.json"
    assert (finding["code"], finding["expected"] + 1) == ("digest-mismatch", finding["got"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("verify", NAME),
            "add --remote to verify it there, or, to verify its files, download it: hf download org/name",
        ),
        (("verify", ".", "--remote"), "remote needs a repository"),
        (("verify", NAME, "--remote", "--deep"), "deep and record need the tensors"),
        (("verify", "hf://datasets/a/b", "--remote"), "is no repository"),
        (("upload", ".", "a/b/c"), "is no repository"),
        (("verify", ".", "--public-key", "a.pem", "--certificate-chain", "b.pem"), "give one of them"),
        (
            ("sign", ".", "--private-key", "a.pem", "--certificate-chain", "b.pem"),
            "--certificate-chain needs --certificate",
        ),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str, hub: HubServer, run: Run) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error[usage]: ")
    assert message in result.stderr
    assert hub.requests == []


def test_convert_needs_the_files(hub: HubServer, run: Run, tmp_path: Path) -> None:
    result = run("convert", NAME, "out", "--to", "espalier")
    assert (result.returncode, hub.requests) == (2, [])
    assert result.stderr.startswith(
        "error[usage]: org/name is not on this machine; to convert it, download it: hf download"
    )
    assert not (tmp_path / "out").exists()


def test_upload_and_back(hub: HubServer, run: Run, espalier: Path, tmp_path: Path) -> None:
    """Published, downloaded by huggingface_hub, and verified to the last code."""
    result = run(
        "upload", espalier, NAME, "--private", "--base-model", "org/base", "--license", "mit", "--message", "m"
    )
    assert result.returncode == 0, result.stderr
    assert "nothing wrong" in result.stdout
    assert "Traceback" not in result.stderr
    repo = hub.repos[NAME]
    assert repo.private
    assert b"base_model: org/base" in repo.head()["README.md"]
    assert repo.history[-1][2] == "m"
    again = run("upload", espalier, NAME, "--json")
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(again.stdout)["added"] == []
    snapshot_download(NAME, endpoint=hub.endpoint, token=TOKEN, local_dir=tmp_path / "copy")
    deep = run("verify", tmp_path / "copy", "--deep", "--json")
    assert deep.returncode == 0, deep.stdout
    assert [check["outcome"] for check in json.loads(deep.stdout)["checks"]].count("passed") == 7


def test_upload_of_what_is_wrong(hub: HubServer, run: Run, espalier: Path) -> None:
    (espalier / "tokenizer.json").write_bytes(b"{}")
    result = run("upload", espalier, NAME)
    assert result.returncode == 1
    assert "error[digest-mismatch]" in result.stderr
    assert result.stderr.endswith("nothing was published\n")
    assert hub.requests == []


def test_offline(hub: HubServer, run: Run, made: Path) -> None:
    hub.add(NAME, made)
    result = run("inspect", NAME, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert result.stderr.startswith("error[hub-unreachable]: hf://org/name: HF_HUB_OFFLINE is set")
    snapshot_download(NAME, endpoint=hub.endpoint, token=TOKEN)
    hub.requests.clear()
    result = run("inspect", NAME, "--json", HF_HUB_OFFLINE="1")
    assert (result.returncode, result.stderr, hub.requests) == (0, "", [])
    assert json.loads(result.stdout)["format"] == "espalier"
    assert run("verify", NAME, "--remote", HF_HUB_OFFLINE="1").returncode == 2


def test_signature(hub: HubServer, run: Run, espalier: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="the extra [sign] is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    pem = serialization.Encoding.PEM
    secret = serialization.BestAvailableEncryption(b"only a test")
    (tmp_path / "private.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, secret))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    result = run("sign", espalier, "--private-key", "private.pem")
    assert result.returncode == 2
    assert "the private key is encrypted; set ESPALIER_KEY_PASSWORD" in result.stderr
    result = run("sign", espalier, "--private-key", "private.pem", ESPALIER_KEY_PASSWORD="only a test")
    assert (result.returncode, result.stderr) == (0, "")
    result = run("verify", espalier, "--public-key", "public.pem", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["checks"][-1]["check"] == "signature"
    hub.add(NAME, espalier)
    assert run("verify", NAME, "--remote", "--public-key", "public.pem").returncode == 0
    manifest = espalier / "espalier_manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    result = run("verify", espalier, "--public-key", "public.pem")
    assert result.returncode == 1
    assert "error[signature]" in result.stderr


def test_no_secret_is_ever_shown(hub: HubServer, run: Run, espalier: Path) -> None:
    """Not when all is well, and not when servers put secrets into their messages."""
    echo = f"Bearer {TOKEN} at {hub.cdn}/x?{SIGNED_QUERY}"
    shown = []

    def show(*arguments: str | Path, fault: Fault | None = None, **variables: str) -> None:
        hub.faults = [fault] if fault is not None else []
        result = run(*arguments, **variables)
        shown.append((arguments, result.returncode, result.stdout + result.stderr))

    upload = ("upload", espalier, NAME, "--debug")
    show(*upload, fault=Fault("^/store/", hang_up, method="PUT", host="cdn"))
    show("inspect", NAME, "--json", fault=Fault("^/api/models", status(403, "", echo)))
    show("inspect", NAME, "--debug", fault=Fault("^/store/", status(403, "", echo), host="cdn"))
    (espalier / "README.md").write_text("# another\n\ntext\n", encoding="utf-8")
    show(*upload, fault=Fault("/preupload/", status(400, "", echo), method="POST"))
    show(*upload, fault=Fault("/commit/", status(500, "", echo), method="POST"))
    assert [code for _, code, _ in shown] == [0, 2, 2, 2, 2]
    for arguments, _, text in shown:
        assert TOKEN not in text, arguments
        assert SIGNED_QUERY not in text, arguments
    assert any("Traceback" in text for _, _, text in shown)
    assert not any(TOKEN in path.read_text("utf-8", "replace") for path in espalier.iterdir() if path.is_file())
    # With all the logging that huggingface_hub has it names URLs, but never the token.
    show("inspect", NAME, HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
    assert "curl" in shown[-1][2]
    assert TOKEN not in shown[-1][2]
