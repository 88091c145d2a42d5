"""Publishing: what arrives is what was verified, at once, without a trace of anybody else's work lost.

Uploads go over LFS; the Xet protocol of the real Hub is huggingface_hub's and is not tested.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub.hub_server import SIGNED_QUERY, TOKEN, Fault, Handler, HubServer, after_done, folder_files, hang_up, status
from huggingface_hub import snapshot_download

from espalier_format.errors import HubError, SchemaError, SourceError, UnreachableError, UsageError
from espalier_format.hub.client import HubClient
from espalier_format.hub.upload import UploadOptions, upload_checkpoint
from espalier_format.hub.upload_plan import CommitLimits
from espalier_format.hub.upload_report import UploadReport

NAME = "org/llama"
SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "espalier_manifest.json"
COMMIT = r"/commit/"


def publish(folder: Path, client: HubClient, **options: Any) -> UploadReport:
    return upload_checkpoint(folder, NAME, UploadOptions(**options), client=client)


def without_attributes(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != ".gitattributes"}


def test_new_repository(hub: HubServer, client: HubClient, espalier: Path) -> None:
    before = folder_files(espalier)
    report = publish(espalier, client, message="my words")
    repo = hub.repos[NAME]
    assert report.exit_code == 0
    assert report.created
    assert report.remote is not None
    assert {check.name: check.outcome for check in report.remote.checks}["manifest"] == "passed"
    assert not repo.private
    # The folder has got a card, nothing else has changed, and the repository has exactly that.
    after = folder_files(espalier)
    assert {name: data for name, data in after.items() if name != "README.md"} == before
    assert without_attributes(repo.head()) == after
    assert [(branch, message) for branch, _, message in repo.history] == [
        ("main", "initial commit"),
        ("main", "my words"),
    ]
    assert report.commit == repo.branches["main"]
    (sent,) = hub.of("PUT", "")
    assert sent.body == before[SHARD]
    assert not any(TOKEN in str(request.headers) for request in hub.requests if request.host == "cdn")


def test_private(hub: HubServer, client: HubClient, espalier: Path) -> None:
    publish(espalier, client, private=True)
    assert hub.repos[NAME].private
    publish(espalier, client, private=True)
    hub.repos[NAME].private = False
    with pytest.raises(UsageError, match="is there already, and public"):
        publish(espalier, client, private=True)


def test_nothing_is_made_on_the_hub_before_a_refusal(hub: HubServer, client: HubClient, espalier: Path) -> None:
    """Neither a branch nor a repository is left behind, whatever the reason."""
    hub.add(NAME, {"chart.png": b"x"})
    for options, reason in (({"private": True}, "and public"), ({}, "--prune")):
        with pytest.raises(UsageError, match=reason):
            publish(espalier, client, revision="v1", **options)
        assert list(hub.repos[NAME].branches) == ["main"]
    (espalier / "README.md").write_text("---\nlicense: [\n---\n", encoding="utf-8")
    with pytest.raises(SchemaError):
        upload_checkpoint(espalier, "org/new", client=client)
    assert "org/new" not in hub.repos
    assert hub.of("POST", "") == []


def test_a_new_branch_of_a_new_repository(hub: HubServer, client: HubClient, espalier: Path) -> None:
    report = publish(espalier, client, revision="v1", private=True)
    repo = hub.repos[NAME]
    assert (report.exit_code, report.created, report.revision, repo.private) == (0, True, "v1", True)
    assert without_attributes(repo.head()) == {}
    assert without_attributes(repo.head("v1")) == folder_files(espalier)


def test_again_changes_nothing(hub: HubServer, client: HubClient, espalier: Path) -> None:
    first = publish(espalier, client)
    hub.requests.clear()
    second = publish(espalier, client)
    assert second.exit_code == 0
    assert second.commit == first.commit
    assert second.added == second.deleted == ()
    assert sorted(second.unchanged) == sorted(folder_files(espalier))
    assert {request.method for request in hub.requests} == {"GET"}


def test_what_fails_is_not_published(hub: HubServer, client: HubClient, espalier: Path) -> None:
    shard = bytearray((espalier / SHARD).read_bytes())
    shard[-1] ^= 1
    (espalier / SHARD).write_bytes(shard)
    report = publish(espalier, client)
    assert report.remote is None
    assert report.exit_code == 1
    assert {finding.code for finding in report.local.findings} == {"digest-mismatch"}
    assert hub.requests == []
    assert not (espalier / "README.md").exists()


def test_folder_without_manifest_gets_one(hub: HubServer, client: HubClient, llama_exl3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama_exl3, tmp_path / "exl3"))
    report = publish(folder, client)
    assert report.exit_code == 0
    listed = json.loads((folder / MANIFEST).read_bytes())["files"]
    assert sorted(listed) == sorted(folder_files(llama_exl3))
    assert without_attributes(hub.repos[NAME].head()) == folder_files(folder)
    assert "exl3-mcg@3" in (folder / "README.md").read_text(encoding="utf-8")


def test_interrupted_upload_continues(hub: HubServer, client: HubClient, espalier: Path) -> None:
    """The large file has arrived, the commit has not: the second run sends no large file."""
    hub.faults.append(Fault(COMMIT, hang_up, method="POST"))
    with pytest.raises(UnreachableError):
        publish(espalier, client)
    assert SHARD not in hub.repos[NAME].head()
    assert len(hub.of("PUT", "")) == 1
    assert publish(espalier, client).exit_code == 0
    assert len(hub.of("PUT", "")) == 1
    assert SHARD in hub.repos[NAME].head()


def test_transfer_that_fails_in_passing(hub: HubServer, client: HubClient, espalier: Path) -> None:
    hub.faults.append(Fault("^/store/", hang_up, method="PUT", host="cdn"))
    assert publish(espalier, client).exit_code == 0
    assert len(hub.of("PUT", "")) == 2


def test_corrupted_transfer_is_not_committed(hub: HubServer, client: HubClient, espalier: Path) -> None:
    hub.faults.append(
        Fault("^/store/", status(400, "", "the content has another hash"), method="PUT", host="cdn", times=9)
    )
    with pytest.raises(HubError, match="another hash"):
        publish(espalier, client)
    assert hub.of("POST", COMMIT) == []


def test_lost_answer_of_a_commit(hub: HubServer, client: HubClient, espalier: Path) -> None:
    """The commit was made, so it is not made again, and nobody is accused of it."""
    hub.faults.append(Fault(COMMIT, after_done, method="POST"))
    report = publish(espalier, client)
    assert report.exit_code == 0
    assert report.commit == hub.repos[NAME].branches["main"]
    assert len(hub.of("POST", COMMIT)) == 1


def test_commit_of_somebody_else_meanwhile(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {"README.md": b"# llama\n"})

    def push(handler: Handler) -> bool:
        repo.commit("main", repo.head() | {"README.md": b"# theirs\n"}, "theirs")
        return False

    hub.faults.append(Fault("/preupload/", push, method="POST"))
    with pytest.raises(HubError, match=r"changed by somebody else meanwhile.*HTTP 412"):
        publish(espalier, client)
    assert [message for _, _, message in repo.history] == ["initial commit", "theirs"]


def test_pull_request(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {})
    report = publish(espalier, client, create_pr=True)
    assert report.exit_code == 0
    assert report.revision == "refs/pr/1"
    assert report.pull_request == f"{hub.endpoint}/{NAME}/discussions/1"
    assert without_attributes(repo.head()) == {}
    assert without_attributes(repo.head("refs/pr/1")) == folder_files(espalier)


def test_branch(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {})
    report = publish(espalier, client, revision="v1")
    assert report.revision == "v1"
    assert without_attributes(repo.head()) == {}
    assert without_attributes(repo.head("v1")) == folder_files(espalier)
    with pytest.raises(UsageError, match="--revision v2"):
        upload_checkpoint(espalier, f"{NAME}@v2", client=client)


def test_files_of_the_checkpoint_before_go(
    hub: HubServer, client: HubClient, espalier: Path, llama_exl3: Path, tmp_path: Path
) -> None:
    """EXL3 was there, with its manifest; a stale shard and a stale signature go as well."""
    exl3 = Path(shutil.copytree(llama_exl3, tmp_path / "exl3"))
    publish(exl3, client)
    repo = hub.repos[NAME]
    stale = {"model-00001-of-00002.safetensors": b"x", f"{MANIFEST}.sig": b"x"}
    repo.commit("main", repo.head() | stale)
    report = publish(espalier, client)
    assert report.exit_code == 0
    assert sorted(report.deleted) == sorted([*stale, "quantization_config.json"])
    assert without_attributes(repo.head()) == folder_files(espalier)


def test_files_of_somebody_else_stay(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {"chart.png": b"x", "notes/a.md": b"x"})
    with pytest.raises(UsageError, match=r"chart\.png, notes/a\.md.*--prune"):
        publish(espalier, client)
    assert hub.of("PUT", "") == hub.of("POST", "") == []
    report = publish(espalier, client, prune=True)
    assert report.exit_code == 0
    assert sorted(report.deleted) == ["chart.png", "notes/a.md"]
    assert without_attributes(repo.head()) == folder_files(espalier)


def test_card_written_on_the_hub_is_kept(hub: HubServer, client: HubClient, espalier: Path) -> None:
    publish(espalier, client)
    repo = hub.repos[NAME]
    edited = repo.head()["README.md"].decode().replace("# llama\n", "# llama\n\nHow I made it.\n")
    repo.commit("main", repo.head() | {"README.md": edited.encode()})
    publish(espalier, client, license="mit")
    card = repo.head()["README.md"].decode()
    assert "How I made it." in card
    assert "license: mit" in card
    assert (espalier / "README.md").read_text(encoding="utf-8") == card


def test_card_written_in_both_places(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {"README.md": b"# theirs\n\ntext\n"})
    (espalier / "README.md").write_text("# ours\n\ntext\n", encoding="utf-8")
    with pytest.raises(UsageError, match="--readme folder or --readme repository"):
        publish(espalier, client)
    assert hub.of("POST", "") == []
    publish(espalier, client, readme="repository")
    assert b"# theirs" in repo.head()["README.md"]
    (espalier / "README.md").write_text("# ours\n\ntext\n", encoding="utf-8")
    publish(espalier, client, readme="folder")
    assert b"# ours" in repo.head()["README.md"]


def test_too_large_for_one_commit_goes_to_main_at_once(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {})
    report = publish(espalier, client, limits=CommitLimits(files=3))
    assert report.exit_code == 0
    assert report.revision == "main"
    assert without_attributes(repo.head()) == folder_files(espalier)
    assert [branch for branch, _, _ in repo.history] == ["main", "refs/pr/1", "refs/pr/1", "refs/pr/1", "main"]
    assert repo.merged == [1]
    parts = [set(repo.commits[sha]) for branch, sha, _ in repo.history if branch == "refs/pr/1"]
    assert [{"config.json", INDEX, MANIFEST} & part for part in parts] == [
        set(),
        set(),
        {"config.json", INDEX, MANIFEST},
    ]


def test_too_large_for_one_commit_to_a_branch(
    hub: HubServer, client: HubClient, espalier: Path, llama_exl3: Path
) -> None:
    """The checkpoint that is there loses its config first, and the new one comes last."""
    repo = hub.add(NAME, {})
    repo.commit("v1", folder_files(llama_exl3))
    report = publish(espalier, client, revision="v1", prune=True, limits=CommitLimits(files=4))
    assert report.exit_code == 0
    parts = [repo.commits[sha] for branch, sha, _ in repo.history if branch == "v1"][1:]
    assert ["config.json" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1
    assert without_attributes(repo.head("v1")) == folder_files(espalier)


def test_main_that_moves_while_parts_are_sent(hub: HubServer, client: HubClient, espalier: Path) -> None:
    repo = hub.add(NAME, {})

    def push(handler: Handler) -> bool:
        repo.commit("main", repo.head() | {"README.md": b"# theirs\n"}, "theirs")
        return False

    hub.faults.append(Fault("/commit/refs", push, method="POST"))
    with pytest.raises(HubError, match=r"everything is in the pull request .*/discussions/1"):
        publish(espalier, client, limits=CommitLimits(files=3))
    assert repo.merged == []


def test_pause_that_is_too_long(hub: HubServer, client: HubClient, espalier: Path) -> None:
    """huggingface_hub would sleep for a day."""
    hub.faults.append(Fault("/preupload/", status(429, headers={"Retry-After": "86400"}), method="POST"))
    with pytest.raises(HubError, match="asks to wait 86400 s"):
        publish(espalier, client)
    hub.faults = [Fault("/preupload/", status(429, headers={"Retry-After": "0"}), method="POST")]
    assert publish(espalier, client).exit_code == 0


def test_what_the_hub_says_about_the_card(hub: HubServer, client: HubClient, espalier: Path) -> None:
    warning = json.dumps({"errors": [], "warnings": [{"message": "no license"}]}).encode()
    hub.faults.append(Fault("validate-yaml", lambda handler: handler.reply(200, warning) or True, method="POST"))
    report = publish(espalier, client)
    assert any("no license" in line for line in report.warnings)
    error = json.dumps({"errors": [{"message": "license must be one of …"}]}).encode()
    hub.faults.append(Fault("validate-yaml", lambda handler: handler.reply(400, error) or True, method="POST"))
    with pytest.raises(HubError, match="license must be one of"):
        publish(espalier, client, license="beer")


def test_failure_of_the_library_itself(client: HubClient) -> None:
    """As hf_xet fails: an exception of no kind of its own, with whatever in its text."""

    def fail() -> None:
        raise RuntimeError(f"403 for https://cas/x?{SIGNED_QUERY} with Bearer {TOKEN}")

    with pytest.raises(HubError, match=r"^here: refused: 403 for https://cas/x\?… with Bearer <token>$"):
        client.patiently("here", fail)


def test_snapshot_in_the_cache_is_left_alone(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add("org/other", made)
    snapshot = Path(snapshot_download("org/other", endpoint=hub.endpoint, token=TOKEN))
    with pytest.raises(UsageError, match="huggingface_hub's cache"):
        publish(snapshot, client)
    assert not (snapshot / "README.md").exists()


@pytest.mark.parametrize(("token", "message"), [(False, "HTTP 401"), ("hf_AnotherSecretToken", "HTTP 401")])
def test_permission(token: str | bool, message: str, hub: HubServer, client: HubClient, espalier: Path) -> None:
    with pytest.raises(HubError, match=message):
        publish(espalier, replace(client, token=token))
    assert NAME not in hub.repos


def test_no_folder(client: HubClient, espalier: Path) -> None:
    with pytest.raises(SourceError, match="not a folder"):
        publish(espalier / SHARD, client)
    with pytest.raises(UsageError, match="is no repository"):
        upload_checkpoint(espalier, "a/b/c", client=client)
