"""Which linear modules a source has: plain or quantized, whole, fused or tied."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.files import refuse_missing_tensors
from espalier_format.checkpoint.quantized_tensors import quantized_tensor
from espalier_format.checkpoint.stated_quantization import BLOCK, stated_quantization
from espalier_format.checkpoint.text_sections import text_sections
from espalier_format.converters.espalier_block import is_embedding_name
from espalier_format.errors import ShapeError, SourceError
from espalier_format.quantize.fused import fused_experts, fused_projections
from espalier_format.quantize.linear import Linear
from espalier_format.quantize.matrices import DecodedMatrix, PackedMatrix, StoredMatrix
from espalier_format.schema.base import is_dotted_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef

_NEVER: Final = re.compile(
    r"(?:.*\.)?(?:router(?:\..*)?|shared_expert_gate|(?:mlp|feed_forward|ffn|block_sparse_moe|moe)\.gate)"
)
"""Routers and expert gates: what they decide cannot be made good by anything that follows."""

_TOKENS: Final = re.compile(r"(?P<prefix>(?:.+\.)?)(?:embed_tokens|wte|word_embeddings|tok_embeddings)\.weight")


def take_inventory(source: Checkpoint, *, exl3: bool) -> dict[str, Linear]:
    """Return all linear modules by name, in the order in which their tensors are stored.

    These are the matrices that are multiplied with: ``.weight`` tensors of two dimensions, parts of fused 3-D experts
    (``experts.gate_up_proj`` and ``experts.down_proj``), modules that are quantized already, and a head that is tied
    to the embedding. Embeddings, routers and expert gates are not among them, nor is what is plain beside a quantized
    module of the same name: a copy of it. With ``exl3`` fused projections of
    dense layers are taken apart as well, which is how exllamav3 names them.

    Raises:
        SourceError: the source is quantized in a way that this library does not read, or has no tensors; or the weight
            of a module is stored twice, whole and in a fused tensor.
        IndexMismatchError: the index of a compressed-tensors checkpoint names a tensor that no shard holds.
        ShapeError: fused experts do not fit together, or a bias has another size than its module.
    """
    _check_source(source)
    found: dict[str, Linear] = {}
    experts = fused_experts(source)
    for name in source.tensors:
        for linear in _modules_of(source, name, experts, exl3=exl3):
            if linear.name in found:
                tensor, other = source.tensors[name], found[linear.name].anchor
                raise SourceError(
                    f"the weight of {linear.name} is stored twice: {other} holds it as well",
                    path=tensor.shard.path,
                    tensor=name,
                )
            found[linear.name] = _with_bias(source, linear)
    head = _tied_head(source, found)
    if head is not None:
        found[head.name] = _with_bias(source, head)
    return found


def _modules_of(
    source: Checkpoint, name: str, experts: Mapping[str, Sequence[Linear]], *, exl3: bool
) -> Sequence[Linear]:
    """Return the modules whose place is that of the tensor; ``experts`` are those of fused tensors."""
    if name in experts:
        nameable = all(is_dotted_name(linear.name) for linear in experts[name][:1])
        return experts[name] if nameable and not _is_copy(source, experts[name]) else ()
    module, _, kind = name.rpartition(".")
    if module in source.packed:
        packed = source.packed[module]
        return (_packed(packed),) if packed.weight.name == name else ()
    if module in source.modules:
        quantized = source.modules[module]
        return (_quantized(source, quantized),) if quantized.trellis.name == name else ()
    if kind != "weight" or len(source.tensors[name].shape) != 2 or not _is_linear(module):
        return ()
    parts = fused_projections(source, name) if exl3 else ()
    if _is_copy(source, parts):
        return ()
    return parts or (_plain(source.tensors[name]),)


def _is_copy(source: Checkpoint, parts: Iterable[Linear]) -> bool:
    """Tell whether a fused tensor holds the weight of a module that is quantized."""
    return any(part.name in source.modules or part.name in source.packed for part in parts)


def _check_source(source: Checkpoint) -> None:
    if source.packed or source.format == "plain":
        refuse_missing_tensors(source)
    if source.format != "plain":
        return
    stated = stated_quantization(source.config)
    if stated is not None:
        method = str(stated.method)[:40]
        place = "" if stated.place == BLOCK else f" (so says {stated.place})"
        what = f"the source is quantized by {method!a}{place}, which is not read here"
        if stated.method is None:
            what = f"{stated.place} names no quant_method, so it is not known how the source is quantized"
        raise SourceError(f"{what}; give the unquantized model", path=source.folder.root)
    found = quantized_tensor(source.tensors)
    if found is not None:
        text = f"the weight is quantized, to judge by {found.scales}, in a way that is not read here"
        raise SourceError(
            f"{text}; give the unquantized model",
            path=source.tensors[found.weight].shard.path,
            tensor=found.weight,
        )


def _is_linear(module: str) -> bool:
    return is_plain_matrix(module) and _NEVER.fullmatch(module) is None


def _plain(tensor: TensorRef) -> Linear:
    outputs, inputs = tensor.shape
    return Linear(
        tensor.name.removesuffix(".weight"), StoredMatrix(tensor, (outputs, inputs)), tensor.name, (tensor.name,)
    )


def _with_bias(source: Checkpoint, linear: Linear) -> Linear:
    """Return the module with the bias that a tensor of its name makes, also beside a fused or a tied weight."""
    bias = source.tensors.get(f"{linear.name}.bias")
    if bias is None or linear.bias is not None:
        return linear
    if bias.shape != (linear.out_features,):
        raise ShapeError(
            "the bias does not fit the weight",
            path=bias.shard.path,
            tensor=bias.name,
            expected=[linear.out_features],
            got=list(bias.shape),
        )
    return replace(linear, bias=bias)


def _quantized(source: Checkpoint, module: QuantizedModule) -> Linear:
    """Return a module that may be encoded again; a plain copy of it would be stale then, and goes."""
    stored = (module.trellis, module.suh, module.svh, module.marker, source.tensors.get(f"{module.name}.weight"))
    replaces = tuple(tensor.name for tensor in stored if tensor is not None)
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
    top, *parts = text_sections(config)
    for section in (*parts, top):
        value = section.get("tie_word_embeddings")
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
    return not embedding and is_dotted_name(module)
