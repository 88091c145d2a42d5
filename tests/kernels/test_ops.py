"""`espalier_format.kernels.ops` is where all operations are found."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
from espalier_format.kernels import ops
from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank
from espalier_format.kernels.linear import LinearOperand, linear


def test_names() -> None:
    assert all(hasattr(ops, name) for name in ops.__all__)
    assert (ops.linear, ops.LinearOperand) == (linear, LinearOperand)
    assert (ops.expert_bank, ops.ExpertBankOperand) == (expert_bank, ExpertBankOperand)
    assert all(callable(function) for function in (ops.decode_codes, ops.decode_weight, ops.matmul))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ops.nonsense


@pytest.mark.parametrize("first", ["ops", "expert_bank", "decode", "matmul", "linear", "expert_bank_op"])
def test_whatever_is_imported_first(first: str) -> None:
    code = f"import espalier_format.kernels.{first}; from espalier_format.kernels.ops import *; expert_bank, matmul"
    subprocess.run([sys.executable, "-c", code], check=True)
