"""Tensors that hold several linear modules: fused experts, and for EXL3 also fused projections of dense layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.text_sections import text_section
from espalier_format.converters.hf_architectures import model_types
from espalier_format.errors import ShapeError, SourceError
from espalier_format.quantize.linear import Linear
from espalier_format.quantize.matrices import StoredMatrix, TransposedMatrix
from espalier_format.schema.base import MAX_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.tensors import TensorRef

GATE_UP: Final = "gate_up_proj"
DOWN: Final = "down_proj"
INTERLEAVED: Final = frozenset({"gpt_oss"})
"""Model types whose fused experts alternate rows of gate and up, and have biases."""

_DENSE_GATE_UP: Final = re.compile(r"(?P<parent>(?:.+\.)?(?:mlp|shared_experts?|shared_mlp))\.gate_up_proj\.weight")
_DENSE_QKV: Final = re.compile(r"(?P<parent>(?:.+\.)?self_attn)\.qkv_proj\.weight")


def fused_experts(source: Checkpoint) -> dict[str, list[Linear]]:
    """Return the modules in each fused tensor ``<bank>.gate_up_proj`` or ``<bank>.down_proj`` of three dimensions.

    They are stored (experts, out, in) or (experts, in, out); the two tensors of a bank tell which, by their shapes:
    gate and up together have twice as many outputs as down has inputs. The order is expert by expert.

    Raises:
        ShapeError: the two tensors of a bank do not fit together.
    """
    if not INTERLEAVED.isdisjoint(model_types(source.config)):
        return {}
    found: dict[str, list[Linear]] = {}
    for name in source.tensors:
        bank, _, kind = name.rpartition(".")
        partner = f"{bank}.{DOWN}"
        if kind != GATE_UP or bank.rpartition(".")[2] != "experts" or partner not in source.tensors:
            continue
        gate_up, down = source.tensors[name], source.tensors[partner]
        if len(gate_up.shape) == 3 and len(down.shape) == 3:
            found[name], found[partner] = _experts(bank, gate_up, down)
    return found


def _experts(bank: str, gate_up: TensorRef, down: TensorRef) -> tuple[list[Linear], list[Linear]]:
    experts, first, second = gate_up.shape
    if down.shape[0] == experts and first == 2 * down.shape[2] and second == down.shape[1]:
        outputs, inputs, transposed = first // 2, second, False
    elif down.shape[0] == experts and second == 2 * down.shape[1] and first == down.shape[2]:
        outputs, inputs, transposed = second // 2, first, True
    else:
        raise ShapeError(
            f"its fused experts do not fit those of {down.name}, of shape {list(down.shape)}",
            path=gate_up.shard.path,
            tensor=gate_up.name,
            got=list(gate_up.shape),
        )

    def part(tensor: TensorRef, expert: int, name: str, shape: tuple[int, int], skip: int, rows: int) -> Linear:
        matrix = (
            TransposedMatrix(tensor, shape, expert, skip)
            if transposed
            else StoredMatrix(tensor, shape, expert * rows + skip)
        )
        return Linear(f"{bank}.{expert}.{name}", matrix, tensor.name, (tensor.name,), fused=True)

    gates_and_ups = [
        part(gate_up, expert, name, (outputs, inputs), skip, 2 * outputs)
        for expert in range(experts)
        for name, skip in (("gate_proj", 0), ("up_proj", outputs))
    ]
    downs = [part(down, expert, DOWN, (inputs, outputs), 0, inputs) for expert in range(experts)]
    return gates_and_ups, downs


def fused_projections(source: Checkpoint, name: str) -> tuple[Linear, ...]:
    """Return the modules in a fused ``gate_up_proj`` or ``qkv_proj`` of a dense layer; none for another tensor.

    Raises:
        ShapeError: the tensor cannot be divided as config.json says.
        SourceError: there is a bias.
    """
    tensor = source.tensors[name]
    if match := _DENSE_GATE_UP.fullmatch(name):
        half = tensor.shape[0] // 2
        return _rows(source, tensor, match["parent"], {"gate_proj": half, "up_proj": half})
    if match := _DENSE_QKV.fullmatch(name):
        heads, kv_heads, size = _heads(source.config)
        if heads and kv_heads and size:
            parts = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
            return _rows(source, tensor, match["parent"], parts)
    return ()


def _rows(source: Checkpoint, tensor: TensorRef, parent: str, parts: dict[str, int]) -> tuple[Linear, ...]:
    outputs, inputs = tensor.shape
    if sum(parts.values()) != outputs:
        raise ShapeError(
            f"it cannot be divided into {', '.join(parts)}",
            path=tensor.shard.path,
            tensor=tensor.name,
            expected=f"{sum(parts.values())} outputs",
            got=outputs,
        )
    bias = f"{tensor.name.removesuffix('.weight')}.bias"
    if bias in source.tensors:
        raise SourceError("fused projections with a bias cannot be taken apart", path=tensor.shard.path, tensor=bias)
    linears = []
    first = 0
    for part, rows in parts.items():
        matrix = StoredMatrix(tensor, (rows, inputs), first)
        linears.append(Linear(f"{parent}.{part}", matrix, tensor.name, (tensor.name,), fused=True))
        first += rows
    return tuple(linears)


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key heads, and the head size; 0 for what config.json does not say."""
    text = text_section(config)

    def number(key: str, default: int = 0) -> int:
        value = text.get(key, default)
        return value if isinstance(value, int) and 0 <= value <= MAX_SIZE else default

    heads = number("num_attention_heads")
    size = number("head_dim", number("hidden_size") // heads if heads else 0)
    return heads, number("num_key_value_heads", heads), size
