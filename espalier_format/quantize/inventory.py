"""Which linear modules a source has: plain or quantized, whole, fused or tied."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.files import refuse_missing_tensors
from espalier_format.converters.espalier_block import is_embedding_name
from espalier_format.errors import ShapeError, SourceError
from espalier_format.quantize.fused import fused_experts, fused_projections
from espalier_format.quantize.linear import Linear
from espalier_format.quantize.matrices import DecodedMatrix, PackedMatrix, StoredMatrix
from espalier_format.schema.base import DOTTED_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule

_NEVER: Final = re.compile(
    r"(?:.*\.)?(?:router(?:\..*)?|shared_expert_gate|(?:mlp|feed_forward|ffn|block_sparse_moe|moe)\.gate)"
)
"""Routers and expert gates: what they decide cannot be made good by anything that follows."""

_NAMED: Final = re.compile(DOTTED_NAME.replace("$", r"\Z"))
_TOKENS: Final = re.compile(r"(?P<prefix>(?:.+\.)?)(?:embed_tokens|wte|word_embeddings|tok_embeddings)\.weight")
_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config")


def take_inventory(source: Checkpoint, *, exl3: bool) -> dict[str, Linear]:
    """Return all linear modules by name, in the order in which their tensors are stored.

    These are the matrices that are multiplied with: ``.weight`` tensors of two dimensions, parts of fused 3-D experts
    (``experts.gate_up_proj`` and ``experts.down_proj``), modules that are quantized already, and a head that is tied
    to the embedding. Embeddings, routers and expert gates are not among them. With ``exl3`` fused projections of
    dense layers are taken apart as well, which is how exllamav3 names them.

    Raises:
        SourceError: the source is quantized in a way that this library does not read, or has no tensors.
        IndexMismatchError: the index of a compressed-tensors checkpoint names a tensor that no shard holds.
        ShapeError: fused experts do not fit together, or a bias has another size than its module.
    """
    _check_source(source)
    found: dict[str, Linear] = {}
    experts = fused_experts(source)
    for name in source.tensors:
        if name in experts:
            found.update((linear.name, linear) for linear in experts[name])
            continue
        module, _, kind = name.rpartition(".")
        if module in source.packed:
            if source.packed[module].weight.name == name:
                found[module] = _packed(source.packed[module])
        elif module in source.modules:
            quantized = source.modules[module]
            if quantized.trellis.name == name:
                found[module] = _quantized(quantized)
        elif kind == "weight" and len(source.tensors[name].shape) == 2 and _is_linear(module):
            parts = fused_projections(source, name) if exl3 else ()
            for linear in parts or (_plain(source, module, name),):
                found[linear.name] = linear
    head = _tied_head(source, found)
    if head is not None:
        found[head.name] = head
    return found


def _check_source(source: Checkpoint) -> None:
    if source.packed:
        refuse_missing_tensors(source)
    if source.format != "plain":
        return
    block = source.config.get("quantization_config")
    if isinstance(block, dict):
        method = str(block.get("quant_method"))[:40]
        raise SourceError(
            f"the source is quantized by {method!a}, which is not read here; give the unquantized model",
            path=source.folder.root,
        )


def _is_linear(module: str) -> bool:
    return is_plain_matrix(module) and _NEVER.fullmatch(module) is None


def _plain(source: Checkpoint, module: str, name: str) -> Linear:
    tensor = source.tensors[name]
    outputs, inputs = tensor.shape
    bias = source.tensors.get(f"{module}.bias")
    if bias is not None and bias.shape != (outputs,):
        raise ShapeError(
            "the bias does not fit the weight",
            path=bias.shard.path,
            tensor=bias.name,
            expected=[outputs],
            got=list(bias.shape),
        )
    return Linear(module, StoredMatrix(tensor, (outputs, inputs)), name, (name,), bias)


def _quantized(module: QuantizedModule) -> Linear:
    replaces = tuple(
        tensor.name for tensor in (module.trellis, module.suh, module.svh, module.marker) if tensor is not None
    )
    return Linear(module.name, DecodedMatrix(module), module.trellis.name, replaces, module.bias, quantized=module)


def _packed(module: PackedModule) -> Linear:
    """Return a module of a compressed-tensors checkpoint; one that may not be quantized becomes plain."""
    replaces = tuple(tensor.name for tensor in module.tensors)
    fixed = not _is_linear(module.name)
    anchor = module.weight.name
    return Linear(module.name, PackedMatrix(module), anchor, replaces, module.bias, decoded=True, fixed=fixed)


def _tied_head(source: Checkpoint, found: Mapping[str, Linear]) -> Linear | None:
    """Return the head that shares the embedding's weight, where there is no other and the config does not deny it."""
    if any(linear.component is Component.HEAD for linear in found.values()):
        return None
    stated = _tie(source.config)
    if stated is False or (stated is None and not _generates(source.config)):
        return None
    for name in source.tensors:
        match = _TOKENS.fullmatch(name)
        if match is None or component_of(name) is not Component.EMBEDDINGS:
            continue
        tensor = source.tensors[name]
        if len(tensor.shape) == 2:
            head = "language_model.lm_head" if match["prefix"].startswith("language_model.") else "lm_head"
            return Linear(head, StoredMatrix(tensor, (tensor.shape[0], tensor.shape[1])), name, ())
    return None


def _tie(config: Mapping[str, Any]) -> bool | None:
    """Return what the config says about a tie; the text part decides where it says anything."""
    for section in (*(config.get(part) for part in _TEXT_PARTS), config):
        value = section.get("tie_word_embeddings") if isinstance(section, dict) else None
        if isinstance(value, bool):
            return value
    return None


def _generates(config: Mapping[str, Any]) -> bool:
    """Tell whether the model has a head: a missing key means "tied" for most architectures, but only then."""
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)


def is_plain_matrix(module: str) -> bool:
    """Tell by its name whether a module's two-dimensional weight is one to multiply with, and a config can name it."""
    embedding = is_embedding_name(module) or component_of(f"{module}.weight") is Component.EMBEDDINGS
    return not embedding and _NAMED.match(module) is not None
