"""``upload``: verify a folder, write its model card, put it on the Hub, and verify what is there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from espalier_format.container.atomic_file import replace_file
from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.hashing import hash_file
from espalier_format.container.names import MANIFEST_NAME
from espalier_format.container.regular_file import read_regular
from espalier_format.converters.output import manifest_bytes
from espalier_format.errors import EspalierError, HubError, MalformedError, SourceError, UnreachableError, UsageError
from espalier_format.hub.address import HubAddress
from espalier_format.hub.card import CARD_NAME, CardFacts, authors_text, is_untouched, write_card
from espalier_format.hub.client import HubClient
from espalier_format.hub.commits import DEFAULT_BRANCH, Published, Publisher
from espalier_format.hub.remote_folder import RemoteFolder
from espalier_format.hub.remote_verify import verify_remote
from espalier_format.hub.repository import RemoteRepository, read_repository
from espalier_format.hub.upload_plan import CommitLimits, plan_upload
from espalier_format.hub.upload_report import UploadReport
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify import verify_checkpoint
from espalier_format.operations.verify_files import read_manifest
from espalier_format.read_only import ReadOnlyDict
from espalier_format.schema.manifest import parse_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.hub.upload_plan import UploadPlan
    from espalier_format.progress import Progress
    from espalier_format.schema.manifest import Manifest

MAX_CARD_BYTES: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """How to publish. ``private`` is for a new repository; ``prune`` deletes files that only the repository has.

    ``base_model`` and ``license`` go into the card where it does not state them. ``readme`` says whose text to keep
    where README.md was written differently in the folder and in the repository.
    """

    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None
    base_model: str | None = None
    license: str | None = None
    prune: bool = False
    readme: Literal["folder", "repository"] | None = None
    limits: CommitLimits = field(default_factory=CommitLimits)


def upload_checkpoint(
    path: Path,
    repo_id: str,
    options: UploadOptions | None = None,
    *,
    client: HubClient | None = None,
    progress: Progress | None = None,
) -> UploadReport:
    """Publish the checkpoint folder ``path`` as the model repository ``repo_id``, and verify it there.

    The folder is verified first; a finding stops everything, and the report says what it is. A folder without a
    manifest gets one, README.md is written or refreshed (``write_card``), in the folder too. Repository and branch
    are made where there is none, after everything that can be refused.
    Running it again sends only what is missing, and commits nothing if nothing changed.

    Raises:
        UsageError: the folder cannot be published, or files that only the repository has would be in the way.
        SourceError: ``path`` is no folder.
        SchemaError: the card's metadata cannot be read.
        HubError, UnreachableError: as ``Publisher.publish``.
        WriteError: the manifest or the card cannot be written.
    """
    chosen = UploadOptions() if options is None else options
    hub = HubClient() if client is None else client
    target = HubAddress.parse(repo_id)
    if target.revision is not None:
        raise UsageError(f"give the branch as --revision {target.revision}, not in the repository's name")
    address = replace(target, revision=None if chosen.revision == DEFAULT_BRANCH else chosen.revision)
    if not path.is_dir():
        raise SourceError("is not a folder; a checkpoint is published whole", path=path)
    folder = CheckpointFolder(path)
    if folder.cached:
        text = "is in huggingface_hub's cache, whose files must stay as they are; download it with --local-dir instead"
        raise UsageError(text, path=path)
    local = verify_checkpoint(path, progress=progress)
    if local.findings:
        return UploadReport(str(path), address, local)
    # All that may be refused comes before anything is made on the Hub.
    found = _find(hub, address)
    if chosen.private and found is not None and not found.private:
        raise UsageError(f"{address.repo_id} is there already, and public; --private is for a new repository")
    manifest = read_manifest(folder) or _write_manifest(folder)
    repository = RemoteRepository(address, "", chosen.private, ReadOnlyDict()) if found is None else found
    warnings = _write_card(folder, manifest, hub, repository, chosen)
    plan = _plan(folder, manifest, hub, repository, chosen)
    if found is None or found.address != address:
        _make(hub, address, chosen, repository_too=found is None)
        repository = read_repository(hub, address)
        plan = _plan(folder, manifest, hub, repository, chosen)
    if plan.empty:
        done = Published(repository.commit, address.revision or DEFAULT_BRANCH)
    else:
        message = chosen.message or f"Upload {local.format} checkpoint with espalier-format"
        publisher = Publisher(hub, repository, folder, manifest, plan, message, chosen.limits)
        done = publisher.publish(create_pr=chosen.create_pr)
    return UploadReport(
        path=str(path),
        address=address,
        local=local,
        remote=verify_remote(replace(address, revision=done.commit), client=hub),
        created=found is None,
        commit=done.commit,
        revision=done.revision,
        pull_request=done.pull_request,
        added=tuple(plan.sizes),
        unchanged=plan.unchanged,
        deleted=plan.deleted,
        uploaded=sum(plan.sizes.values()),
        warnings=(*local.warnings, *warnings, *done.warnings),
    )


def _write_manifest(folder: CheckpointFolder) -> Manifest:
    records = {name: hash_file(folder.resolve(name)) for name in folder.files()}
    replace_file(folder.root / MANIFEST_NAME, manifest_bytes(records))
    manifest = read_manifest(folder)
    if manifest is None:
        raise SourceError("the folder changes while it is read", path=folder.root)
    return manifest


def _find(client: HubClient, address: HubAddress) -> RemoteRepository | None:
    """Return the repository as it is at ``address``, or at main, where a new branch begins; None if there is none."""
    api = client.api()
    main = replace(address, revision=None)
    if not client.patiently(main.root, lambda: api.repo_exists(address.repo_id)):
        return None
    branch = address.revision
    has_branch = branch is None or client.patiently(main.root, lambda: api.revision_exists(address.repo_id, branch))
    return read_repository(client, address if has_branch else main)


def _make(client: HubClient, address: HubAddress, options: UploadOptions, *, repository_too: bool) -> None:
    """Make the branch that ``address`` names, if it is not main, and the repository before it."""
    api = client.api()
    root, branch = replace(address, revision=None).root, address.revision
    if repository_too:
        private = True if options.private else None  # None leaves it to what the owner has set as a default
        client.patiently(root, lambda: api.create_repo(address.repo_id, private=private, exist_ok=True))
    if branch is not None:
        client.patiently(root, lambda: api.create_branch(address.repo_id, branch=branch, exist_ok=True))


def _plan(
    folder: CheckpointFolder,
    manifest: Manifest,
    client: HubClient,
    repository: RemoteRepository,
    options: UploadOptions,
) -> UploadPlan:
    published = _published_names(client, repository)
    return plan_upload(folder, manifest, repository.files, published, prune=options.prune)


def _write_card(
    folder: CheckpointFolder,
    manifest: Manifest,
    client: HubClient,
    repository: RemoteRepository,
    options: UploadOptions,
) -> tuple[str, ...]:
    """Write README.md into the folder, on top of what its author wrote there or in the repository."""
    local = remote = None
    if folder.has(CARD_NAME):
        local = _text(read_regular(folder.resolve(CARD_NAME), MAX_CARD_BYTES), folder.root / CARD_NAME)
    if CARD_NAME in repository.files:
        remote_folder = RemoteFolder(client, repository)
        remote = _text(remote_folder.read_bytes(CARD_NAME, MAX_CARD_BYTES), remote_folder.root / CARD_NAME)
    base = _choose_text(local, remote, options)
    facts = CardFacts(
        repository.address.repo_id, inspect_checkpoint(folder.root), manifest, options.base_model, options.license
    )
    card, warnings = write_card(base, facts)
    if card != local:
        replace_file(folder.root / CARD_NAME, card.encode("utf-8"))
    return warnings


def _choose_text(local: str | None, remote: str | None, options: UploadOptions) -> str | None:
    if local is None or remote is None:
        return remote if local is None else local
    if options.readme is not None:
        return local if options.readme == "folder" else remote
    ours, theirs = authors_text(local), authors_text(remote)
    if is_untouched(ours):
        return remote
    if ours == theirs or is_untouched(theirs):
        return local
    raise UsageError(
        f"{CARD_NAME} was written differently in the folder and in the repository; say whose text to keep: "
        "--readme folder or --readme repository"
    )


def _text(data: bytes, path: str | Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedError("is not UTF-8", path=path) from error


def _published_names(client: HubClient, repository: RemoteRepository) -> tuple[str, ...]:
    """Return the files that the repository's manifest lists: they came with the checkpoint that is replaced."""
    folder = RemoteFolder(client, repository)
    if not folder.has(MANIFEST_NAME):
        return ()
    try:
        return tuple(parse_manifest(folder.read_json_object(MANIFEST_NAME)).files)
    except (HubError, UnreachableError):
        raise
    except EspalierError:
        return ()
