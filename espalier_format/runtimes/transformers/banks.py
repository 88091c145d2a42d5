"""The experts of a model: which of its modules may be replaced, and their tensors, read from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from espalier_format.checkpoint.module import expect_scales
from espalier_format.errors import DuplicateTensorError, MissingTensorError, ShapeError, SourceError
from espalier_format.kernels.expert_bank import ExpertBankOperand
from espalier_format.kernels.expert_bank_layout import PROJECTIONS
from espalier_format.kernels.load_checks import check_bank_scales
from espalier_format.kernels.torch_dtypes import OUTPUT_DTYPES
from espalier_format.runtimes.transformers.experts import BankPlan, QuantizedExperts
from espalier_format.runtimes.transformers.sizes import check_sizes

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.schema.expert_bank import ExpertBank

EXPERT_CLASSES: Final = frozenset(
    {
        "OlmoeExperts",
        "Qwen2MoeExperts",
        "Qwen3MoeExperts",
        "Qwen3NextExperts",
        "Qwen3VLMoeTextExperts",
        "Qwen3_5MoeExperts",
    }
)
"""Classes of transformers that compute what `expert_bank` computes; a test compares their code.

Others have limits, biases or an activation of their own, which no look at their parameters shows.
"""

_ACTIVATIONS: Final = frozenset({"SiLU", "SiLUActivation"})
_FUSED: Final = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
"""Projection → the tensor that holds it for all experts, which part of its outputs, and of how many."""


def bank_module(checkpoint: Checkpoint, name: str, bank: ExpertBank, module: nn.Module) -> QuantizedExperts:
    """Return the replacement of a model's experts, without its values.

    Raises:
        SourceError: the class of ``module``, its activation or a projection of the bank is unknown here.
        ShapeError: the model has another number of experts, or of other sizes.
        MissingTensorError: a projection that is not quantized is not in the checkpoint.
    """
    gate_up, down = _parameters(name, bank, module)
    num_experts, hidden, intermediate = down.shape
    sizes = dict.fromkeys(PROJECTIONS, (hidden, intermediate)) | {"down_proj": (intermediate, hidden)}
    if bank.num_experts != num_experts:
        raise ShapeError(
            "config.json states another number of experts", tensor=name, expected=bank.num_experts, got=num_experts
        )
    codebooks: list[tuple[str | None, ...]] = []
    rotations: list[tuple[int, int]] = []
    for projection in PROJECTIONS:
        spec = bank.projections.get(projection)
        if spec is None:
            codebooks.append((None,) * num_experts)
            rotations.append((0, 0))
            continue
        check_sizes(f"{name}.*.{projection}", spec, *sizes[projection])
        codebooks.append(tuple(spec.expert_codebooks()))
        rotations.append((spec.rotation.in_, spec.rotation.out))
    plan = BankPlan(hidden, intermediate, tuple(codebooks), tuple(rotations))
    plain = _Plain(checkpoint, name, num_experts)
    for projection, expert in _plain_experts(plan):
        plain.source(projection, expert, sizes[projection])
    return QuantizedExperts(plan, gate_up.dtype)


def bank_tensors(checkpoint: Checkpoint, name: str, bank: ExpertBank) -> Iterator[str]:
    """Yield the names of all tensors of a bank, as they are stored and as transformers joins plain ones."""
    for projection in PROJECTIONS:
        yield f"{name}.{_FUSED[projection][0]}"
        for expert in range(bank.num_experts):
            for kind in ("esp_trellis", "esp_suh", "esp_svh", "weight"):
                tensor = f"{name}.{expert}.{projection}.{kind}"
                if tensor in checkpoint.tensors:
                    yield tensor


def bank_sources(checkpoint: Checkpoint, name: str, plan: BankPlan) -> dict[str, tuple[int, ...] | None]:
    """Return the tensors of a bank that are used, or may stand beside one that is: by their names in the checkpoint.

    The values are shapes that plain copies of quantized weights must have, and None for what is checked elsewhere.

    Raises:
        DuplicateTensorError: a plain expert is stored for itself and in a tensor for all experts.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for projection, sizes in plan.layout().projections.items():
        fused = f"{name}.{_FUSED[projection][0]}"
        for expert, codebook in enumerate(sizes.codebooks):
            module = f"{name}.{expert}.{projection}"
            if codebook is not None:
                found.update(dict.fromkeys(f"{module}.{kind}" for kind in ("esp_trellis", "esp_suh", "esp_svh")))
                found[f"{module}.weight"] = (sizes.out_features, sizes.in_features)
                continue
            used = f"{module}.weight" if f"{module}.weight" in checkpoint.tensors else fused
            if used != fused and fused in checkpoint.tensors:
                raise DuplicateTensorError(
                    f"{fused} holds the same expert", path=checkpoint.folder.root, tensor=f"{module}.weight"
                )
            found[used] = None
    return found


def read_bank(checkpoint: Checkpoint, name: str, plan: BankPlan, dtype: torch.dtype) -> ExpertBankOperand:
    """Read all experts of a bank into memory; plain ones in ``dtype``.

    Raises:
        NonFiniteScaleError: a scale is infinite or NaN.
        ScaleOverflowError: a weight is too large for ``dtype``.
        TruncatedError: a file has changed its size.
    """
    layout = plan.layout()
    buffers = layout.empty_buffers("cpu")
    quantized = {
        (projection, expert): checkpoint.module(f"{name}.{expert}.{projection}")
        for projection, sizes in layout.projections.items()
        for expert in range(layout.num_experts)
        if sizes.codebooks[expert] is not None
    }
    expect_scales(quantized.values())
    for (projection, expert), module in quantized.items():
        trellis, suh, svh = layout.views(buffers, projection, expert)
        # Through numpy: torch does not like memory that it may not write to.
        trellis.numpy()[...] = module.trellis.view()
        suh.numpy()[...], svh.numpy()[...] = module.scales()
    read = _Plain(checkpoint, name, layout.num_experts)
    sizes = {projection: (each.in_features, each.out_features) for projection, each in layout.projections.items()}
    plain = {
        (projection, expert): read.weight(projection, expert, sizes[projection], dtype)
        for projection, expert in _plain_experts(plan)
    }
    operand = ExpertBankOperand(layout, **buffers, plain=plain)
    check_bank_scales(operand, dtype, name)
    return operand


class _Plain:
    """Weights of experts that are stored plain: each for itself, or those of all experts in one tensor."""

    def __init__(self, checkpoint: Checkpoint, bank: str, num_experts: int) -> None:
        self._checkpoint = checkpoint
        self._bank = bank
        self._num_experts = num_experts
        self._decoded: dict[str, torch.Tensor] = {}

    def source(self, projection: str, expert: int, sizes: tuple[int, int]) -> tuple[TensorRef, bool]:
        """Return the tensor that holds a weight, and whether it is transposed in it."""
        inputs, outputs = sizes
        single = self._checkpoint.tensors.get(f"{self._bank}.{expert}.{projection}.weight")
        if single is not None:
            self._check(single, (outputs, inputs))
            return single, False
        fused, _, parts = _FUSED[projection]
        tensor = self._checkpoint.tensors.get(f"{self._bank}.{fused}")
        if tensor is None:
            raise MissingTensorError(
                "the expert is not quantized, and no shard holds its weight",
                path=self._checkpoint.folder.root,
                tensor=f"{self._bank}.{expert}.{projection}.weight",
            )
        if parts * outputs == inputs:
            raise SourceError("the orientation of square fused experts cannot be told", tensor=tensor.name)
        transposed = tensor.shape == (self._num_experts, inputs, parts * outputs)
        if not transposed:
            self._check(tensor, (self._num_experts, parts * outputs, inputs))
        return tensor, transposed

    def weight(self, projection: str, expert: int, sizes: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return a weight, (out, in)."""
        tensor, transposed = self.source(projection, expert, sizes)
        if len(tensor.shape) == 2:
            return self._checkpoint.decode(tensor.name, OUTPUT_DTYPES[dtype], device="cpu")
        if tensor.name not in self._decoded:
            self._decoded[tensor.name] = self._checkpoint.decode(tensor.name, OUTPUT_DTYPES[dtype], device="cpu")
        _, part, _ = _FUSED[projection]
        page = self._decoded[tensor.name][expert]
        rows = (page.T if transposed else page)[part * sizes[1] : (part + 1) * sizes[1]]
        return rows.contiguous()

    def _check(self, tensor: TensorRef, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ShapeError(
                "does not fit the experts of the model",
                path=tensor.shard.path,
                tensor=tensor.name,
                expected=list(shape),
                got=list(tensor.shape),
            )


def _plain_experts(plan: BankPlan) -> Iterator[tuple[str, int]]:
    for projection, codebooks in zip(PROJECTIONS, plan.codebooks, strict=True):
        for expert, codebook in enumerate(codebooks):
            if codebook is None:
                yield projection, expert


def _parameters(name: str, bank: ExpertBank, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Return gate_up_proj (experts, 2 * intermediate, hidden) and down_proj (experts, hidden, intermediate)."""
    kind = type(module).__name__
    parameters = dict(module.named_parameters())
    activation = type(getattr(module, "act_fn", None)).__name__
    if kind not in EXPERT_CLASSES or parameters.keys() != {"gate_up_proj", "down_proj"}:
        raise SourceError(
            f"experts of the class {kind} are not supported; espalier-format convert --to hf decodes them",
            tensor=name,
        )
    if activation not in _ACTIVATIONS:
        raise SourceError(
            "experts with this activation are not supported", tensor=name, expected="SiLU", got=activation
        )
    if unknown := bank.projections.keys() - set(PROJECTIONS):
        raise SourceError("the model has no such projection", tensor=f"{name}.*.{min(unknown)}")
    return parameters["gate_up_proj"], parameters["down_proj"]
