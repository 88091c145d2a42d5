"""An expert bank of a checkpoint as the operand of the expert-bank kernel."""

from __future__ import annotations

import torch

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.base import Checkpoint
from espalier_format.kernels.expert_bank import Expert, ExpertBankOperand


def load_bank(folder: str, bank: str, device: torch.device) -> ExpertBankOperand:
    """Return the bank of that name, on a device."""
    with open_checkpoint(folder) as checkpoint:
        if checkpoint.quantization is None:
            raise ValueError("no Espalier checkpoint")
        projections = checkpoint.quantization.expert_banks[bank].projections
        view = checkpoint.expert_banks[bank]
        return ExpertBankOperand.from_experts(
            {
                name: [_expert(checkpoint, f"{bank}.{number}.{name}") for number in range(view.num_experts)]
                for name in projections
            },
            hidden=projections["gate_proj"].in_features,
            intermediate=projections["gate_proj"].out_features,
            rotations={name: (entry.rotation.in_, entry.rotation.out) for name, entry in projections.items()},
            device=device,
        )


def _expert(checkpoint: Checkpoint, name: str) -> Expert:
    module = checkpoint.modules.get(name)
    if module is None:
        return checkpoint.decode(f"{name}.weight", "bfloat16", device="cpu")
    suh, svh = module.scales()
    trellis = checkpoint.tensor(f"{name}.esp_trellis")
    arrays = (torch.from_numpy(array.copy()) for array in (trellis, suh, svh))
    return (*arrays, module.codebook)  # type: ignore[return-value] # three tensors and a codebook
