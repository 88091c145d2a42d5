"""Blocks of rows of the source: the right numbers, and memory for no more than the block."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Exl3Module, Module, Tensor, bf16, espalier_draft, exl3_draft, safetensors_bytes
from quantize_cases import moe_draft, values

from espalier_format.checkpoint import open_checkpoint
from espalier_format.quantize.inventory import take_inventory
from espalier_format.quantize.matrices import DecodedMatrix, Matrix

BANK = "model.language_model.layers.0.mlp.experts"


def peak(call: Callable[[], Any]) -> int:
    """Most bytes that were allocated at a time while ``call`` ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_block_of_rows_of_fused_experts(transposed: bool, offset: int, tmp_path: Path) -> None:
    """Also where the tensor is not aligned: a file that exllamav3 or an older writer made."""
    draft = moe_draft(experts=4, hidden=256, width=512, transposed=transposed)
    tensors = {"a": Tensor("U8", (offset,), bytes(offset)), **draft.shards["model.safetensors"]}
    draft.write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with open_checkpoint(tmp_path) as source:
        found = take_inventory(source, exl3=False)
        for projection, part in (("up_proj", "up"), ("gate_proj", "gate"), ("down_proj", "down")):
            shape = (256, 512) if part == "down" else (512, 256)
            whole = bf16(values(part, (4, *shape))[3] * 4.0**3)
            expected = (whole.array().astype(np.uint32) << 16).view(np.float32).reshape(shape)
            matrix: Matrix = found[f"{BANK}.3.{projection}"].matrix
            blocks: list[np.ndarray] = []
            used = peak(lambda matrix=matrix, blocks=blocks: blocks.append(matrix.rows(16, 32)))
            assert np.array_equal(blocks[0], expected[16:32])
            assert blocks[0].flags.aligned
            assert matrix.stored_rows(16, 32) == whole.array().reshape(shape)[16:32].tobytes()
            most = 16 * shape[1] * 24 + 50_000
            assert max(used, peak(lambda matrix=matrix: matrix.stored_rows(16, 32))) < most < whole.array().nbytes


def exl3() -> Draft:
    return exl3_draft([Exl3Module("lm_head", 96, 300, 2)], config={"model_type": "x"})


def espalier(rotation: tuple[int, int]) -> Draft:
    return espalier_draft([Module("lm_head", 96, 300, "e2m1@2", rotation)], ())


@pytest.mark.parametrize("draft", [exl3(), espalier((32, 64)), espalier((0, 0)), espalier((128, 256))])
def test_any_rows_of_a_quantized_module(draft: Draft, tmp_path: Path) -> None:
    with open_checkpoint(draft.write(tmp_path)) as source:
        module = source.modules["lm_head"]
        whole = source.decode("lm_head")
        matrix = DecodedMatrix(module)
        for start, stop in ((0, 1), (0, 300), (15, 17), (63, 129), (128, 256), (255, 257), (299, 300)):
            if stop <= module.out_features:
                assert np.array_equal(matrix.rows(start, stop), whole[start:stop])
