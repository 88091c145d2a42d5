"""Add decode digests to a manifest that is already there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from espalier_format.container.atomic_file import replace_file
from espalier_format.container.names import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.schema.manifest import Manifest


def record_digests(folder: CheckpointFolder, manifest: Manifest, digests: Mapping[str, str]) -> int:
    """Put ``digests`` into the manifest and return how many were not there; nothing is written if none.

    The file is replaced atomically, after the new one is on disk: readers find the old manifest or the new one.

    Raises:
        WriteError: the operating system refuses; the manifest is as before.
    """
    stated = manifest.decode_digests or {}
    added = [name for name in digests if name not in stated]
    if not added:
        return 0
    complete = manifest.model_copy(update={"decode_digests": {**stated, **digests}})
    data = (json.dumps(complete.to_json(), indent=2) + "\n").encode("ascii")
    replace_file(folder.root / MANIFEST_NAME, data)
    return len(added)
