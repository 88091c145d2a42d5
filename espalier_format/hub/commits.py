"""Put the files of a plan into a repository: one commit, or several where nobody sees a part as the whole."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME
from espalier_format.errors import HubError, UnreachableError
from espalier_format.hub.failures import redact, retry_after
from espalier_format.hub.library import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
)
from espalier_format.hub.process_wide import PROCESS_WIDE
from espalier_format.hub.repository import read_repository
from espalier_format.hub.upload_plan import CommitLimits, is_same

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.hub.client import HubClient
    from espalier_format.hub.repository import RemoteRepository
    from espalier_format.hub.upload_plan import UploadPlan
    from espalier_format.schema.manifest import Manifest

DEFAULT_BRANCH: Final = "main"
_THREADS: Final = 5


@dataclass(frozen=True, slots=True)
class Published:
    """Where the files are now: the last commit, the branch or pull request that holds it, and warnings."""

    commit: str
    revision: str
    pull_request: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Publisher:
    """Commits a plan on top of ``repository``, and on nothing else: a commit by somebody else meanwhile stops it."""

    client: HubClient
    repository: RemoteRepository
    folder: CheckpointFolder
    manifest: Manifest
    plan: UploadPlan
    message: str
    limits: CommitLimits = field(default_factory=CommitLimits)

    def publish(self, *, create_pr: bool) -> Published:
        """Send what the Hub lacks, then commit.

        All goes into one commit where that is within ``limits``. Otherwise it goes to a pull request, which is merged
        at the end, or, for another branch than main, to that branch, whose config and index go first and come last.
        Large files are sent before they are committed, so that an interrupted upload continues where it was.

        Raises:
            HubError: refused; or the branch was changed by somebody else: nothing of theirs is overwritten.
            UnreachableError: the Hub cannot be reached.
        """
        branch = self.repository.address.revision or DEFAULT_BRANCH
        parts = self.plan.commits(self.limits)
        if len(parts) == 1:
            return self._commit(parts[0], self.plan.deleted, branch, self.repository.commit, create_pr=create_pr)
        deleted = list(self.plan.deleted)
        staged = create_pr or branch == DEFAULT_BRANCH
        if not staged:
            # The old config must not describe new shards: it goes with the first part.
            deleted += [
                name for name in (CONFIG_NAME, INDEX_NAME) if name in self.repository.files and name in parts[-1]
            ]
        done = self._commit(parts[0], deleted, branch, self.repository.commit, create_pr=staged)
        for part in parts[1:]:
            step = self._commit(part, (), done.revision, done.commit, create_pr=False)
            done = replace(done, commit=step.commit, warnings=(*done.warnings, *step.warnings))
        return self._merge(done, branch) if staged and not create_pr else done

    def _merge(self, done: Published, branch: str) -> Published:
        """Merge the pull request, unless the branch has moved."""
        now = read_repository(self.client, self.repository.address)
        if now.commit != self.repository.commit:
            text = f"{branch} was changed by somebody else meanwhile; everything is in the pull request"
            raise HubError(f"{text} {done.pull_request}", path=self.repository.address.root)
        number = int(done.revision.rpartition("/")[2])
        api = self.client.api()
        self.client.patiently(
            self.repository.address.root,
            lambda: api.merge_pull_request(self.repository.address.repo_id, number),
            repeat=False,
        )
        merged = read_repository(self.client, self.repository.address)
        return replace(done, commit=merged.commit, revision=branch)

    def _commit(
        self, names: Sequence[str], deleted: Sequence[str], revision: str, parent: str, *, create_pr: bool
    ) -> Published:
        repo_id, root = self.repository.address.repo_id, self.repository.address.root
        api = self.client.api()
        adds = [CommitOperationAdd(name, str(self.folder.resolve(name))) for name in names]
        deletes = [CommitOperationDelete(name, is_folder=False) for name in deleted]
        with _supervised(self.client) as warned:
            # Sending is harmless to repeat: what has arrived is not sent again.
            self.client.patiently(
                root,
                lambda: api.preupload_lfs_files(
                    repo_id, adds, revision=revision, create_pr=create_pr, num_threads=_THREADS, free_memory=False
                ),
            )

            def commit() -> Any:
                return api.create_commit(
                    repo_id,
                    [*deletes, *adds],
                    commit_message=self.message,
                    revision=revision,
                    create_pr=create_pr,
                    parent_commit=parent,
                    num_threads=_THREADS,
                )

            try:
                info = self.client.patiently(root, commit, repeat=False)
            except (HubError, UnreachableError):
                arrived = None if create_pr else self._arrived(revision, parent, names, deleted)
                if arrived is None:
                    raise
                return Published(arrived, revision, warnings=tuple(warned))
        held = info.pr_revision if create_pr else revision
        return Published(info.oid, held, info.pr_url if create_pr else None, tuple(warned))

    def _arrived(self, revision: str, parent: str, names: Sequence[str], deleted: Sequence[str]) -> str | None:
        """Return the commit if it was made although its answer was lost; None if it was not."""
        address = replace(self.repository.address, revision=revision)
        try:
            now = read_repository(self.client, address)
        except (HubError, UnreachableError):
            return None
        if now.commit == parent or any(name in now.files for name in deleted if name not in names):
            return None
        there = all(name in now.files and is_same(self.folder, name, self.manifest, now.files[name]) for name in names)
        return now.commit if there else None


def _without_secrets(record: logging.LogRecord) -> bool:
    """Take signed URLs out of what huggingface_hub logs about a failed transfer."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


@contextlib.contextmanager
def _supervised(client: HubClient) -> Iterator[list[str]]:
    """Let huggingface_hub work, and collect its warnings.

    Secrets are kept out of its log, progress bars off what is no terminal, and a pause that a server asks for is given
    up where it is longer than ``client`` waits: huggingface_hub itself would sleep for any time. All of that is the
    whole process's: several threads take turns.
    """
    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    found: list[str] = []

    def refuse_long_pauses(response: Any) -> None:
        after = retry_after(response.headers)
        if response.status_code in (429, 503) and after is not None and after > client.longest_pause:
            raise HubError(f"too many requests; the Hub asks to wait {after:g} s (HTTP {response.status_code})")

    handlers = logging.getLogger("huggingface_hub").handlers
    hooks = get_session().event_hooks
    with PROCESS_WIDE, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for handler in handlers:
            handler.addFilter(_without_secrets)
        hooks["response"].append(refuse_long_pauses)
        if quiet:
            disable_progress_bars()
        try:
            yield found
        finally:
            if quiet:
                enable_progress_bars()
            hooks["response"].remove(refuse_long_pauses)
            for handler in handlers:
                handler.removeFilter(_without_secrets)
            found += [redact(str(item.message)) for item in caught if item.category is UserWarning]
