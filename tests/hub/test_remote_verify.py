"""``verify --remote``: the manifest against the Hub's records, headers against the config, nothing downloaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hub.hub_server import Fault, HubServer, Repo, hang_up

from espalier_format.errors import UnreachableError
from espalier_format.hub.address import HubAddress
from espalier_format.hub.client import HubClient
from espalier_format.hub.remote_verify import compare_records, verify_remote
from espalier_format.hub.repository import RemoteFile, RemoteRepository
from espalier_format.operations.verify_report import VerifyReport
from espalier_format.schema.manifest import parse_manifest

NAME = "org/name"
MANIFEST = "espalier_manifest.json"


def check(client: HubClient) -> VerifyReport:
    return verify_remote(HubAddress(NAME), client=client)


def change(repo: Repo, **files: bytes | None) -> None:
    """Commit other content (None: no file) for names in which __ stands for a dot."""
    now = repo.head() | {name.replace("__", "."): data for name, data in files.items() if data is not None}
    for name in (name.replace("__", ".") for name, data in files.items() if data is None):
        del now[name]
    repo.commit("main", now)


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(str(finding.path).removeprefix("hf://org/name/"), finding.message) for finding in report.findings]


def test_good_copy(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    report = check(client)
    assert report.exit_code == 0
    assert [(item.name, item.outcome) for item in report.checks] == [
        ("structure", "passed"),
        ("index", "passed"),
        ("bits", "passed"),
        ("manifest", "passed"),
    ]
    data = (made / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    assert sum(request.sent[0] for request in hub.of("GET", "^/store/")) == header
    assert len(hub.of("GET", "^/api/")) == 1


def test_each_difference_is_named(hub: HubServer, client: HubClient, made: Path) -> None:
    """All at once: a large and a small file of the same size but other content, another size, missing, extra."""
    repo = hub.add(NAME, made)
    shard = bytearray(repo.head()["model.safetensors"])
    shard[-1] ^= 1
    tokenizer = bytearray(repo.head()["tokenizer.json"])
    tokenizer[-2] ^= 1
    change(
        repo,
        model__safetensors=bytes(shard),
        tokenizer__json=bytes(tokenizer),
        generation_config__json=b"{}",
        tokenizer_config__json=None,
        extra__bin=b"x",
        README__md=b"# anything",
    )
    report = check(client)
    assert found(report) == [
        ("extra.bin", "the manifest does not list this file"),
        ("generation_config.json", "size differs from the manifest"),
        ("model.safetensors", "SHA-256 differs from the manifest"),
        ("tokenizer.json", "git blob SHA-1 differs from the manifest"),
        ("tokenizer_config.json", "the manifest lists this file, but it is not there"),
    ]
    assert {finding.code for finding in report.findings} == {"digest-mismatch"}
    assert report.exit_code == 1


def test_header_against_config(hub: HubServer, client: HubClient, made: Path) -> None:
    """A config that was changed together with the manifest still disagrees with the shard."""
    repo = hub.add(NAME, made)
    config = json.loads(repo.head()["config.json"])
    module = next(iter(config["quantization_config"]["modules"]))
    config["quantization_config"]["modules"][module]["in_features"] += 128
    change(repo, config__json=json.dumps(config).encode())
    codes = [finding.code for finding in check(client).findings]
    assert codes[0] == "shape"
    assert codes[1:] == ["digest-mismatch"]


def test_refused_config_is_a_finding(hub: HubServer, client: HubClient, made: Path) -> None:
    repo = hub.add(NAME, made)
    change(repo, config__json=repo.head()["config.json"].replace(b'"format_version": 1', b'"format_version": 2'))
    report = check(client)
    assert [finding.code for finding in report.findings] == ["format-version", "digest-mismatch"]
    assert report.exit_code == 2


@pytest.mark.parametrize(
    ("content", "code"), [(b"{", "malformed"), (b"[]", "schema"), (b'{"manifest_version": 2}', "format-version")]
)
def test_manifest_that_cannot_be_read(content: bytes, code: str, hub: HubServer, client: HubClient, made: Path) -> None:
    change(hub.add(NAME, made), espalier_manifest__json=content)
    assert [finding.code for finding in check(client).findings] == [code]


def test_without_manifest(hub: HubServer, client: HubClient, llama_exl3: Path) -> None:
    hub.add(NAME, llama_exl3)
    report = check(client)
    assert report.exit_code == 0
    assert report.checks[-1].outcome == "skipped"
    assert "no manifest" in report.warnings[-1]


def test_hash_that_nobody_recorded() -> None:
    """A file of more than 10 MiB outside of LFS has no hash in common with the manifest: said, not passed over."""
    size = 20_000_000
    files = {"big.json": RemoteFile("big.json", size, None, "0" * 40)}
    entry = {"size": size, "sha256": "0" * 64}
    document = {"manifest_version": 1, "producer": {"name": "x", "version": "1"}, "files": {"big.json": entry}}
    (finding,) = compare_records(RemoteRepository(HubAddress(NAME), "0" * 40, False, files), parse_manifest(document))
    assert finding.message == "the Hub records no hash of this file that the manifest has"


def test_unreachable_is_no_finding(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault(MANIFEST, hang_up, times=100))
    with pytest.raises(UnreachableError):
        check(client)
