"""The ``espalier-format`` command; :func:`main` is its entry point."""

from __future__ import annotations

from espalier_format.cli.frame import main

__all__ = ["main"]
