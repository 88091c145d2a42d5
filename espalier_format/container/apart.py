"""Keep what is read and what is written apart, by path and by what the paths lead to."""

from __future__ import annotations

from pathlib import Path

from espalier_format.errors import UsageError


def check_apart(root: Path, source: Path, destination: Path) -> None:
    """Refuse a destination, resolved `root`, that is, holds or lies in the resolved `source`.

    Raises:
        UsageError: it does; the message names it as `destination`.
        OSError: a folder above cannot be looked at.
    """
    if root == source or root in source.parents or source in root.parents or _meet(root, source):
        raise UsageError("source and destination must be apart from each other", path=destination)


def _meet(first: Path, second: Path) -> bool:
    """Tell whether one of two folders is or holds the other under another path, as bind mounts make possible."""
    ours, theirs = _identities(first), _identities(second)
    return (second.exists() and theirs[0] in ours) or (first.exists() and ours[0] in theirs)


def _identities(path: Path) -> list[tuple[int, int]]:
    """Return device and inode of a path and of all folders above, as far as they exist."""
    found = (step.stat() for step in (path, *path.parents) if step.exists())
    return [(status.st_dev, status.st_ino) for status in found]
