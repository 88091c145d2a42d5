"""Frozen models of ``quantization_config`` and of the manifest, and the parsers that check them."""

from __future__ import annotations

from espalier_format.schema.config import (
    CodebookConstants,
    ModuleSpec,
    Producer,
    QuantizationConfig,
    Source,
    parse_quantization_config,
)
from espalier_format.schema.expert_bank import ExpertBank, Projection, Rotation
from espalier_format.schema.manifest import FileEntry, Manifest, parse_manifest

__all__ = [
    "CodebookConstants",
    "ExpertBank",
    "FileEntry",
    "Manifest",
    "ModuleSpec",
    "Producer",
    "Projection",
    "QuantizationConfig",
    "Rotation",
    "Source",
    "parse_manifest",
    "parse_quantization_config",
]
