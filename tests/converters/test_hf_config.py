"""The config.json of plain weights: which dtype is meant, and which keys change."""

from __future__ import annotations

import pytest

from espalier_format.converters.hf_config import hf_config, target_dtype
from espalier_format.errors import SourceError, UsageError


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "F16"),
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "torch.float32"}, "F32"),
        ({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "F16"),
        ({"text_config": {"torch_dtype": "float16"}}, "F16"),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, "F16"),
        ({"vision_config": {"dtype": "float16"}}, "BF16"),
        ({"torch_dtype": "auto"}, "BF16"),
        ({}, "BF16"),
    ],
)
def test_source_dtype_is_what_config_states(config: dict[str, object], dtype: str) -> None:
    assert target_dtype(config, "source") == dtype


def test_named_dtype_does_not_ask_config() -> None:
    config = {"dtype": "float8_e4m3fn"}
    assert [target_dtype(config, choice) for choice in ("bf16", "fp16", "fp32")] == ["BF16", "F16", "F32"]
    assert [target_dtype(config, choice) for choice in ("bfloat16", "float16", "float32")] == ["BF16", "F16", "F32"]
    with pytest.raises(SourceError, match="float8_e4m3fn"):
        target_dtype(config, "source")
    with pytest.raises(UsageError, match="fp8"):
        target_dtype(config, "fp8")  # type: ignore[arg-type]


CONFIG: dict[str, object] = {
    "architectures": ["X"],
    "quantization_config": {"quant_method": "exl3", "original_quantization_config": {"quant_method": "fp8"}},
    "torch_dtype": "float16",
    "text_config": {"dtype": "float16", "tie_word_embeddings": True, "quantization_config": {}},
    "vision_config": {"dtype": "float16", "hidden_size": 1},
    "tie_word_embeddings": True,
    "rope": {"factor": 2.0},
}


def test_quantization_goes_and_the_rest_keeps_its_order() -> None:
    result = hf_config(CONFIG, explicit_dtype=None, has_head=False)
    assert list(result) == [key for key in CONFIG if key != "quantization_config"]
    assert result["text_config"] == {"dtype": "float16", "tie_word_embeddings": True}
    assert result["tie_word_embeddings"] is True
    assert "quantization_config" in CONFIG


def test_quantization_goes_from_wherever_a_loader_looks() -> None:
    block = {"quant_method": "compressed-tensors"}
    places = {"quantization_config": block, "compression_config": block}
    config = {**places, "text_config": {**places, "a": 1}, "llm_config": dict(places), "vision_config": {"b": 2}}
    result = hf_config(config, explicit_dtype=None, has_head=False)
    assert result == {"text_config": {"a": 1}, "llm_config": {}, "vision_config": {"b": 2}}
    assert config["compression_config"] is block


def test_head_unties_at_both_levels() -> None:
    result = hf_config(CONFIG, explicit_dtype=None, has_head=True)
    assert result["tie_word_embeddings"] is False
    assert result["text_config"] == {"dtype": "float16", "tie_word_embeddings": False}
    # Gemma's classes take a missing key for true.
    assert hf_config({"model_type": "gemma"}, explicit_dtype=None, has_head=True)["tie_word_embeddings"] is False
    assert "tie_word_embeddings" not in hf_config({"model_type": "gemma"}, explicit_dtype=None, has_head=False)


def test_named_dtype_replaces_each_stated_one_under_its_key() -> None:
    result = hf_config(CONFIG, explicit_dtype="BF16", has_head=False)
    assert result["torch_dtype"] == "bfloat16"
    assert "dtype" not in result
    assert result["text_config"] == {"dtype": "bfloat16", "tie_word_embeddings": True}
    assert result["vision_config"] == {"dtype": "bfloat16", "hidden_size": 1}
    assert hf_config({"a": 1}, explicit_dtype="F32", has_head=False) == {"a": 1, "dtype": "float32"}
