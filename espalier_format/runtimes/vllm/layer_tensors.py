"""The tensors of one linear layer, and how vLLM's loader fills them.

Trellises of several widths fit no common shape, so the parts of a layer lie one after the other in flat parameters. The
parameters have vLLM's names, that of the tensor in the checkpoint, and loaders of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.model_executor.utils import set_weight_attrs

from espalier_format.codec.tile import TILE
from espalier_format.errors import (
    DtypeError,
    MissingTensorError,
    ShapeError,
    UnexpectedTensorError,
)
from espalier_format.kernels.linear import LinearOperand
from espalier_format.kernels.load_checks import check_scales
from espalier_format.runtimes.tensor_parallel import ModuleSlice
from espalier_format.runtimes.vllm.host_options import loads_from_checkpoint
from espalier_format.runtimes.vllm.layer_parts import LayerPart, LayerShape, output_ranges, part_of_shard

KINDS: Final = ("esp_trellis", "esp_suh", "esp_svh", "weight")
"""The tensors of a module, and so the parameters of a layer; ``weight`` is for parts that are plain.

Where none is, it is there while vLLM loads, without content: a plain copy may stand beside a quantized weight
(spec/espalier-v1.md §5), and vLLM needs somewhere to put it.
"""

_ALIGNMENT: Final = 64
"""Elements to which a part is aligned: 128 bytes of a trellis or of scales, a cache line of a GPU."""


class LayerTensors:
    """The parameters of a layer with at least one quantized part; made with `register`, used after `operands`."""

    def __init__(self, parts: Sequence[LayerPart], shape: LayerShape) -> None:
        self.parts = tuple(parts)
        self.shape = shape
        self._loaded: set[tuple[int, str]] = set()
        self._expected = loads_from_checkpoint()
        self._starts: dict[str, list[int]] = {}
        self._dtype = torch.float32

    def register(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """Add the parameters to the layer, on torch's default device; ``dtype`` is that of plain weights and inputs."""
        self._dtype = dtype
        for kind in KINDS:
            sizes = [math.prod(self._rank_shape(part, kind)) for part in self.parts]
            places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
            self._starts[kind] = [sum(places[:place]) for place in range(len(places))]
            data = torch.empty(
                sum(places), dtype={"esp_trellis": torch.int16, "weight": dtype}.get(kind, torch.float16)
            )
            if data.is_floating_point():
                data.fill_(math.nan)  # what is not loaded must not look like a weight
            parameter = torch.nn.Parameter(data, requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": _Loader(self, kind)})
            layer.register_parameter(kind, parameter)

    def load(self, kind: str, parameter: torch.Tensor, tensor: torch.Tensor, shard: Any) -> None:
        """Copy this rank's slice of a tensor of the checkpoint to its place.

        A plain copy of a quantized weight is dropped. Raises ShapeError and DtypeError, naming the tensor,
        UnexpectedTensorError for a plain weight that is no such copy, and UsageError for a shard that the layer does
        not have.
        """
        if not self.parts:
            return  # a rank that holds nothing but padding
        place = part_of_shard(self.parts, shard)
        part = self.parts[place]
        name = f"{part.name}.{kind}"
        if kind == "weight" and part.whole is not None:
            check_copy(tensor, part.whole.out_features, part.whole.in_features, name)
            return
        shape = self._rank_shape(part, kind)
        if not math.prod(shape):
            raise ShapeError("the checkpoint has both a plain weight and a quantized one", tensor=name)
        start = self._starts[kind][place]
        target = parameter.data[start : start + math.prod(shape)].view(shape)
        if target.dtype != tensor.dtype and not (kind == "weight" and tensor.is_floating_point()):
            raise DtypeError("wrong dtype", tensor=name, expected=target.dtype, got=tensor.dtype)
        if part.slice is None or part.whole is None:
            _copy_plain(tensor, target, part, self.shape, name)
        else:
            copy_slice(kind, tensor, target, part.slice, part.whole, name)
        self._loaded.add((place, kind))

    def check_loaded(self, layer: torch.nn.Module) -> None:
        """Raise unless every tensor was loaded, and has the values that operators, which do not look, may be given.

        Removes the place for copies from the layer.

        Raises:
            MissingTensorError: names the tensor that the checkpoint lacks.
            NonFiniteScaleError: a scale is infinite or NaN.
            ScaleOverflowError: a weight is too large for the layer's dtype.
        """
        empty = getattr(layer, "weight", None)
        if empty is not None and not empty.numel():
            del layer.weight
        if not self._expected:
            return
        for place, part in enumerate(self.parts):
            for kind in KINDS:
                if math.prod(self._rank_shape(part, kind)) and (place, kind) not in self._loaded:
                    raise MissingTensorError("vLLM has not found this tensor", tensor=f"{part.name}.{kind}")
        for operand, part in zip(self.operands(layer), self.parts, strict=True):
            if isinstance(operand, LinearOperand):
                check_scales(operand, self._dtype, part.name)

    def operands(self, layer: torch.nn.Module) -> tuple[LinearOperand | torch.Tensor, ...]:
        """Return what to multiply with, part by part: an operand, or a plain weight (out_features, in_features)."""
        return tuple(self._operand(layer, place) for place in range(len(self.parts)))

    def biased(self, layer: torch.nn.Module, bias: torch.Tensor) -> tuple[LinearOperand, ...] | None:
        """Return the operands with their parts of a bias (out_features of the rank,); None if a part is plain."""
        found = []
        start = 0
        for place, part in enumerate(self.parts):
            operand = self._operand(layer, place)
            if isinstance(operand, torch.Tensor):
                return None
            found.append(replace(operand, bias=bias.data[start : start + part.out_features]))
            start += part.out_features
        return tuple(found)

    def _operand(self, layer: torch.nn.Module, place: int) -> LinearOperand | torch.Tensor:
        part = self.parts[place]

        def tensor(kind: str) -> torch.Tensor:
            shape = self._rank_shape(part, kind)
            start = self._starts[kind][place]
            data: torch.Tensor = getattr(layer, kind).data
            return data[start : start + math.prod(shape)].view(shape)

        if part.slice is None or part.codebook is None:
            return tensor("weight")
        return LinearOperand(
            tensor("esp_trellis"), tensor("esp_suh"), tensor("esp_svh"), part.codebook, part.slice.rotation_in,
            part.slice.rotation_out, part.slice.in_features, part.slice.out_features,
        )  # fmt: skip

    def _rank_shape(self, part: LayerPart, kind: str) -> tuple[int, ...]:
        if part.slice is None or part.codebook is None:
            return (part.out_features, self.shape.rank_inputs) if kind == "weight" else (0,)
        shapes: dict[str, tuple[int, ...]] = {
            "esp_trellis": part.slice.trellis_shape(part.codebook),
            "esp_suh": (part.slice.padded_in,),
            "esp_svh": (part.slice.padded_out,),
        }
        return shapes.get(kind, (0,))


class _Loader:
    """The ``weight_loader`` of a parameter: vLLM calls it with the tensor, and with a shard id in a merged layer."""

    def __init__(self, tensors: LayerTensors, kind: str) -> None:
        self._tensors = tensors
        self._kind = kind

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None) -> None:
        self._tensors.load(self._kind, param, loaded_weight, shard_id)


def copy_slice(
    kind: str, tensor: torch.Tensor, target: torch.Tensor, part: ModuleSlice, whole: ModuleSlice, name: str
) -> None:
    """Copy the tiles or scales of ``part`` from the tensor of the ``whole`` module, whose shape must be the stated one.

    Raises ShapeError, naming the tensor, for one that is larger or smaller.
    """
    # Not only what is cut out: the tiles at the beginning of a larger tensor belong to another module.
    stated = {
        "esp_trellis": (whole.padded_in // TILE, whole.padded_out // TILE, target.shape[-1]),
        "esp_suh": (whole.padded_in,),
        "esp_svh": (whole.padded_out,),
    }[kind]
    if tuple(tensor.shape) != stated:
        raise ShapeError(
            "the tensor has another shape than the config says", tensor=name, expected=stated, got=tuple(tensor.shape)
        )
    if kind == "esp_trellis":
        (first, end), runs = part.trellis_rows[0], part.trellis_columns
        held, columns = tensor[first:end], 1
    else:
        held, columns, runs = tensor, 0, (part.suh if kind == "esp_suh" else part.svh)
    pieces = [held.narrow(columns, first, end - first) for first, end in runs]
    target.copy_(torch.cat(pieces, columns) if len(pieces) > 1 else pieces[0])


def check_copy(tensor: torch.Tensor, out_features: int, in_features: int, name: str) -> None:
    """Raise UnexpectedTensorError for a plain weight that cannot be a copy of the quantized one, of these sizes."""
    expected = (out_features, in_features)
    if tuple(tensor.shape) != expected:
        raise UnexpectedTensorError(
            "is no copy of the weight that is stored quantized: it has another shape",
            tensor=name, expected=expected, got=tuple(tensor.shape),
        )  # fmt: skip


def _copy_plain(tensor: torch.Tensor, target: torch.Tensor, part: LayerPart, shape: LayerShape, name: str) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != shape.inputs:
        raise ShapeError("the weight does not fit the layer", tensor=name, got=tuple(tensor.shape))
    inputs = shape.input_range()
    row = 0
    for outputs in output_ranges(part.rank_outputs, tensor.shape[0], shape):
        target[row : row + outputs.size].copy_(tensor[outputs.start : outputs.stop, inputs.start : inputs.stop])
        row += outputs.size
