"""Put compressed modules into a model that has no weights yet, after checking that each fits its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from espalier_format.checkpoint.module import expect_scales
from espalier_format.codec.magnitude import may_overflow_float16
from espalier_format.converters.hf_architectures import ARCHITECTURES, Join, model_types
from espalier_format.errors import SchemaError, ShapeError, SourceError, UnexpectedTensorError, UnknownSizeError
from espalier_format.runtimes.transformers.banks import bank_module, bank_sources, bank_tensors
from espalier_format.runtimes.transformers.linear import JoinedLinear, QuantizedLinear
from espalier_format.runtimes.transformers.names import IgnoredNames, ModelNames, canonical
from espalier_format.runtimes.transformers.sizes import check_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.schema.config import ModuleSpec


@dataclass(frozen=True, slots=True)
class Replacement:
    """What was put into a model.

    ``banks`` maps the prefix of a bank in the checkpoint to the module in the model. ``accounted`` holds the canonical
    names of tensors that transformers has no place for and that are used, or given up, all the same: those of experts,
    and plain copies of quantized weights. ``beside`` holds the names that these have in the checkpoint, each with the
    shape that it must have, None where that is checked elsewhere (spec/espalier-v1.md §5: a plain weight may stand
    beside the quantized one).
    """

    banks: dict[str, str] = field(default_factory=dict)
    accounted: frozenset[str] = frozenset()
    beside: dict[str, tuple[int, ...] | None] = field(default_factory=dict)


def replace_modules(model: nn.Module, checkpoint: Checkpoint) -> Replacement:
    """Replace every layer of ``model``, on the "meta" device, that ``checkpoint`` stores quantized.

    ``checkpoint`` is an Espalier checkpoint. Modules that the model class has no place for, and says so, are left out.

    Raises:
        UnexpectedTensorError: a quantized module has no place in the model.
        SourceError: its place is no linear layer, or the class of experts is unknown.
        ShapeError: its place has another size.
        UnknownSizeError: a part of a joined layer whose size is not known.
        SchemaError: config.json ties the head, which has weights of its own.
        NonFiniteScaleError: a scale is infinite or NaN.
        ScaleOverflowError: the model is in float16, for which a weight of a linear layer is too large.
    """
    quantization = checkpoint.quantization
    if quantization is None:
        raise SourceError("is no Espalier checkpoint", path=checkpoint.folder.root)
    places = ModelNames(name for name, _ in model.named_modules())
    ignored = IgnoredNames(model)
    half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    tied = _tied(model)
    linears: list[str] = []
    parts: list[str] = []
    accounted: set[str] = set()
    beside: dict[str, tuple[int, ...] | None] = {}
    for name, spec in quantization.modules.items():
        place = places.find(name)
        if place is not None:
            if f"{place}.weight" in tied:
                raise SchemaError(
                    "config.json ties its weight to another one (tie_word_embeddings), but it is quantized",
                    path=checkpoint.folder.root,
                    tensor=f"{name}.esp_trellis",
                )
            layer = _quantized(name, spec, _linear(model, place, name))
            _set(model, place, layer)
            linears.append(name)
            beside[f"{name}.weight"] = (layer.out_features, layer.in_features)
        elif f"{name}.esp_trellis" not in ignored:
            parts.append(name)
        accounted.add(canonical(f"{name}.weight"))
    banks: dict[str, str] = {}
    for name, bank in quantization.expert_banks.items():
        place = places.find(name)
        if place is not None:
            experts = bank_module(checkpoint, name, bank, model.get_submodule(place))
            _set(model, place, experts)
            banks[name] = place
            beside.update(bank_sources(checkpoint, name, experts.plan))
            accounted.update(map(canonical, bank_tensors(checkpoint, name, bank)))
        elif f"{name}.0.up_proj.esp_trellis" not in ignored:
            raise UnexpectedTensorError("the model has no such experts", path=checkpoint.folder.root, tensor=name)
    joined = _join_parts(model, checkpoint, parts, quantization.modules, places)
    accounted.update(canonical(f"{name}.{kind}") for name in joined for kind in ("weight", "bias"))
    for name, (inputs, outputs) in joined.items():
        beside |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name in parts:
        spec = quantization.modules[name]
        beside[f"{name}.weight"] = (spec.out_features, spec.in_features)
    _check_values(checkpoint, (*linears, *parts), half=half)
    return Replacement(banks, frozenset(accounted), beside)


def _join_parts(
    model: nn.Module,
    checkpoint: Checkpoint,
    names: list[str],
    modules: Mapping[str, ModuleSpec],
    places: ModelNames,
) -> dict[str, tuple[int, int]]:
    """Put together layers that the checkpoint stores in parts.

    Return the names that the checkpoint would have for them, each with its number of inputs and outputs.
    """
    joins = [
        join for kind in model_types(checkpoint.config) if kind in ARCHITECTURES for join in ARCHITECTURES[kind].joins
    ]
    done: set[str] = set()
    joined: dict[str, tuple[int, int]] = {}
    for name in names:
        parent, _, part = name.rpartition(".")
        join = next((join for join in joins if part in join.parts and join.parent.fullmatch(parent)), None)
        place = None if join is None else places.find(f"{parent}.{join.fused}")
        if join is None or place is None:
            raise UnexpectedTensorError(
                "the model has no such layer", path=checkpoint.folder.root, tensor=f"{name}.esp_trellis"
            )
        if place not in done:
            done.add(place)
            layer = _joined(model, place, parent, join, modules)
            _set(model, place, layer)
            joined[f"{parent}.{join.fused}"] = (layer.in_features, layer.out_features)
    return joined


def _joined(model: nn.Module, place: str, parent: str, join: Join, modules: Mapping[str, ModuleSpec]) -> JoinedLinear:
    """Return a layer of the model in parts, which are put beside it."""
    whole = _linear(model, place, f"{parent}.{join.fused}")
    holder = place.rpartition(".")[0]
    parts: list[nn.Module] = []
    for part in join.parts:
        name = f"{parent}.{part}"
        spec = modules.get(name)
        if spec is None or spec.size_source == "padded":
            raise UnknownSizeError(f"it is one part of {join.fused}, and not all parts have a stated size", tensor=name)
        with_sizes = nn.Linear(spec.in_features, spec.out_features, whole.bias is not None, "meta", whole.weight.dtype)
        parts.append(_quantized(name, spec, with_sizes))
        _set(model, f"{holder}.{part}", parts[-1])
    sizes = (whole.in_features, sum(modules[f"{parent}.{part}"].out_features for part in join.parts))
    widths = {modules[f"{parent}.{part}"].in_features for part in join.parts}
    if widths != {whole.in_features} or sizes[1] != whole.out_features:
        raise ShapeError(
            "its parts do not make up the layer of the model",
            tensor=f"{parent}.{join.fused}",
            expected=f"{whole.out_features} x {whole.in_features}",
            got=f"{sizes[1]} x {min(widths)}",
        )
    return JoinedLinear(tuple(parts), *sizes)


def _quantized(name: str, spec: ModuleSpec, layer: nn.Linear) -> QuantizedLinear:
    sizes = (layer.in_features, layer.out_features)
    check_sizes(name, spec, *sizes)
    rotation = (spec.rotation.in_, spec.rotation.out)
    return QuantizedLinear(spec.codebook, rotation, *sizes, bias=layer.bias is not None, dtype=layer.weight.dtype)


def _linear(model: nn.Module, place: str, name: str) -> nn.Linear:
    module = model.get_submodule(place)
    # A subclass with a forward of its own does something else.
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise SourceError(f"in the model this is a {type(module).__name__}, not a linear layer", tensor=name)
    return module


def _tied(model: nn.Module) -> set[str]:
    keys = getattr(model, "all_tied_weights_keys", None) or {}
    return {*keys, *keys.values()}


def _set(model: nn.Module, place: str, module: nn.Module) -> None:
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _check_values(checkpoint: Checkpoint, names: tuple[str, ...], *, half: bool) -> None:
    """Make the checks of spec/rotation.md §5.1: operators do not look at values; ``half`` is for float16."""
    modules = {name: checkpoint.modules[name] for name in names}
    expect_scales(modules.values())
    for name, module in modules.items():
        suh, svh = module.scales()
        largest = (float(np.abs(side).max()) for side in (suh[: module.in_features], svh[: module.out_features]))
        if half and may_overflow_float16(module.codebook, module.rotation.in_, module.rotation.out, *largest):
            checkpoint.decode(name, "float16")  # which looks at each weight, and names the module
