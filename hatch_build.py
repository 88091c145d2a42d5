"""Where the three folders go that lie at the top of the repository and belong to the package.

In a checkout `espalier_format/converters`, `kernels` and `spec` are symbolic links. A build would follow them, and a
source archive hold all of it twice, so pyproject.toml leaves the links out: an archive has the folders at the top only,
a wheel takes them from there, and an editable installation from an unpacked archive gets its links here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE: Final = "espalier_format"
LINKED: Final = ("converters", "kernels", "spec")


class LinkedFolders(BuildHookInterface[Any]):
    """Puts the three folders into the package."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Prepare a wheel; ``version`` is "standard" or "editable"."""
        for name in LINKED:
            link = Path(self.root, PACKAGE, name)
            if version != "editable":
                build_data["force_include"][str(Path(self.root, name))] = f"{PACKAGE}/{name}"
            elif not link.exists():
                link.symlink_to(Path("..", name))
