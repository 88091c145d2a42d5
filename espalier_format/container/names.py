"""File names with a meaning of their own in a checkpoint folder."""

from __future__ import annotations

from typing import Final

SHARD_SUFFIX: Final = ".safetensors"
CONFIG_NAME: Final = "config.json"
MANIFEST_NAME: Final = "espalier_manifest.json"
SIGNATURE_NAME: Final = "espalier_manifest.json.sig"
PROGRESS_NAME: Final = ".espalier-in-progress"
"""Folder inside a destination that holds everything of an output that is not complete yet."""

WORKSPACE_NAME: Final = "work"
"""Folder in it with what survives an interruption, of a command that can go on with it."""
