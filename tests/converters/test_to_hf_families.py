"""Every supported architecture: EXL3 to Hugging Face gives what transformers loads, with the right weights.

The models are tiny, random, and quantized with random codes: that they say anything sensible is not checked.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from builders import read_safetensors
from hf_models import FAMILIES, Exl3Maker, save_model

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.true_sizes.model_types import TEXT_MODELS, WRAPPED_TEXT
from espalier_format.converters.hf_architectures import ARCHITECTURES
from espalier_format.converters.to_hf import to_hf

if TYPE_CHECKING:
    from pathlib import Path

FUSED_EXPERTS = re.compile(r".+\.experts\.(gate_up|down)_proj")
QUICK = ("llama", "mixtral", "qwen3_moe", "gemma", "phi3", "qwen3_5", "gemma3")


def test_every_architecture_whose_sizes_are_known_has_a_layout() -> None:
    assert {*TEXT_MODELS, *WRAPPED_TEXT} <= ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_transformers_loads_every_tensor_and_no_other(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    config, tensors = save_model(family, tmp_path / "original")
    maker = Exl3Maker(config, tensors, plain_vision=family.plain_vision)
    source, output = maker.draft.write(tmp_path / "exl3"), tmp_path / "hf"
    with open_checkpoint(source) as checkpoint:
        assert all(module.size_source == "exact" for module in checkpoint.modules.values())
        assert any(module.padded_in != module.in_features for module in checkpoint.modules.values())
        report = to_hf(checkpoint, output)
    assert report.warnings == ()

    written, metadata = read_safetensors(output / "model.safetensors")
    assert metadata == {"format": "pt"}
    assert sorted(written) == sorted(maker.expected)
    for tensor, expected in maker.expected.items():
        assert (written[tensor].dtype, written[tensor].shape) == (expected.dtype, expected.shape), tensor
        assert written[tensor].data == expected.data, tensor

    auto = getattr(transformers, family.auto)
    model, info = auto.from_pretrained(output, output_loading_info=True)
    assert [key for key, found in info.items() if found] == []
    assert model.dtype == torch.bfloat16
    # What transformers saves again is what was loaded into its parameters, under the names it prefers.
    model.save_pretrained(tmp_path / "again")
    again, _ = read_safetensors(tmp_path / "again" / "model.safetensors")
    assert sorted(again) == sorted(written)
    for tensor, saved in again.items():
        turned = FUSED_EXPERTS.fullmatch(tensor)  # it saves them the other way round than they are published
        assert np.array_equal(saved.array().swapaxes(-1, -2) if turned else saved.array(), written[tensor].array()), (
            tensor
        )
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.arange(9)[None]).logits).all()
    untied = json.loads((output / "config.json").read_text())
    assert untied["tie_word_embeddings"] is False
    assert "quantization_config" not in untied
