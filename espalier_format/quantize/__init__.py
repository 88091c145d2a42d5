"""Quantize a checkpoint: which modules, at which widths, in bounded memory and resumable."""

from __future__ import annotations
