"""Sources for every conversion, small but of several shards, made without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from builders import Draft, Exl3Module, Tensor, bf16, exl3_draft, llama_config, llama_modules

from espalier_format.converters.to_hf import to_hf
from espalier_format.operations.convert import convert_checkpoint

PAIRS = ("exl3 to espalier", "espalier to exl3", "exl3 to hf", "compressed-tensors to hf")
SHARD_BYTES = 60_000


def exl3_source(folder: Path, *, layers: int = 1) -> Path:
    """An EXL3 Llama of four shards, with an index, the files of exllamav3, and one in a sub-folder."""
    modules = [Exl3Module(name, inputs, outputs, 2) for name, inputs, outputs in llama_modules(layers=layers)]
    modules.append(Exl3Module("lm_head", 192, 90, 6))
    draft = exl3_draft(modules, num_shards=4, config=llama_config(layers=layers))
    draft.files |= {"tokenizer.json": b"{}" * 5000, "extra/notes.txt": b"notes"}
    return draft.write(folder)


def int8_source(folder: Path) -> Path:
    """A compressed-tensors checkpoint of two shards: six int8 matrices with a scale per row."""
    rng = np.random.default_rng(3)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": scheme, "format": "int-quantized"}
    block = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    shards: dict[str, dict[str, Tensor]] = {}
    for number in range(6):
        shard = shards.setdefault(f"model-{number // 3 + 1:05}-of-00002.safetensors", {})
        codes = rng.integers(-127, 128, (96, 160), np.int8)
        shard[f"model.layers.{number}.mlp.up_proj.weight"] = Tensor.of(codes, "I8")
        scales = rng.uniform(0.01, 0.1, (96, 1)).astype(np.float32)
        shard[f"model.layers.{number}.mlp.up_proj.weight_scale"] = bf16(scales)
    return Draft({"model_type": "llama", "quantization_config": block}, shards, files={"a.txt": b"a"}).write(folder)


def make_source(pair: str, folder: Path) -> Path:
    """Write the source of a pair into ``folder``, which is made."""
    if pair.startswith("compressed"):
        return int8_source(folder / "source")
    exl3 = exl3_source(folder / "exl3")
    if pair.startswith("exl3"):
        return exl3
    convert_checkpoint(exl3, folder / "espalier", to="espalier")
    return folder / "espalier"


def run_conversion(pair: str, source: Path, out: Path, **options: Any) -> int:
    """Convert, plain weights into files of few bytes, and return how many files were taken over."""
    defaults = to_hf.__kwdefaults__
    assert defaults is not None
    before, defaults["max_shard_bytes"] = defaults["max_shard_bytes"], SHARD_BYTES
    try:
        target: Any = pair.rpartition(" ")[2]
        return convert_checkpoint(source, out, to=target, **options).resumed
    finally:
        defaults["max_shard_bytes"] = before


def content(folder: Path) -> dict[str, bytes]:
    """All files but those in hidden folders at the top."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".")}
