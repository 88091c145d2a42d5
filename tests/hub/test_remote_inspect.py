"""Looking at a repository: the same report as for the folder, from configs and headers alone, by counted requests.

The real Hub is not asked; what is tested against is the server of hub_server.py.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import Bank, Draft, Module, Tensor, bf16, espalier_draft
from hub.hub_server import (
    SIGNED_QUERY,
    TOKEN,
    Fault,
    Handler,
    HubServer,
    body,
    cut_after,
    folder_files,
    hang_up,
    slowly,
    status,
    whole_file,
)
from huggingface_hub import constants, snapshot_download

from espalier_format.checkpoint import Checkpoint
from espalier_format.errors import (
    HubError,
    IndexMismatchError,
    LimitError,
    MissingFileError,
    PathError,
    SourceError,
    TruncatedError,
    UnreachableError,
)
from espalier_format.hub.address import HubAddress
from espalier_format.hub.client import HubClient
from espalier_format.hub.opening import open_remote
from espalier_format.hub.remote_folder import MAX_THREADS, RemoteFolder
from espalier_format.hub.remote_verify import verify_remote
from espalier_format.hub.repository import RemoteFile, RemoteRepository
from espalier_format.operations.inspect import describe, inspect_checkpoint

NAME = "org/name"
SHARDS = r"\.safetensors$|^/store/"


def look(client: HubClient, text: str = NAME) -> Checkpoint:
    return open_remote(HubAddress.parse(text), client)


def header_bytes(data: bytes) -> int:
    return 8 + struct.unpack("<Q", data[:8])[0]


def several_shards(folder: Path) -> Path:
    """An Espalier checkpoint of 20 shards with a mixed expert bank."""
    modules = [Module(f"model.layers.{n}.self_attn.q_proj", 256, 128) for n in range(20)]
    bank = Bank("model.layers.0.mlp.experts", {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)})
    return espalier_draft(modules, [bank], num_shards=20).write(folder)


@pytest.mark.parametrize("kind", ["espalier", "exl3", "moe", "shards"])
def test_report_is_that_of_the_folder(
    kind: str, hub: HubServer, client: HubClient, made: Path, llama_exl3: Path, qmoe_exl3: Path, tmp_path: Path
) -> None:
    """But for the path, and for the markers of EXL3, which are not read."""
    folder = {"espalier": made, "exl3": llama_exl3, "moe": qmoe_exl3}.get(kind) or several_shards(tmp_path / "many")
    hub.add(NAME, folder)
    here = inspect_checkpoint(folder).to_json()
    with look(client) as checkpoint:
        there = describe(checkpoint, "hf://org/name").to_json()
    assert there.pop("path") == "hf://org/name"
    del here["path"]
    there["files"] = [file for file in there["files"] if file["name"] != ".gitattributes"]  # type: ignore[attr-defined]
    if kind in ("exl3", "moe"):
        *warnings, markers = there["warnings"]  # type: ignore[misc]
        there["warnings"] = warnings
        assert "codebook markers are not read from afar" in markers
    assert there == here


@pytest.mark.parametrize("large_files_elsewhere", [True, False])
def test_two_requests_per_shard_and_not_a_byte_of_a_tensor(
    large_files_elsewhere: bool, hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    folder = several_shards(tmp_path / "many")
    repo = hub.add(NAME, folder)
    hub.redirect_large = large_files_elsewhere
    look(client).close()
    assert [request.path for request in hub.of("GET", "^/api/")] == ["/api/models/org/name"]
    sha = repo.branches["main"]
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        length = header_bytes(shard.read_bytes())
        asked = hub.of("GET", f"/{shard.name}$", "hub")
        assert [request.range for request in asked] == [(0, 7), (8, length - 1)]
        assert {request.path for request in asked} == {f"/org/name/resolve/{sha}/{shard.name}"}
    expected = sum(header_bytes(shard.read_bytes()) for shard in shards)
    assert sum(request.sent[0] for request in hub.of("GET", SHARDS)) == expected
    others = [request.path.rpartition("/")[2] for request in hub.of("GET", r"/resolve/.*json$")]
    assert sorted(others) == ["config.json", "model.safetensors.index.json"]
    assert {request.method for request in hub.requests} == {"GET"}


def test_integers_with_one_scale_per_row_have_no_exact_size_from_afar(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    """That their inputs do not fill the last word stands in a tensor, and tensors are not read."""
    tensors = {
        "m.weight_packed": Tensor.of(np.zeros((4, 8), np.int32), "I32"),
        "m.weight_scale": bf16(np.ones((4, 1))),
        "m.weight_shape": Tensor.of(np.array([4, 30]), "I64"),
    }
    weights = {"num_bits": 8, "strategy": "channel"}
    group = {"targets": ["Linear", "re:nothing"], "weights": weights}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}}}
    draft = Draft(config=config, shards={"model.safetensors": tensors})
    folder = draft.write(tmp_path)
    hub.add(NAME, folder)
    with look(client) as checkpoint:
        report = describe(checkpoint, NAME)
        assert (checkpoint.packed["m"].in_features, checkpoint.packed["m"].size_source) == (32, "padded")
    here = inspect_checkpoint(folder)
    assert (report.padded_modules, here.padded_modules) == (("m",), ())
    assert [warning.partition("target")[2] for warning in report.warnings] == [" 're:nothing' of 'g' matches no module"]
    verified = verify_remote(HubAddress.parse(NAME), client=client)
    assert [finding.code for finding in verified.findings] == ["missing-tensor"]


def test_token_goes_to_the_hub_only(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    look(client).close()
    assert all(request.authorized for request in hub.requests if request.host == "hub")
    elsewhere = [request for request in hub.requests if request.host == "cdn"]
    assert len(elsewhere) == 2
    assert not any(TOKEN in str(request.headers) for request in elsewhere)


def test_all_is_of_one_commit_whatever_is_pushed_meanwhile(hub: HubServer, client: HubClient, made: Path) -> None:
    repo = hub.add(NAME, made)
    first = repo.branches["main"]

    def push(handler: Handler) -> bool:
        repo.commit("main", {"config.json": b"{}"})
        return False

    hub.faults.append(Fault("config.json$", push))
    look(client).close()
    assert repo.branches["main"] != first
    assert {request.path.split("/")[4] for request in hub.of("GET", "/resolve/")} == {first}


def test_revision(hub: HubServer, client: HubClient, made: Path, llama_exl3: Path) -> None:
    repo = hub.add(NAME, made)
    sha = repo.commit("refs/pr/1", folder_files(llama_exl3))
    assert look(client).format == "espalier"
    assert look(client, "org/name@refs/pr/1").format == "exl3"
    assert look(client, f"org/name@{sha}").format == "exl3"
    with pytest.raises(HubError, match=r"^hf://org/name@v2: has no such revision"):
        look(client, "org/name@v2")


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        ({}, TOKEN, None),
        ({}, False, None),
        ({"private": True}, TOKEN, None),
        ({"private": True}, False, "there is no such repository, or it is private"),
        ({"private": True}, "hf_AnotherSecretToken", "there is no such repository, or it is private"),
        ({"gated": True}, False, "is gated: accept its conditions"),
        (None, TOKEN, "there is no such repository"),
    ],
)
def test_permission(
    options: dict[str, bool] | None,
    token: str | bool,
    message: str | None,
    hub: HubServer,
    client: HubClient,
    made: Path,
) -> None:
    if options is not None:
        hub.add(NAME, made, **options)
    somebody = replace(client, token=token)
    if message is None:
        look(somebody).close()
        return
    with pytest.raises(HubError, match=message) as caught:
        look(somebody)
    assert caught.value.code == "hub"
    assert len(hub.requests) == 1


def test_at_most_eight_at_a_time(hub: HubServer, client: HubClient, tmp_path: Path) -> None:
    hub.add(NAME, several_shards(tmp_path / "many"))
    lock, busy, most = threading.Lock(), 0, 0

    def count(handler: Handler) -> bool:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.03)
        with lock:
            busy -= 1
        return False

    hub.faults.append(Fault("^/store/", count, times=1000, host="cdn"))
    look(client).close()
    assert 2 <= most <= MAX_THREADS == 8


def test_hostile_header_is_refused_after_eight_bytes(hub: HubServer, client: HubClient, made: Path) -> None:
    files = folder_files(made)
    files["model.safetensors"] = struct.pack("<Q", 2**60) + files["model.safetensors"][8:]
    hub.add(NAME, files)
    with pytest.raises(LimitError, match=r"^hf://org/name/model.safetensors: header is too large"):
        look(client)
    assert sum(request.sent[0] for request in hub.of("GET", SHARDS)) == 8


def test_index_that_names_an_absent_tensor(hub: HubServer, client: HubClient, made: Path, llama_exl3: Path) -> None:
    files = folder_files(made)
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"]["ghost.weight"] = "model.safetensors"
    hub.add(NAME, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(IndexMismatchError, match="ghost"):
        look(client)
    hub.add("org/exl3", folder_files(llama_exl3) | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert any(
        "index.json lists a tensor that no shard holds" in warning for warning in look(client, "org/exl3").warnings
    )


def test_tensors_are_not_read(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    checkpoint = look(client)
    before = len(hub.requests)
    module = next(iter(checkpoint.modules))
    for read in (checkpoint.digest, checkpoint.decode, checkpoint.codes):
        with pytest.raises(SourceError, match="are not read from afar"):
            read(module)
    with pytest.raises(SourceError, match="not on this machine"):
        checkpoint.folder.resolve("config.json")
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ("path", "host", "action"),
    [
        ("^/api/", "hub", hang_up),
        ("config.json$", "hub", hang_up),
        ("config.json$", "hub", cut_after(100)),
        ("config.json$", "hub", cut_after(100, honest_length=False)),
        ("^/store/", "cdn", cut_after(3)),
        ("^/store/", "cdn", hang_up),
        ("config.json$", "hub", status(503)),
        ("^/store/", "cdn", status(500)),
        ("^/api/", "hub", status(429, headers={"Retry-After": "0"})),
        ("^/api/", "hub", status(502)),
    ],
)
def test_failure_that_passes(
    path: str, host: str, action: object, hub: HubServer, client: HubClient, made: Path
) -> None:
    """Tried again, three times at most; the result is the same."""
    hub.add(NAME, made)
    look(client).close()
    without = len(hub.requests)
    hub.requests.clear()
    hub.faults.append(Fault(path, action, host=host, times=3))  # type: ignore[arg-type]
    assert look(client).format == "espalier"
    hops = 2 if host == "cdn" else 1
    assert len(hub.requests) == without + 3 * hops


@pytest.mark.parametrize(
    ("action", "code"), [(hang_up, "hub-unreachable"), (status(503), "hub-unreachable"), (status(429), "hub")]
)
def test_failure_that_stays(action: object, code: str, hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("^/api/", action, times=100))  # type: ignore[arg-type]
    with pytest.raises((HubError, UnreachableError)) as caught:
        look(client)
    assert caught.value.code == code
    assert len(hub.requests) == client.attempts == 4


def test_retry_after_is_obeyed(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("config.json$", status(429, headers={"Retry-After": "1"})))
    begin = time.monotonic()
    look(client).close()
    assert 1.0 <= time.monotonic() - begin < 5.0


def test_retry_after_that_is_too_long_is_an_error_at_once(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("^/api/", status(429, headers={"Retry-After": "86400"})))
    begin = time.monotonic()
    with pytest.raises(HubError, match=r"too many requests; it asks to wait 86400 s \(HTTP 429"):
        look(client)
    assert time.monotonic() - begin < 5.0
    assert len(hub.requests) == 1


@pytest.mark.parametrize("path", ["config.json$", "model.safetensors$"])
def test_file_of_another_size_than_recorded(path: str, hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.redirect_large = False
    hub.faults.append(Fault(path, body(lambda data: data + b" "), times=100))
    with pytest.raises(TruncatedError, match="another size than the Hub's records say"):
        look(client)


def test_server_that_ignores_ranges(hub: HubServer, client: HubClient, made: Path) -> None:
    """Whole files are taken as they come; of a shard, the part that was asked for is, and the rest is not received."""
    files = folder_files(made)
    big = files["model.safetensors"]
    header = json.loads(big[8 : header_bytes(big)])
    header["zzz"] = {
        "dtype": "U8",
        "shape": [30_000_000],
        "data_offsets": [end := len(big) - header_bytes(big), end + 30_000_000],
    }
    text = json.dumps(header).encode()
    hub.add(
        NAME, {"model.safetensors": struct.pack("<Q", len(text)) + text + big[header_bytes(big) :] + bytes(30_000_000)}
    )
    hub.faults.append(Fault("^/store/", whole_file, times=100, host="cdn"))
    with pytest.raises(HubError, match=r"does not send parts of files \(HTTP 200\)"):
        look(client)
    assert sum(request.sent[0] for request in hub.requests) < 30_000_000


def test_slow_server_is_given_up(hub: HubServer, client: HubClient, made: Path) -> None:
    """Bytes keep coming, so no single wait is long: the rate is what counts."""
    hub.add(NAME, made)
    hub.faults.append(Fault("config.json$", slowly(10, 0.1), times=100))
    impatient = replace(client, timeout=0.5, attempts=2)
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="too slowly"):
        look(impatient)
    assert time.monotonic() - begin < 10


def test_silent_server_is_given_up(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("^/api/", lambda _: time.sleep(1) or False, times=100))
    with pytest.raises(UnreachableError, match="does not answer in time"):
        look(replace(client, timeout=0.2, attempts=2))


def test_large_json_is_not_fetched(hub: HubServer, client: HubClient) -> None:
    files = {"config.json": RemoteFile("config.json", 200_000_000, None, "0" * 40)}
    folder = RemoteFolder(client, RemoteRepository(HubAddress(NAME), "0" * 40, False, files))
    with pytest.raises(LimitError, match=r"hf://org/name/config\.json"):
        folder.read_json_object("config.json")
    with pytest.raises(MissingFileError):
        folder.size("other.json")
    assert hub.requests == []


def test_hostile_file_name(hub: HubServer, client: HubClient) -> None:
    hub.add(NAME, {"../config.json": b"{}"})
    with pytest.raises(PathError):
        look(client)


@pytest.mark.parametrize(
    "answer",
    [b"", b"<html>", b"[]", b"{}", b'"x"', b'{"id": "a/b", "sha": "0", "siblings": [{}]}',
     b'{"id": "a/b", "sha": "0", "siblings": [{"rfilename": "config.json"}]}',
     b'{"id": "a/b", "sha": "0", "siblings": [{"rfilename": "config.json", "size": -1}]}',
     b'{"id": "a/b", "sha": "0", "siblings": [{"rfilename": "config.json", "lfs": {"size": 3}}]}'],
)  # fmt: skip
def test_answer_of_another_form(answer: bytes, hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("^/api/", lambda handler: handler.reply(200, answer) or True, times=9))
    with pytest.raises(HubError):
        look(client)


def test_redirect_loop_ends(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)

    def loop(handler: Handler) -> bool:
        handler.reply(302, b"", {"Location": handler.path})
        return True

    hub.faults.append(Fault("config.json$", loop, times=1000))
    with pytest.raises(UnreachableError):
        look(replace(client, attempts=1))
    assert len(hub.requests) < 50


def test_signed_url_is_not_shown(hub: HubServer, client: HubClient, made: Path) -> None:
    hub.add(NAME, made)
    hub.faults.append(Fault("^/store/", status(403, "", f"no: {hub.cdn}/store/x?{SIGNED_QUERY} {TOKEN}"), host="cdn"))
    with pytest.raises(HubError) as caught:
        look(client)
    text = f"{caught.value} {caught.value!r} {caught.value.__cause__} {vars(caught.value)}"
    assert TOKEN not in text
    assert SIGNED_QUERY not in text
    assert TOKEN not in repr(client)


def test_offline_and_unreachable_use_the_cache(
    hub: HubServer, client: HubClient, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hf download` does: a complete snapshot, of the revision that was asked for, and nothing else."""
    hub.add(NAME, made)
    address = HubAddress(NAME)
    gone = replace(client, endpoint="http://127.0.0.1:9", attempts=1)
    with pytest.raises(UnreachableError, match=r"cannot be reached.*the cache holds no complete copy"):
        open_remote(address, gone)
    snapshot_download(NAME, endpoint=hub.endpoint, token=TOKEN)
    hub.requests.clear()
    with open_remote(address, gone) as checkpoint:
        assert "this is the copy in the cache" in checkpoint.warnings[-1]
        assert checkpoint.format == "espalier"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with open_remote(address, client) as checkpoint:
        assert checkpoint.warnings == ()
        module = next(iter(checkpoint.modules))
        assert len(checkpoint.digest(module)) == 64
    assert hub.requests == []
    with pytest.raises(UnreachableError, match=r"HF_HUB_OFFLINE is set.*no complete copy"):
        open_remote(HubAddress(NAME, "another"), client)
