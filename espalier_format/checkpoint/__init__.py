"""Open checkpoints: Espalier, EXL3 and plain safetensors, all as one ``Checkpoint``."""

from __future__ import annotations

from espalier_format.checkpoint.base import Checkpoint, ExpertBankView
from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.module import QuantizedModule
from espalier_format.checkpoint.opening import open_checkpoint
from espalier_format.checkpoint.tensors import TensorRef

__all__ = [
    "Checkpoint",
    "Component",
    "ExpertBankView",
    "QuantizedModule",
    "TensorRef",
    "component_of",
    "open_checkpoint",
]
