"""Linear layers whose weight stays compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

import torch
from torch import nn

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.kernels.linear import LinearOperand, linear

SCALES: Final = ("esp_suh", "esp_svh")


class QuantizedLinear(nn.Module):
    """A linear layer of ``in_features`` and ``out_features``, which computes ``x @ W.T + bias`` with `linear`.

    Made on the "meta" device, to be loaded by transformers: the buffers ``esp_trellis`` int16 (in_p/16, out_p/16, W),
    ``esp_suh`` float16 (in_p,) and ``esp_svh`` float16 (out_p,) have the names of the checkpoint (spec/espalier-v1.md
    §3), and ``bias``, (out_features,) of ``dtype``, is a parameter or None. ``x`` is float32, float16 or bfloat16,
    (..., in_features); the result has its dtype. Moving the module moves the buffers; casting it casts the bias only.
    """

    esp_trellis: torch.Tensor
    esp_suh: torch.Tensor
    esp_svh: torch.Tensor

    def __init__(
        self,
        codebook: str,
        rotation: tuple[int, int],
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.codebook = codebook
        self.rotation = rotation
        self.in_features = in_features
        self.out_features = out_features
        padded_in, padded_out = padded(in_features, rotation[0]), padded(out_features, rotation[1])
        tiles = (padded_in // TILE, padded_out // TILE, self._book.halfwords_per_tile)
        self.register_buffer("esp_trellis", torch.empty(tiles, dtype=torch.int16, device="meta"))
        self.register_buffer("esp_suh", torch.empty(padded_in, dtype=torch.float16, device="meta"))
        self.register_buffer("esp_svh", torch.empty(padded_out, dtype=torch.float16, device="meta"))
        values = torch.empty(out_features, dtype=dtype, device="meta") if bias else None
        self.bias = None if values is None else nn.Parameter(values, requires_grad=False)
        self._operand: LinearOperand | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ W.T + bias``."""
        return linear(x, self.operand())

    def operand(self) -> LinearOperand:
        """Return the weight and bias as they are now; the object is kept while they are, if they are to stay."""
        kept, bias = self._operand, self.bias
        if (
            kept is None
            or kept.trellis is not self.esp_trellis
            or kept.suh is not self.esp_suh
            or kept.svh is not self.esp_svh
            or kept.bias is not bias
        ):
            kept = LinearOperand(
                self.esp_trellis, self.esp_suh, self.esp_svh, self._book, *self.rotation, self.in_features,
                self.out_features, bias,
            )  # fmt: skip
            self._operand = None if is_brought(self) else kept
        return kept

    @property
    def _book(self) -> Codebook:
        return get_codebook(self.codebook)

    def extra_repr(self) -> str:
        """Return what stands in the printed model."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, codebook={self.codebook}, rotation={self.rotation}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._operand = None  # it would hold the memory that this gives back
        result: Self = apply_but_cast(self, SCALES, fn, super()._apply, recurse=recurse)
        return result

    def __getstate__(self) -> dict[str, Any]:
        # The operand refers to the buffers; a copy of the module makes its own.
        return {**self.__dict__, "_operand": None}


class JoinedLinear(nn.Module):
    """One linear layer of a model that is stored in parts, e.g. ``qkv`` as ``q_proj``, ``k_proj`` and ``v_proj``.

    ``parts`` are layers beside it in the model, where they have the names of the checkpoint, and not its children.
    Their outputs stand one after the other.
    """

    def __init__(self, parts: tuple[nn.Module, ...], in_features: int, out_features: int) -> None:
        super().__init__()
        self._parts = parts
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the parts, joined along the last dimension."""
        return torch.cat([part(x) for part in self._parts], dim=-1)


def is_brought(module: nn.Module) -> bool:
    """Tell whether accelerate brings tensors of a module for each call, and takes them away after it.

    On several devices every layer has a hook, and most of these only move inputs.
    """
    return any(
        getattr(hook, "offload", False)
        and (getattr(hook, "offload_buffers", True) or any(True for _ in module.parameters(recurse=False)))
        for hook in _hooks(getattr(module, "_hf_hook", None))
    )


def _hooks(hook: Any) -> Iterator[Any]:
    """Yield a hook of accelerate, or those that it consists of."""
    parts = getattr(hook, "hooks", None)  # a SequentialHook's
    if parts is None:
        yield hook
    else:
        for part in parts:
            yield from _hooks(part)


def apply_but_cast(
    module: Any,
    scales: Sequence[str],
    fn: Callable[[torch.Tensor], torch.Tensor],
    apply: Callable[..., Any],
    *,
    recurse: bool,
) -> Any:
    """Let torch apply ``fn`` to a module, but keep the ``scales``, its float16 buffers, as they are if that cast them.

    ``model.to(torch.bfloat16)`` must not round what belongs to the compressed weights.
    """
    before = {name: getattr(module, name) for name in scales}
    result = apply(fn, recurse)
    for name, values in before.items():
        after = getattr(module, name)
        if after.dtype != values.dtype:
            setattr(module, name, values.to(after.device))
    return result
