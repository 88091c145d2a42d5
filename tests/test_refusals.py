"""One test per error class, named after it: each refusal is provoked at least once, by the corpus and beyond.

The corpus (``spec/vectors/refusals.json``) holds the small cases; what is large or needs links or a full disk is
made here. The last tests check that no error class, no code and no case is left out.
"""

from __future__ import annotations

import builtins
import errno
import importlib.util
import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Bank, Exl3Module, Module, Tensor, espalier_draft, exl3_draft

import espalier_format
from espalier_format import errors, limits
from espalier_format.checkpoint import open_checkpoint
from espalier_format.conformance.bench import write_files
from espalier_format.conformance.refusals import refusal_cases
from espalier_format.converters.espalier_to_exl3 import espalier_to_exl3
from espalier_format.converters.exl3_to_espalier import exl3_to_espalier
from espalier_format.converters.to_hf import to_hf
from espalier_format.errors import EspalierError, InconsistentError, RefusedError
from espalier_format.hub.address import HubAddress
from espalier_format.hub.client import HubClient
from espalier_format.hub.opening import open_remote
from espalier_format.hub.signing import TrustedKey
from espalier_format.operations.verify import verify_checkpoint

CASES = {case.name: case for case in refusal_cases()}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as folders, one per case."""
    folder = tmp_path_factory.mktemp("bad")
    for case in CASES.values():
        write_files(folder / case.name, case.files)
    return folder


def concrete_classes() -> list[type[EspalierError]]:
    def below(kind: type[EspalierError]) -> Iterator[type[EspalierError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    # The command line has a class of its own for crashes; it is no refusal and stays outside the list.
    return [kind for kind in below(EspalierError) if kind.code and kind.__module__ == errors.__name__]


def check(error: EspalierError, kind: type[EspalierError]) -> None:
    assert type(error) is kind
    line = str(error)
    assert line
    assert line.isprintable()
    assert len(line) < 1000


def provoke(kind: type[EspalierError], action: Callable[[], object]) -> None:
    with pytest.raises(EspalierError) as caught:
        action()
    check(caught.value, kind)


def check_corpus(kind: type[EspalierError], bad: Path) -> None:
    """All cases of the corpus with this code are refused for it, by the operation that must find it."""
    found = [name for name, case in CASES.items() if case.code == kind.code]
    assert found
    for name in found:
        if CASES[name].operation == "open":
            provoke(kind, lambda name=name: open_checkpoint(bad / name))
        else:
            open_checkpoint(bad / name).close()
        report = verify_checkpoint(bad / name, deep=CASES[name].operation == "verify --deep")
        findings = [finding for part in report.checks for finding in part.findings]
        assert [finding.code for finding in findings] == [kind.code], name
        check(findings[0], kind)


def small_espalier(folder: Path) -> Path:
    return espalier_draft((Module("m", 128, 128, "exl3-mcg@1"),), ()).write(folder)


def test_format_version_error(bad: Path) -> None:
    check_corpus(errors.FormatVersionError, bad)


def test_feature_error(bad: Path) -> None:
    check_corpus(errors.FeatureError, bad)


def test_codebook_error(bad: Path) -> None:
    check_corpus(errors.CodebookError, bad)


def test_schema_error(bad: Path) -> None:
    check_corpus(errors.SchemaError, bad)


def test_source_error(tmp_path: Path, bad: Path) -> None:
    check_corpus(errors.SourceError, bad)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    provoke(errors.SourceError, lambda: open_checkpoint(tmp_path / "model.gguf"))


def test_truncated_error(tmp_path: Path, bad: Path) -> None:
    """A file cut at every length is refused, as truncated but for the cut at the end of an empty header."""
    check_corpus(errors.TruncatedError, bad)
    whole = (small_espalier(tmp_path) / "model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    lengths = [*range(9), 100, header_end - 1, header_end, header_end + 1, len(whole) // 2, len(whole) - 1]
    for length in lengths:
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        provoke(errors.TruncatedError, lambda: open_checkpoint(tmp_path))


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    """An error, not a crash: touching a page of the map behind the end of the file would kill the process."""
    path = small_espalier(tmp_path) / "model.safetensors"
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(path, path.stat().st_size // 2)
        provoke(errors.TruncatedError, lambda: checkpoint.decode("m"))


def test_malformed_error(tmp_path: Path, bad: Path) -> None:
    check_corpus(errors.MalformedError, bad)
    small_espalier(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    provoke(errors.MalformedError, lambda: open_checkpoint(tmp_path))


def test_overlap_error(bad: Path) -> None:
    check_corpus(errors.OverlapError, bad)


def large_json() -> dict[str, bytes]:
    return {
        "a million arrays": b"[" * 1_000_000 + b"]" * 1_000_000,
        "a million objects": b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000,
        "a million arrays, open": b"[" * 1_000_000,
        "a long string": b'{"a": "' + b"x" * (limits.MAX_CONFIG_STRING_BYTES + 1) + b'"}',
        "a long key": b'{"' + b"x" * (limits.MAX_CONFIG_STRING_BYTES + 1) + b'": 1}',
    }


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_limit_error(tmp_path: Path, file: str, bad: Path) -> None:
    check_corpus(errors.LimitError, bad)
    small_espalier(tmp_path)
    for text in large_json().values():
        (tmp_path / file).write_bytes(text)
        provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))
    with (tmp_path / file).open("wb") as document:
        document.truncate(limits.MAX_JSON_BYTES + 1)
    provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))


@pytest.mark.parametrize("claimed", [limits.MAX_HEADER_BYTES + 1, 2**31, 2**60, 2**63, 2**64 - 1])
def test_limit_error_of_a_header(tmp_path: Path, claimed: int) -> None:
    """The claim is compared before anything is allocated: the peak of memory does not move by a header."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(claimed.to_bytes(8, "little"))
        file.truncate(200_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    provoke(errors.LimitError, lambda: open_checkpoint(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_limit_error_of_a_name_in_a_header(tmp_path: Path) -> None:
    for length, refused in ((limits.MAX_HEADER_STRING_BYTES, False), (limits.MAX_HEADER_STRING_BYTES + 1, True)):
        draft = espalier_draft((), (), {"x" * length: Tensor("F16", (1,), bytes(2))})
        draft.config = None
        draft.write(tmp_path)
        if refused:
            provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))
        else:
            open_checkpoint(tmp_path).close()


def test_limit_error_of_tensors_of_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit; two million tensors would take this test half a minute."""
    espalier_draft(num_shards=2).write(tmp_path)
    monkeypatch.setattr("espalier_format.checkpoint.tensors.MAX_TENSORS", 20)
    provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))


def test_limit_error_of_tensors_that_a_config_calls_for(tmp_path: Path) -> None:
    """One character of an assignment is an expert, so this config is small; the shards are not even read."""
    draft = espalier_draft((), (Bank("experts", {"w1": (16, 16)}, ("e2m1@1",), "0", (0, 0)),), {})
    bank = draft.block["expert_banks"]["experts"]
    bank["num_experts"] = limits.MAX_TENSORS // 3 + 1
    bank["projections"]["w1"]["assignment"] = "0" * bank["num_experts"]
    draft.write(tmp_path)
    provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    provoke(errors.LimitError, lambda: open_checkpoint(tmp_path))


def test_path_error(tmp_path: Path, bad: Path) -> None:
    check_corpus(errors.PathError, bad)
    outside = tmp_path / "outside"
    small_espalier(outside)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        folder = small_espalier(tmp_path / f"link-{name}")
        (folder / name).unlink()
        (folder / name).symlink_to(outside / name)
        provoke(errors.PathError, lambda folder=folder: open_checkpoint(folder))
    folder = small_espalier(tmp_path / "circle")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    provoke(errors.PathError, lambda: open_checkpoint(folder))


def test_missing_file_error(tmp_path: Path, bad: Path) -> None:
    check_corpus(errors.MissingFileError, bad)
    provoke(errors.MissingFileError, lambda: open_checkpoint(tmp_path / "nowhere"))
    provoke(errors.MissingFileError, lambda: verify_checkpoint(tmp_path / "nowhere"))
    with pytest.raises(builtins.FileNotFoundError):
        open_checkpoint(tmp_path / "nowhere")


@pytest.fixture
def exl3(tmp_path: Path) -> Path:
    return exl3_draft([Exl3Module("m", 128, 128, 1)]).write(tmp_path / "exl3")


def test_output_exists_error(tmp_path: Path, exl3: Path) -> None:
    """A folder that is not empty is left as it is; ``force`` does not empty one that is not ours."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious.txt").write_text("x")
    with open_checkpoint(exl3) as source:
        for force in (False, True):
            provoke(errors.OutputExistsError, lambda force=force: exl3_to_espalier(source, target, force=force))
            assert [path.name for path in target.iterdir()] == ["precious.txt"]
        with pytest.raises(builtins.FileExistsError):
            exl3_to_espalier(source, target)


def test_write_error(tmp_path: Path, exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when data is forced out: nothing of the output stays."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "target"
    monkeypatch.setattr(os, "fsync", full)
    with open_checkpoint(exl3) as source:
        provoke(errors.WriteError, lambda: exl3_to_espalier(source, target))
        assert not target.exists() or list(target.iterdir()) == []
        with pytest.raises(builtins.OSError, match="No space left"):
            exl3_to_espalier(source, target)


@pytest.mark.parametrize("module", [Module("m", 128, 128, "e2m1@2"), Module("m", 128, 128, "exl3-mcg@2", (64, 128))])
def test_lossy_error(tmp_path: Path, module: Module) -> None:
    """A grid codebook, or another rotation than 128: EXL3 cannot hold it."""
    target = tmp_path / "target"
    with open_checkpoint(espalier_draft((module,), ()).write(tmp_path / "source")) as source:
        provoke(errors.LossyError, lambda: espalier_to_exl3(source, target))
    assert not target.exists()


def test_unknown_size_error(tmp_path: Path, exl3: Path) -> None:
    """Neither a plain weight nor an architecture says how large the module is."""
    with open_checkpoint(exl3) as source:
        provoke(errors.UnknownSizeError, lambda: to_hf(source, tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_scale_overflow_error(tmp_path: Path) -> None:
    draft = espalier_draft((Module("m", 32, 32, "e2m1@2", (0, 0)),), ())
    for kind in ("suh", "svh"):
        draft[f"m.esp_{kind}"] = Tensor.of(np.full(32, 300), "F16")
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        provoke(errors.ScaleOverflowError, lambda: checkpoint.decode("m", "float16"))
        assert np.isfinite(checkpoint.decode("m", "float32")).all()


def test_dependency_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with open_checkpoint(small_espalier(tmp_path)) as checkpoint:
        provoke(errors.DependencyError, lambda: checkpoint.decode("m", device="cpu"))
        with pytest.raises(builtins.ImportError):
            checkpoint.decode("m", device="cpu")


def test_usage_error(tmp_path: Path, exl3: Path) -> None:
    with open_checkpoint(exl3) as source:
        provoke(errors.UsageError, lambda: source.decode("m", "float8"))  # type: ignore[arg-type]
        provoke(errors.UsageError, lambda: exl3_to_espalier(source, exl3))
        provoke(errors.UsageError, lambda: exl3_to_espalier(source, exl3 / "below"))
    provoke(errors.UsageError, lambda: verify_checkpoint(exl3, record=True))


def test_missing_tensor_error(bad: Path) -> None:
    check_corpus(errors.MissingTensorError, bad)


def test_unexpected_tensor_error(bad: Path) -> None:
    check_corpus(errors.UnexpectedTensorError, bad)


def test_duplicate_tensor_error(bad: Path) -> None:
    check_corpus(errors.DuplicateTensorError, bad)


def test_dtype_error(bad: Path) -> None:
    check_corpus(errors.DtypeError, bad)


def test_shape_error(bad: Path) -> None:
    check_corpus(errors.ShapeError, bad)


def test_index_mismatch_error(bad: Path) -> None:
    check_corpus(errors.IndexMismatchError, bad)


def test_non_finite_scale_error(bad: Path) -> None:
    check_corpus(errors.NonFiniteScaleError, bad)
    for case in ("scale-nan", "exl3-scale-infinite"):
        with open_checkpoint(bad / case) as checkpoint:
            provoke(errors.NonFiniteScaleError, lambda checkpoint=checkpoint: checkpoint.decode("layers.0.up_proj"))


def test_bits_mismatch_error(bad: Path) -> None:
    check_corpus(errors.BitsMismatchError, bad)


def test_digest_error(bad: Path) -> None:
    check_corpus(errors.DigestError, bad)


def closed_port() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_hub_error() -> None:
    """A name that the Hub's client refuses before it asks; what servers refuse is in tests/hub."""
    provoke(errors.HubError, lambda: open_remote(HubAddress("org/a--b"), HubClient("http://127.0.0.1:9", False)))


def test_unreachable_error() -> None:
    nobody = HubClient(closed_port(), False, attempts=2, first_pause=0.01)
    provoke(errors.UnreachableError, lambda: open_remote(HubAddress("org/name"), nobody))


def test_signature_error(tmp_path: Path) -> None:
    """Missing; signatures that are wrong are in tests/hub, for they need the extra [sign]."""
    espalier_draft([Module("layers.0.up_proj", 128, 128)]).write(tmp_path / "x")
    report = verify_checkpoint(tmp_path / "x", trusted=TrustedKey(tmp_path / "public.pem"))
    (finding,) = report.findings
    check(finding, errors.SignatureError)
    assert report.exit_code == 1


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_every_error_class_has_its_test() -> None:
    named = {name for name in globals() if name.startswith("test_")}
    assert {f"test_{snake(kind.__name__)}" for kind in concrete_classes()} <= named


def test_the_tree_in_the_docstring_is_the_truth() -> None:
    """Names, codes, parents and exit codes of errors.py against its own first lines."""
    tree = (errors.__doc__ or "").splitlines()
    stated: dict[str, tuple[str, int]] = {}
    exit_code = 0
    for line in tree:
        if found := re.search(r"exit code (\d)", line):
            exit_code = int(found[1])
        if found := re.match(r"[│ ]   [├└]── (\w+) +([a-z-]+)(?: +\(also (\w+)\))?$", line):
            name, code, also = found.groups()
            stated[name] = (code, exit_code)
            kind: Any = getattr(errors, name)
            assert kind.__bases__[1:] == ((getattr(builtins, also),) if also else ()), name
    assert stated == {kind.__name__: (kind.code, kind.exit_code) for kind in concrete_classes()}
    assert len({code for code, _ in stated.values()}) == len(stated)
    for kind in concrete_classes():
        assert kind.__bases__[0] in {RefusedError, InconsistentError}
        assert kind.__doc__


def test_every_class_of_the_module_is_in_the_tree() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == {EspalierError, RefusedError, InconsistentError, *concrete_classes()}


def load_make_bad() -> Any:
    spec = importlib.util.spec_from_file_location("make_bad", Path(__file__).parent / "vectors" / "make_bad.py")
    assert spec is not None
    assert spec.loader is not None
    make_bad = importlib.util.module_from_spec(spec)
    sys.modules["make_bad"] = make_bad
    spec.loader.exec_module(make_bad)
    return make_bad


def test_the_corpus_is_complete() -> None:
    """Codes that only an operation on good input can cause have no bad file; a signature needs a key to be bad by."""
    without_file = {
        errors.OutputExistsError,
        errors.WriteError,
        errors.LossyError,
        errors.UnknownSizeError,
        errors.ScaleOverflowError,
        errors.DependencyError,
        errors.HubError,
        errors.UnreachableError,
        errors.UsageError,
        errors.SignatureError,
    }
    assert {case.code for case in CASES.values()} == {kind.code for kind in set(concrete_classes()) - without_file}
    assert len(CASES) == len(refusal_cases())


def test_the_corpus_is_what_its_script_makes(tmp_path: Path, bad: Path) -> None:
    """After a change to make_bad.py or builders.py: python tests/vectors/make_bad.py."""
    make_bad = load_make_bad()
    make_bad.write_all(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    committed = {path.relative_to(bad): path.read_bytes() for path in bad.rglob("*") if path.is_file()}
    assert made.keys() == committed.keys()
    assert [str(name) for name in made if made[name] != committed[name]] == []
    assert max(len(data) for data in committed.values()) < 20_000
    stated = [(case.name, case.code, case.operation, case.why) for case in make_bad.sorted_cases()]
    assert stated == [(case.name, case.code, case.operation, case.why) for case in refusal_cases()]
    assert [make_bad.reader_of(case.name) for case in refusal_cases()] == [case.reader for case in refusal_cases()]


def test_the_valid_checkpoints_behind_the_corpus_are_fine(tmp_path: Path) -> None:
    """So that a case can only be refused for what it spoils."""
    for name, draft in load_make_bad().valid_drafts().items():
        report = verify_checkpoint(draft.write(tmp_path / name), deep=True)
        assert [finding for part in report.checks for finding in part.findings] == []


def test_a_refusal_writes_nothing(bad: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in bad.rglob("*")}
    for name in CASES:
        verify_checkpoint(bad / name)
    assert {path: path.stat().st_mtime_ns for path in bad.rglob("*")} == before


def test_errors_are_exported() -> None:
    assert espalier_format.errors is errors
    assert espalier_format.EspalierError is EspalierError
