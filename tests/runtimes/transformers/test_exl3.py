"""EXL3 folders in transformers: refused with the way out, unless another package can load them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from espalier_format import errors
from espalier_format.runtimes import transformers as runtime
from espalier_format.runtimes.transformers.exl3 import METHOD, RefusedExl3Config, refuse_exl3

AUTO = transformers.AutoModelForCausalLM
CONFIGS, QUANTIZERS = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
COMMAND = "espalier-format convert SRC DST --to espalier"


class Foreign(QuantizationConfigMixin):
    """Of a package that loads EXL3."""

    def __init__(self, **_: Any) -> None:
        raise LookupError("asked")


@pytest.mark.capability("transformers", "refuses what does not fit")
@pytest.mark.parametrize("load", [AUTO.from_pretrained, runtime.load], ids=["from_pretrained", "load"])
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}, {"dtype": "float16"}])
def test_refused_with_the_way_out(llama_exl3: Path, load: Any, options: dict[str, Any]) -> None:
    with pytest.raises(errors.SourceError) as refusal:
        load(llama_exl3, **options)
    assert type(refusal.value) is errors.SourceError
    assert str(refusal.value).endswith(COMMAND)


def test_config_and_model_without_weights_are_as_before(llama_exl3: Path) -> None:
    """Only what would run with random weights is refused."""
    config = transformers.AutoConfig.from_pretrained(llama_exl3)
    assert config.quantization_config["quant_method"] == METHOD
    assert type(AUTO.from_config(config)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("mapping", [CONFIGS, QUANTIZERS], ids=["config", "quantizer"])
def test_who_has_registered_before_stays(mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CONFIGS, METHOD)
    monkeypatch.setitem(mapping, METHOD, Foreign)
    refuse_exl3()
    importlib.reload(runtime)
    assert {name: each[METHOD] for name, each in (("c", CONFIGS), ("q", QUANTIZERS)) if METHOD in each} == {
        "c" if mapping is CONFIGS else "q": Foreign
    }


def test_who_comes_later_is_asked(llama_exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exllamav3 does it, in both tables; and a second import of this package leaves it there."""
    monkeypatch.setitem(CONFIGS, METHOD, Foreign)
    monkeypatch.setitem(QUANTIZERS, METHOD, Foreign)
    importlib.reload(runtime)
    with pytest.raises(LookupError, match="asked"):
        AUTO.from_pretrained(llama_exl3)


def test_registered_by_the_import_alone() -> None:
    assert CONFIGS[METHOD] is RefusedExl3Config
    assert METHOD not in QUANTIZERS


def test_a_config_object_of_another_checkpoint(llama_exl3: Path, tmp_path: Path) -> None:
    """The config says Espalier, and the folder is EXL3."""
    from espalier_format.operations.convert import convert_checkpoint

    convert_checkpoint(llama_exl3, tmp_path / "espalier", to="espalier")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "espalier")
    with pytest.raises(errors.SourceError, match="of the format exl3, not Espalier; convert it"):
        AUTO.from_pretrained(llama_exl3, config=config)


WITHOUT = """
import sys, transformers
import espalier_format, espalier_format.checkpoint, espalier_format.operations.convert
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
print("exl3" in AUTO_QUANTIZATION_CONFIG_MAPPING)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""


def test_without_the_adapter_nothing_is_registered(llama_exl3: Path) -> None:
    """And transformers runs random weights, which is why it is. Once it refuses or loads EXL3 itself, this fails."""
    command = [sys.executable, "-c", WITHOUT, str(llama_exl3)]
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    assert output.stdout.split() == ["False", "Linear"]
