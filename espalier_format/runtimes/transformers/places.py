"""Which tensor of a checkpoint fills which place of a model, asked of transformers' own renaming before it loads.

transformers loads the first or the last of two tensors that it gives one name, and says nothing about the other. What
stands beside compressed weights under a name of theirs would get lost as silently.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from espalier_format.checkpoint.tensors import FLOATING
from espalier_format.errors import DtypeError, DuplicateTensorError, ShapeError, UnexpectedTensorError
from espalier_format.kernels.torch_dtypes import OUTPUT_DTYPES
from espalier_format.runtimes.transformers.names import IgnoredNames, canonical

if TYPE_CHECKING:
    from torch import nn

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.runtimes.transformers.replacement import Replacement

_NEVER_OVERFLOW: Final = {
    torch.float32: frozenset({"F32", "F16", "BF16"}),
    torch.bfloat16: frozenset({"BF16", "F16"}),
    torch.float16: frozenset({"F16"}),
}
"""Dtype in the model → stored dtypes whose finite values all stay finite in it."""


def find_sources(
    model: nn.Module, checkpoint: Checkpoint, replacement: Replacement, conversions: Sequence[Any]
) -> dict[str, list[str]]:
    """Return the tensors of the checkpoint that fill each place of ``model``; it is on the "meta" device.

    ``conversions`` are those with which transformers is going to load. What has no place at all is left to its own
    account (`loading`), which knows what it expects to be left over.

    Raises:
        DuplicateTensorError: two tensors fill one place.
        UnexpectedTensorError: a tensor goes by the name of a compressed weight, and is neither it nor its plain copy.
        ShapeError: a tensor that is loaded as it is has another shape than its place.
        DtypeError: a tensor for a floating-point place has another kind of dtype.
    """
    from transformers.core_model_loading import (  # noqa: PLC0415 - not a public module: only where it is needed
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    # Renaming leaves marks in them, which are transformers' own affair.
    mapping = copy.deepcopy(list(conversions))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", "")
    state = model.state_dict()
    ignored = IgnoredNames(model)
    sources: dict[str, list[str]] = {}
    filled: dict[tuple[str, str | None], str] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        place, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if place not in state and name in state:
            place, pattern = rename_source_key(name, [], [], prefix, state)
        tensor = checkpoint.tensors[name]
        if place not in state:
            if name not in ignored and place not in ignored:
                _check_leftover(tensor, place, replacement)
            continue
        # Many tensors may be joined in one place, each under one name, or one may fill it as it is.
        joined = None if pattern is None else canonical(name)
        other = filled.get((place, joined)) or next(
            (each for each in sources.get(place, [])[:1] if joined is None or (place, None) in filled), None
        )
        if other is not None:
            raise DuplicateTensorError(
                f"{other} fills the same place in the model", path=tensor.shard.path, tensor=name
            )
        filled[place, joined] = name
        sources.setdefault(place, []).append(name)
        _check_fit(tensor, state[place], as_it_is=pattern is None)
    return sources


def check_overflow(model: nn.Module, checkpoint: Checkpoint, sources: Mapping[str, Sequence[str]]) -> None:
    """Raise ScaleOverflowError for a tensor with a finite value that has become infinite in the dtype of its place."""
    for place, tensor in model.state_dict().items():
        if tensor.dtype not in OUTPUT_DTYPES:
            continue
        names = [
            name
            for name in sources.get(place, ())
            if checkpoint.tensors[name].dtype not in _NEVER_OVERFLOW[tensor.dtype]
        ]
        # What is offloaded cannot be looked at here.
        if names and (tensor.device.type == "meta" or not bool(torch.isfinite(tensor).all())):
            for name in names:
                checkpoint.decode(name, OUTPUT_DTYPES[tensor.dtype])


def _check_leftover(tensor: TensorRef, place: str, replacement: Replacement) -> None:
    """Refuse what transformers' account cannot tell from tensors that are used without it."""
    if tensor.name in replacement.beside:
        shape = replacement.beside[tensor.name]
        if shape is None or tensor.shape == shape:
            return
        raise UnexpectedTensorError(
            "is no copy of the weight that is stored quantized: it has another shape",
            path=tensor.shard.path,
            tensor=tensor.name,
            expected=list(shape),
            got=list(tensor.shape),
        )
    if canonical(tensor.name) in replacement.accounted or canonical(place) in replacement.accounted:
        raise UnexpectedTensorError(
            "the model has no place for this tensor: the weight there is another one",
            path=tensor.shard.path,
            tensor=tensor.name,
        )


def _check_fit(tensor: TensorRef, place: torch.Tensor, *, as_it_is: bool) -> None:
    if as_it_is and tensor.shape != tuple(place.shape):
        raise ShapeError(
            "does not fit the model",
            path=tensor.shard.path,
            tensor=tensor.name,
            expected=list(place.shape),
            got=list(tensor.shape),
        )
    if place.is_floating_point() and tensor.dtype not in FLOATING:
        raise DtypeError(
            "the model has floating-point values here",
            path=tensor.shard.path,
            tensor=tensor.name,
            expected=", ".join(sorted(FLOATING)),
            got=tensor.dtype,
        )
