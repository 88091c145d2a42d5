"""The tensors of one expert bank on this rank, and how vLLM's loader fills them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from vllm.model_executor.utils import set_weight_attrs

from espalier_format.errors import DtypeError, MissingTensorError, ShapeError, UsageError
from espalier_format.kernels.expert_bank import ExpertBankOperand
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, ExpertBankLayout, ProjectionLayout
from espalier_format.kernels.load_checks import check_bank_scales
from espalier_format.runtimes.tensor_parallel import FeatureRange, ModuleSlice, slice_module
from espalier_format.runtimes.vllm.host_options import loads_from_checkpoint
from espalier_format.runtimes.vllm.layer_parts import TrueSizes, true_sizes
from espalier_format.runtimes.vllm.layer_tensors import KINDS, check_copy, copy_slice
from espalier_format.schema.expert_bank import ExpertBank

_SHARDS: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""vLLM's shard ids, and what an operand calls the projection."""

_PARAMETERS: Final = ("w13", "w2")
_SPELLINGS: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Checkpoints name the projections in one of these two ways."""

_QUANTIZED: Final = ("esp_trellis", "esp_suh", "esp_svh")


@dataclass(frozen=True, slots=True)
class RankProjection:
    """One projection on this rank: its name in the checkpoint, what the rank holds of each expert, and codebooks.

    ``sizes`` are those of the whole projection, ``whole`` says how the checkpoint stores it; ``codebooks`` has one
    entry for each expert of the rank.
    """

    name: str
    sizes: TrueSizes
    held: ModuleSlice
    whole: ModuleSlice
    codebooks: tuple[str | None, ...]


def rank_projections(
    bank: ExpertBank, hidden: int, intermediate: int, share: FeatureRange, experts: Sequence[int]
) -> dict[str, RankProjection]:
    """Return what a rank holds of a bank: ``share`` of the intermediate features, of these experts.

    The keys are "gate_proj", "up_proj" and "down_proj", however the checkpoint calls them.

    Raises:
        UsageError: the share ends within a rotation block or a tile, or the bank has other projections.
        ShapeError: the bank has other sizes than the model.
    """
    unknown = set(bank.projections) - set(_SPELLINGS) - set(_SPELLINGS.values())
    if unknown:
        raise UsageError("vLLM's experts have no such projection", expected=list(_SPELLINGS), got=sorted(unknown))
    whole = FeatureRange(0, hidden)
    found = {}
    mixtral = not set(bank.projections) & set(_SPELLINGS)
    for role in PROJECTIONS:
        name = _SPELLINGS[role] if mixtral else role
        inputs, outputs = (share, whole) if role == "down_proj" else (whole, share)
        sizes = TrueSizes(intermediate, hidden) if role == "down_proj" else TrueSizes(hidden, intermediate)
        projection = bank.projections.get(name)
        rotation = (0, 0)
        codebooks: list[str | None] = [None] * bank.num_experts
        if projection is not None:
            sizes = true_sizes(projection, sizes.in_features, sizes.out_features)
            rotation = (projection.rotation.in_, projection.rotation.out)
            codebooks = projection.expert_codebooks()
            held = slice_module(sizes, rotation, inputs, [outputs])
        else:  # plain, which may be cut anywhere
            held = ModuleSlice(inputs, (outputs,), *rotation)
        found[role] = RankProjection(
            name, sizes, held, slice_module(sizes, rotation), tuple(codebooks[expert] for expert in experts)
        )
    return found


def has_plain(bank: ExpertBank) -> bool:
    """Tell whether some projection of some expert is stored plain."""
    assigned = [projection.expert_codebooks() for projection in bank.projections.values()]
    return len(assigned) < len(PROJECTIONS) or any(None in codebooks for codebooks in assigned)


class BankTensors:
    """The packed bank of a layer.

    ``experts`` are those of the rank, in the order that the rank numbers them. ``dtype`` is that of plain experts and
    of inputs.
    """

    def __init__(
        self,
        bank: str,
        projections: Mapping[str, RankProjection],
        experts: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._bank = bank
        self._projections = dict(projections)
        self._local = {expert: place for place, expert in enumerate(experts)}
        self._layout = ExpertBankLayout(
            {
                role: ProjectionLayout(
                    each.held.in_features, each.held.out_features, each.held.rotation_in, each.held.rotation_out,
                    each.codebooks,
                )
                for role, each in projections.items()
            }
        )  # fmt: skip
        device = torch.get_default_device()
        self._buffers = self._layout.empty_buffers(device)
        self._plain = {
            (role, place): torch.full((layout.out_features, layout.in_features), math.nan, dtype=dtype, device=device)
            for role, layout in self._layout.projections.items()
            for place in layout.plain_experts()
        }
        self._dtype = dtype
        self._loaded: set[tuple[str, int, str]] = set()
        self._expected = loads_from_checkpoint()
        if self._expected:
            self._spoil_scales()

    def register(self, layer: torch.nn.Module) -> None:
        """Give the layer empty parameters of the names that vLLM looks for, whose loaders fill the bank."""
        for group in _PARAMETERS:
            for kind in KINDS:
                parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                set_weight_attrs(parameter, {"weight_loader": self._loader(kind)})
                layer.register_parameter(f"{group}_{kind}", parameter)

    def load(self, kind: str, tensor: torch.Tensor, shard: str, expert: int) -> bool:
        """Copy this rank's slice of one tensor of one expert to its place; tell whether the rank has the expert.

        A plain copy of a quantized weight is dropped. Raises ShapeError and DtypeError, naming the tensor, and
        UnexpectedTensorError for a plain weight that is no such copy.
        """
        if expert not in self._local:
            return False
        role, place = _SHARDS[shard], self._local[expert]
        each = self._projections[role]
        name = f"{self._bank}.{expert}.{each.name}.{kind}"
        plain = each.codebooks[place] is None
        if kind == "weight" and not plain:
            check_copy(tensor, each.sizes.out_features, each.sizes.in_features, name)
            return True
        if kind != "weight" and plain:
            raise ShapeError("quantization_config says that this expert is stored plain", tensor=name)
        if plain:
            inputs, outputs = each.held.inputs, each.held.outputs[0]
            if tuple(tensor.shape) != (each.sizes.out_features, each.sizes.in_features):
                raise ShapeError("the weight does not fit the model", tensor=name, got=tuple(tensor.shape))
            self._plain[role, place].copy_(tensor[outputs.start : outputs.stop, inputs.start : inputs.stop])
        else:
            target = self._layout.views(self._buffers, role, place)[_QUANTIZED.index(kind)]
            if tensor.dtype != target.dtype:
                raise DtypeError("wrong dtype", tensor=name, expected=target.dtype, got=tensor.dtype)
            copy_slice(kind, tensor, target, each.held, each.whole, name)
        self._loaded.add((role, place, kind))
        return True

    def operand(self) -> ExpertBankOperand:
        """Return the bank, ready to be computed with.

        Raises:
            MissingTensorError: names a tensor that was not loaded.
            NonFiniteScaleError: a scale is infinite or NaN.
            ScaleOverflowError: a quantized weight is too large for the dtype of inputs.
        """
        operand = ExpertBankOperand(self._layout, **self._buffers, plain=self._plain)
        if self._expected:
            self._check_loaded()
            check_bank_scales(operand, self._dtype, self._bank)
        return operand

    def _spoil_scales(self) -> None:
        """Make all scales NaN that are to be loaded: zeros would make an expert that was not loaded vanish quietly."""
        for role, layout in self._layout.projections.items():
            for place, codebook in enumerate(layout.codebooks):
                if codebook is not None:
                    for scales in self._layout.views(self._buffers, role, place)[1:]:
                        scales.fill_(math.nan)

    def _check_loaded(self) -> None:
        for expert, place in self._local.items():
            for role, each in self._projections.items():
                for kind in ("weight",) if each.codebooks[place] is None else _QUANTIZED:
                    if (role, place, kind) not in self._loaded:
                        name = f"{self._bank}.{expert}.{each.name}.{kind}"
                        raise MissingTensorError("vLLM has not found this tensor", tensor=name)

    def _loader(self, kind: str) -> Callable[..., bool | None]:
        def load(
            param: torch.Tensor,  # noqa: ARG001 - vLLM's signature
            loaded_weight: torch.Tensor,
            weight_name: str,  # noqa: ARG001
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            found = self.load(kind, loaded_weight, shard_id, expert_id)
            return found if return_success else None

        return load
