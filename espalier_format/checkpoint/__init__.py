"""Open checkpoints: Espalier, EXL3, compressed-tensors and plain safetensors, all as one ``Checkpoint``."""

from __future__ import annotations

from espalier_format.checkpoint.base import Checkpoint, ExpertBankView
from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.module import QuantizedModule
from espalier_format.checkpoint.opening import open_checkpoint
from espalier_format.checkpoint.packed_module import PackedModule
from espalier_format.checkpoint.tensors import TensorRef

__all__ = [
    "Checkpoint",
    "Component",
    "ExpertBankView",
    "PackedModule",
    "QuantizedModule",
    "TensorRef",
    "component_of",
    "open_checkpoint",
]
