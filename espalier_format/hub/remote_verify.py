"""``verify --remote``: compare a repository's manifest with the Hub's records, and its headers with its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.opening import open_folder
from espalier_format.container.names import MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import DigestError, EspalierError, HubError, InconsistentError, UnreachableError
from espalier_format.hub.client import HubClient
from espalier_format.hub.remote_folder import RemoteFolder
from espalier_format.hub.repository import read_repository
from espalier_format.hub.signing import MAX_SIGNATURE_BYTES
from espalier_format.operations.compressed_tensors_findings import find_contradictions
from espalier_format.operations.verify import structure_counts
from espalier_format.operations.verify_report import Check, VerifyReport, judged, passed, skipped
from espalier_format.operations.verify_signature import signature_check
from espalier_format.operations.verify_tensors import check_bits, check_index
from espalier_format.schema.manifest import UNLISTED_FILES, Manifest, parse_manifest

if TYPE_CHECKING:
    from espalier_format.hub.address import HubAddress
    from espalier_format.hub.repository import RemoteRepository
    from espalier_format.hub.signing import TrustedKey


def verify_remote(
    address: HubAddress, *, client: HubClient | None = None, trusted: TrustedKey | None = None
) -> VerifyReport:
    """Check a repository without downloading its tensors, and return all findings.

    The checks: *structure* (config, index and all shard headers, as opening a folder checks them), *index*, *bits*,
    *manifest* (size and SHA-256, or git blob SHA-1, of every file as the Hub records them; missing and extra files)
    and, with ``trusted``, *signature*. Everything is of one commit. That a file's content is what the Hub's record
    says is taken from the Hub; a download can be verified without trusting anybody.

    Raises:
        HubError, UnreachableError: the repository cannot be read.
    """
    hub = HubClient() if client is None else client
    folder = RemoteFolder(hub, read_repository(hub, address))
    checks: list[Check] = []
    warnings: tuple[str, ...] = ()
    kind = None
    try:
        with open_folder(folder) as checkpoint:
            kind = checkpoint.format
            warnings = checkpoint.warnings
            checks += [passed("structure", structure_counts(checkpoint)), check_index(checkpoint, folder)]
            checks.append(check_bits(checkpoint))
            if checkpoint.format == "compressed-tensors":
                found = find_contradictions(checkpoint)
                checks.append(found.check())
                warnings = (*warnings, *found.warnings)
    except (HubError, UnreachableError):
        raise
    except EspalierError as error:
        word = "contradicts itself" if isinstance(error, InconsistentError) else "refused"
        checks.append(judged("structure", word, [error]))
    checks.append(_check_manifest(folder))
    if trusted is not None:
        checks.append(_check_signature(folder, trusted))
    if not folder.has(MANIFEST_NAME):
        warnings = (*warnings, "there is no manifest, so file sizes and hashes could not be checked")
    return VerifyReport(str(address.root), kind, tuple(checks), warnings)


def _check_manifest(folder: RemoteFolder) -> Check:
    if not folder.has(MANIFEST_NAME):
        return skipped("manifest", "there is none")
    try:
        manifest = parse_manifest(folder.read_json_object(MANIFEST_NAME), folder.root / MANIFEST_NAME)
    except (HubError, UnreachableError):
        raise
    except EspalierError as error:
        return judged("manifest", "cannot be read", [error])
    findings = compare_records(folder.repository, manifest)
    return judged("manifest", f"{len(manifest.files):,} files compared with the Hub's records", findings)


def compare_records(repository: RemoteRepository, manifest: Manifest) -> list[EspalierError]:
    """Return a ``DigestError`` for every missing, extra or differing file, in name order."""
    root = repository.address.root
    findings: dict[str, EspalierError] = {}
    for name, entry in manifest.files.items():
        file = repository.files.get(name)
        if file is None:
            findings[name] = DigestError("the manifest lists this file, but it is not there", path=root / name)
            continue
        for text, expected, got in (
            ("size differs from the manifest", entry.size, file.size),
            ("SHA-256 differs from the manifest", entry.sha256, file.sha256),
            ("git blob SHA-1 differs from the manifest", entry.git_blob_sha1, file.git_blob_sha1),
        ):
            if None not in (expected, got) and expected != got:
                findings[name] = DigestError(text, path=root / name, expected=expected, got=got)
                break
        else:
            if file.sha256 is None and None in (entry.git_blob_sha1, file.git_blob_sha1):
                text = "the Hub records no hash of this file that the manifest has"
                findings[name] = DigestError(text, path=root / name)
    for name in repository.files:
        hidden = any(part[0] == "." for part in name.split("/")[:-1])
        if name not in manifest.files and name not in UNLISTED_FILES and not hidden:
            findings[name] = DigestError("the manifest does not list this file", path=root / name)
    return [findings[name] for name in sorted(findings)]


def _check_signature(folder: RemoteFolder, trusted: TrustedKey) -> Check:
    manifest = folder.read_bytes(MANIFEST_NAME) if folder.has(MANIFEST_NAME) else None
    signature = folder.read_bytes(SIGNATURE_NAME, MAX_SIGNATURE_BYTES) if folder.has(SIGNATURE_NAME) else None
    return signature_check(manifest, signature, trusted, folder.root)
