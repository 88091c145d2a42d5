"""Find the quantized modules of a compressed-tensors checkpoint by their tensors, and check that these fit.

That a module has packed tensors is the truth about it; what the config targets and ignores is not. Whatever could be
decoded to something else than its writer meant is refused, by name.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from espalier_format.checkpoint.packed_module import PackedModule
from espalier_format.checkpoint.tensors import FLOATING
from espalier_format.converters.compressed_tensors_packing import WORD_BITS, Packing, find_packing
from espalier_format.errors import (
    DtypeError,
    MissingTensorError,
    ShapeError,
    SourceError,
    UnexpectedTensorError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from espalier_format.checkpoint.tensors import TensorRef, TensorTable
    from espalier_format.converters.compressed_tensors_schemes import Scheme, Schemes

PACKED: Final = "weight_packed"
_ACTIVATIONS: Final = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_READ: Final = frozenset({PACKED, "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", *_ACTIVATIONS})
_WEIGHTS: Final = frozenset({PACKED, "weight"})
_SHAPE_FORMATS: Final = {"I64": "<2q", "I32": "<2i"}
"""Dtypes of ``weight_shape``: releases up to 0.8 declare I32, all write I64."""

_NOT_READ: Final = frozenset(
    {
        "weight_global_scale", "input_global_scale", "weight_scale_inv", "weight_bitmask", "weight_compressed",
        "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point",
    }
)  # fmt: skip
"""Parameters that compressed-tensors writes for other kinds of quantization."""


def has_packed_tensors(table: TensorTable) -> bool:
    """Tell whether there are tensors that compressed-tensors writes: packed weights, or integers with their scale."""
    for name, info in table.infos.items():
        if name.endswith(f".{PACKED}"):
            return True
        if info.dtype == "I8" and name.endswith(".weight") and f"{name}_scale" in table.infos:
            return True
    return False


def find_modules(table: TensorTable, schemes: Schemes) -> dict[str, PackedModule]:
    """Return the quantized modules by name, in the order in which their weights are stored.

    Raises:
        SourceError: a module is quantized but no target names it, or in a form that is not read.
        MissingTensorError, UnexpectedTensorError, DtypeError, ShapeError: the tensors of a module do not fit together,
            or not what the config says of it.
    """
    parts: dict[str, dict[str, TensorRef]] = {}
    order: dict[str, None] = {}
    for name, info in table.infos.items():
        module, _, kind = name.rpartition(".")
        if kind in _READ or (kind == "weight" and info.dtype == "I8"):
            tensors = parts.get(module)
            if tensors is None:
                tensors = parts[module] = {}
            tensors[kind] = table.ref(name)
            if kind in _WEIGHTS:
                order[module] = None
        elif kind in _NOT_READ:
            raise _error(UnexpectedTensorError, "this parameter of a quantization is not read", table.ref(name))
    schemes.prepare(parts)
    found: dict[str, PackedModule] = {}
    forms: dict[object, _Verdict] = {}
    for name, tensors in parts.items():
        scheme = schemes.resolve(name)
        weight = tensors.get(PACKED)
        if weight is None and "weight" in tensors and ("weight_scale" in tensors or scheme is not None):
            weight = tensors["weight"]
        if weight is None:
            _refuse_stray(name, tensors, table)
            continue
        if PACKED in tensors and f"{name}.weight" in table.infos:
            raise _error(UnexpectedTensorError, "the module is stored packed as well", table.ref(f"{name}.weight"))
        if scheme is None:
            raise _error(SourceError, "it is quantized, but no target of the config names it", weight)
        bias = f"{name}.bias"
        found[name] = _module(
            name, scheme, weight, tensors, schemes, table.ref(bias) if bias in table.infos else None, forms
        )
    return {name: found[name] for name in order if name in found}


def plain_names(table: TensorTable, modules: Mapping[str, PackedModule]) -> Iterator[str]:
    """Yield the names of the tensors that belong to none of ``modules``, which `find_modules` has found."""
    for name in table.infos:
        module, _, kind = name.rpartition(".")
        found = modules.get(module)
        # What has a name of ours and belongs to no module has been refused.
        if found is None or not (kind in _READ or kind == "bias" or found.weight.info.name == name):
            yield name


def _refuse_stray(name: str, tensors: Mapping[str, TensorRef], table: TensorTable) -> None:
    """Refuse parameters of a module whose weight is not there, or is none of integers."""
    stray = next((tensor for kind, tensor in tensors.items() if kind != "weight"), None)
    if stray is None:
        return
    weight = table.infos.get(f"{name}.weight")
    if weight is None:
        raise _error(MissingTensorError, f"the module has no {PACKED} and no weight", stray)
    if weight.dtype not in FLOATING:
        raise _error(SourceError, f"quantized weights of dtype {weight.dtype} are not read", table.ref(weight.name))
    raise _error(UnexpectedTensorError, "a parameter of a quantization, but the weight is not quantized", stray)


class _Verdict(NamedTuple):
    """What the checks of a module find, which depends on dtypes and shapes alone: thousands of experts share it."""

    in_features: int
    exact: bool
    packing: Packing | None
    zero_packing: Packing | None


def _module(
    name: str,
    scheme: Scheme,
    weight: TensorRef,
    tensors: Mapping[str, TensorRef],
    schemes: Schemes,
    bias: TensorRef | None,
    forms: dict[object, _Verdict],
) -> PackedModule:
    """Check a module; ``forms`` holds the forms that have been checked already."""
    own = tensors if bias is None else {**tensors, "bias": bias}
    key = (scheme.group, *((kind, tensor.info.dtype, tensor.info.shape) for kind, tensor in own.items()))
    form = forms.get(key)
    if form is None:
        form = _check(scheme, weight, tensors, schemes, bias)
        if scheme.strategy == "group" or PACKED not in tensors:  # else the number of inputs is read from the file
            forms[key] = form
    return PackedModule(
        name=name,
        scheme=scheme,
        in_features=form.in_features,
        out_features=weight.info.shape[0],
        packing=form.packing,
        weight=weight,
        scale=tensors["weight_scale"],
        zero_point=tensors.get("weight_zero_point"),
        zero_packing=form.zero_packing,
        g_idx=tensors.get("weight_g_idx"),
        shape=tensors.get("weight_shape"),
        bias=bias,
        activations=tuple(tensors[kind] for kind in _ACTIVATIONS if kind in tensors) if len(tensors) > 3 else (),
        size_source="exact" if form.exact else "padded",
    )


def _check(
    scheme: Scheme, weight: TensorRef, tensors: Mapping[str, TensorRef], schemes: Schemes, bias: TensorRef | None
) -> _Verdict:
    """Check that the tensors of a module fit together."""
    packed = weight is tensors.get(PACKED)
    if len(weight.shape) == 3:
        raise _error(SourceError, "experts that are packed together, in three dimensions, are not read", weight)
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise _error(ShapeError, "a packed weight is a matrix with content", weight, got=list(weight.shape))
    if packed and weight.dtype != "I32":
        raise _error(DtypeError, "packed weights are 32-bit words", weight, "I32", weight.dtype)
    scale = tensors.get("weight_scale")
    if scale is None:
        raise _error(MissingTensorError, "the module has no weight_scale", weight)
    if scale.dtype not in FLOATING:
        raise _error(DtypeError, "a scale must be floating-point", scale, "BF16, F16, F32 or F64", scale.dtype)
    outputs = weight.shape[0]
    shape = tensors.get("weight_shape")
    inputs, exact = _inputs(scheme, weight, scale, shape, packed=packed)
    _check_scale(scheme, scale, outputs, inputs)
    if shape is not None and not _is_shape(shape):
        raise _error(DtypeError, "weight_shape must be two I64 or I32 numbers", shape, "I64 or I32 [2]", _form(shape))
    if packed and shape is None:
        raise _error(MissingTensorError, "the module has no weight_shape", weight)
    packing = None
    if packed:
        packing = _packing(scheme.bits, inputs, weight.shape[1], schemes.version, weight) if exact else Packing.DENSE
    zero = tensors.get("weight_zero_point")
    zero_packing = _zero_packing(scheme, zero, scale, packing, outputs, weight, schemes.version)
    _check_order(scheme, tensors.get("weight_g_idx"), weight, inputs)
    _check_bias(bias, outputs)
    return _Verdict(inputs, exact, packing, zero_packing)


def _inputs(
    scheme: Scheme, weight: TensorRef, scale: TensorRef, shape: TensorRef | None, *, packed: bool
) -> tuple[int, bool]:
    """Return the number of inputs, and whether it is exact."""
    if not packed:
        return weight.shape[1], True
    if scheme.strategy == "group":
        if len(scale.shape) != 2 or 0 in scale.shape:
            raise _error(ShapeError, "a scale per group is a matrix", scale, got=list(scale.shape))
        return scale.shape[1] * scheme.group_size, True
    if shape is None:
        raise _error(MissingTensorError, "the module has no weight_shape", weight)
    if _is_shape(shape) and shape.shard.has_data:
        outputs, inputs = struct.unpack(_SHAPE_FORMATS[shape.dtype], shape.data())
        if outputs != weight.shape[0] or inputs <= 0:
            message = "weight_shape does not fit the packed weight"
            raise _error(ShapeError, message, shape, f"[{weight.shape[0]}, …]", [outputs, inputs])
        return inputs, True
    return weight.shape[1] * WORD_BITS // scheme.bits, False


def _is_shape(tensor: TensorRef) -> bool:
    return tensor.dtype in _SHAPE_FORMATS and tensor.shape == (2,)


def _check_scale(scheme: Scheme, scale: TensorRef, outputs: int, inputs: int) -> None:
    if scheme.strategy == "tensor":
        fits = scale.shape in {(), (1,), (1, 1)}
        expected: object = [1]
    elif scheme.strategy == "channel":
        fits = scale.shape == (outputs, 1)
        expected = [outputs, 1]
    else:
        fits = inputs % scheme.group_size == 0 and scale.shape == (outputs, inputs // scheme.group_size)
        expected = [outputs, inputs / scheme.group_size if inputs % scheme.group_size else inputs // scheme.group_size]
    if not fits:
        raise _error(ShapeError, f"the scale does not fit {scheme.label}", scale, expected, list(scale.shape))


def _zero_packing(
    scheme: Scheme,
    zero: TensorRef | None,
    scale: TensorRef,
    packing: Packing | None,
    outputs: int,
    weight: TensorRef,
    version: str | None,
) -> Packing | None:
    """Check the zero point, and return the layout that it is packed in."""
    if zero is None:
        if not scheme.symmetric:
            message = (
                f"the config says {scheme.label}, but there is no zero point; early releases leave out one that is all "
                "0, which is not told from one that is lost"
            )
            raise _error(MissingTensorError, message, weight)
        return None
    if scheme.symmetric:
        raise _error(UnexpectedTensorError, f"a zero point, but the config says {scheme.label}, symmetric", zero)
    if zero.dtype == "I8" and zero.shape == scale.shape:
        return None  # beside packed weights too: early releases pack the weights alone
    if packing is None or scheme.strategy == "tensor":
        form = f"I8 {list(scale.shape)}"
        raise _error(DtypeError, "the zero point does not fit the scale", zero, form, _form(zero))
    if zero.dtype != "I32" or len(zero.shape) != 2 or zero.shape[1] != scale.shape[1]:
        form = f"I32 […, {scale.shape[1]}]"
        raise _error(ShapeError, "the zero point does not fit the scale", zero, form, _form(zero))
    if WORD_BITS % scheme.bits and packing.words(scheme.bits, outputs) == zero.shape[0]:
        return packing  # one writer packs both alike, which settles a width that both layouts have
    own = _packing(scheme.bits, outputs, zero.shape[0], version, zero)
    if own is not packing and WORD_BITS % scheme.bits:
        raise _error(ShapeError, f"the zero point is packed {own.value}, the weight {packing.value}", zero)
    return own


def _packing(bits: int, codes: int, words: int, version: str | None, tensor: TensorRef) -> Packing:
    return find_packing(bits, codes, words, version, tensor=tensor.name, path=tensor.shard.path)


def _check_order(scheme: Scheme, order: TensorRef | None, weight: TensorRef, inputs: int) -> None:
    if order is None:
        if scheme.reordered:
            message = "the config orders groups by activation, but there is no weight_g_idx to say which is whose"
            raise _error(MissingTensorError, message, weight)
        return
    if not scheme.reordered or scheme.strategy != "group":
        message = "an order of columns, but the config does not order groups by activation (actorder)"
        raise _error(UnexpectedTensorError, message, order)
    if order.dtype != "I32" or order.shape != (inputs,):
        raise _error(ShapeError, "weight_g_idx does not fit the weight", order, f"I32 [{inputs}]", _form(order))


def _check_bias(bias: TensorRef | None, outputs: int) -> None:
    if bias is not None and (bias.dtype not in FLOATING or bias.shape != (outputs,)):
        raise _error(ShapeError, "the bias does not fit the weight", bias, f"floating-point [{outputs}]", _form(bias))


def _form(tensor: TensorRef) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _error(
    kind: type[SourceError | MissingTensorError | UnexpectedTensorError | DtypeError | ShapeError],
    message: str,
    tensor: TensorRef,
    expected: object = None,
    got: object = None,
) -> SourceError | MissingTensorError | UnexpectedTensorError | DtypeError | ShapeError:
    return kind(message, path=tensor.shard.path, tensor=tensor.name, expected=expected, got=got)
