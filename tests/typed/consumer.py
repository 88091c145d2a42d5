"""What a runtime's author writes against the public API; mypy must find every type that is asserted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch

import espalier_format as ef
from espalier_format.checkpoint import Component, PackedModule, TensorRef
from espalier_format.converters.report import ConversionReport
from espalier_format.planning import PlannedBank, PlannedModule, RankPlan, TensorSpec
from espalier_format.quantize.report import QuantizeReport
from espalier_format.runtimes.tensor_parallel import ModuleSlice


def read(folder: Path) -> None:
    with ef.open_checkpoint(folder) as checkpoint:
        assert_type(checkpoint, ef.Checkpoint)
        assert_type(checkpoint.modules, Mapping[str, ef.QuantizedModule])
        assert_type(checkpoint.packed, Mapping[str, PackedModule])
        assert_type(checkpoint.tensors, Mapping[str, TensorRef])
        assert_type(checkpoint.expert_banks, Mapping[str, ef.ExpertBankView])
        assert_type(checkpoint.quantization, ef.QuantizationConfig | None)
        for name, module in checkpoint.modules.items():
            assert_type(module.codebook, ef.Codebook)
            assert_type(module.component, Component)
            assert_type(checkpoint.decode(name).shape, tuple[Any, ...])
            assert_type(checkpoint.decode(name, "bfloat16", device="cuda"), torch.Tensor)
            assert_type(checkpoint.digest(name), str)
            suh, svh = module.scales()
            weight = ef.decode_weight(
                module.trellis.array(), suh, svh, module.codebook, *module.rotation, 1, 1, "float32", threads=2
            )
            codes: np.ndarray = ef.decode_codes(module.trellis.array(), module.codebook)
            assert_type(ef.decode_digest(module.trellis.array(), module.codebook), str)
            print(weight.shape, codes.shape)


def allocate(config: dict[str, Any]) -> int:
    plan = ef.plan(config)
    assert_type(plan, ef.Plan)
    assert_type(plan.modules, Mapping[str, PlannedModule])
    assert_type(plan.banks, Mapping[str, PlannedBank])
    assert_type(plan.rank(0, 2), RankPlan)
    for module in plan.modules.values():
        assert_type(module.tensors, tuple[TensorSpec, TensorSpec, TensorSpec])
        assert_type(module.column_parallel(0, 2), ModuleSlice)
    return plan.nbytes


def make(source: Path, destination: Path) -> int:
    try:
        assert_type(
            ef.convert_checkpoint(source, destination, to="hf", dtype="bfloat16", resume=True), ConversionReport
        )
        assert_type(ef.convert_checkpoint(source, destination, to="hf", dtype="bf16", force=True), ConversionReport)
        assert_type(ef.quantize_checkpoint(source, destination, bits=2.5), QuantizeReport)
    except ef.errors.RefusedError as error:
        assert_type(error.code, str)
        assert_type(error.exit_code, int)
    except ef.EspalierError:
        raise
    return ef.verify_checkpoint(destination, deep=True).exit_code
