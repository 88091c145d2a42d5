"""The linear layer of a quantized module: its operand, the product, and the fallback in plain torch.

`linear` is what runtimes call. The weight stays compressed; what is decoded at a time is a block of rows or, in the
CUDA kernels, a few tiles in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import DependencyError, DtypeError, ShapeError, UsageError
from espalier_format.kernels.operands import check_blocks, check_trellis_shape, check_true_size, padded_size

try:
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
except ImportError as error:
    raise DependencyError("linear layers need torch: pip install torch") from error

from espalier_format.kernels import torch_decoder
from espalier_format.kernels.no_derivative import call_operator
from espalier_format.kernels.numpy_decoder import row_blocks

if TYPE_CHECKING:
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.codec.rounding import OutputDtype

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that activations may have."""

_BIAS_DTYPES: Final[Mapping[str, OutputDtype]] = MappingProxyType(
    {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)
"""Dtypes of a bias that are kept."""

CPU_BLOCK: Final = 2 << 20
GPU_BLOCK: Final = 128 << 20
"""Where weights are decoded before they are multiplied, about this many at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearOperand:
    """A quantized module as the right-hand side of a product: the tensors of spec/espalier-v1.md and their meaning.

    Checked when it is made, without looking at a single number, so that it costs microseconds and works on the
    "meta" device: raises CodebookError, DtypeError, ShapeError, and UsageError for tensors on several devices or an
    unknown rotation block. Arguments of other types raise DtypeError where a tensor is wanted, else UsageError.
    Compared by identity. `from_module` makes one from a module of an open checkpoint.
    """

    trellis: torch.Tensor
    """int16 (in_p/16, out_p/16, W), contiguous."""
    suh: torch.Tensor
    """float16 (in_p,), finite."""
    svh: torch.Tensor
    """float16 (out_p,), finite."""
    codebook: Codebook
    """Given as such or by its name."""
    rotation_in: int
    """Rotation block of the input side: 0, 32, 64, 128 or 256."""
    rotation_out: int
    """Rotation block of the output side."""
    in_features: int
    """The true size of the input side, at most in_p."""
    out_features: int
    """The true size of the output side, at most out_p."""
    bias: torch.Tensor | None = None
    """float32, float16 or bfloat16 (out_features,)."""

    if TYPE_CHECKING:

        def __init__(
            self,
            trellis: torch.Tensor,
            suh: torch.Tensor,
            svh: torch.Tensor,
            codebook: Codebook | str,
            rotation_in: int,
            rotation_out: int,
            in_features: int,
            out_features: int,
            bias: torch.Tensor | None = None,
        ) -> None: ...

    @classmethod
    def from_module(cls, module: QuantizedModule, device: torch.device | str = "cpu") -> LinearOperand:
        """Read a module of an open checkpoint, of any format with trellises, and its bias; all is copied to the device.

        Legacy signs are expanded, a bias is cut to ``out_features``, and one of float64 rounded to float32. Raises
        NonFiniteScaleError, ScaleOverflowError for a bias beyond float32, and UsageError for a device that torch cannot
        use.
        """
        from espalier_format.checkpoint.decoding import decode_plain  # noqa: PLC0415 - it needs decoders beside this
        from espalier_format.kernels.torch_device import usable_device  # noqa: PLC0415 - as above

        where = usable_device(device)
        # Copies, for torch takes no read-only memory.
        trellis, suh, svh = (
            torch.from_numpy(array.copy()).to(where) for array in (module.trellis.view(), *module.scales())
        )
        bias = None
        if module.bias is not None:
            dtype = _BIAS_DTYPES.get(module.bias.dtype, "float32")
            bias = decode_plain(module.bias, dtype, where)[: module.out_features]
        return cls(trellis, suh, svh, module.codebook, *module.rotation, module.in_features, module.out_features, bias)

    def __post_init__(self) -> None:
        given: Any = self  # whatever the annotations say
        if not isinstance(given.codebook, Codebook):
            object.__setattr__(self, "codebook", get_codebook(given.codebook))
        if not (
            isinstance(given.trellis, torch.Tensor)
            and isinstance(given.suh, torch.Tensor)
            and isinstance(given.svh, torch.Tensor)
            and (given.bias is None or isinstance(given.bias, torch.Tensor))
            and type(given.rotation_in) is type(given.rotation_out) is int
            and type(given.in_features) is type(given.out_features) is int
        ):
            self._name_the_wrong_type()  # apart, since every product comes through here
        _check_dtype("the trellis", self.trellis, (torch.int16,))
        check_trellis_shape(tuple(self.trellis.shape), self.codebook)
        padded_in, padded_out = self.padded_size
        check_blocks(padded_in, padded_out, self.rotation_in, self.rotation_out)
        check_true_size(padded_in, padded_out, self.in_features, self.out_features)
        _check_contiguous("the trellis", self.trellis)
        self._check_vector("suh", self.suh, padded_in, (torch.float16,))
        self._check_vector("svh", self.svh, padded_out, (torch.float16,))
        if self.bias is not None:
            self._check_vector("the bias", self.bias, self.out_features, FLOATS)

    def _name_the_wrong_type(self) -> None:
        _check_tensor("the trellis", self.trellis)
        _check_tensor("suh", self.suh)
        _check_tensor("svh", self.svh)
        if self.bias is not None:
            _check_tensor("the bias", self.bias)
        _check_integer("rotation_in", self.rotation_in)
        _check_integer("rotation_out", self.rotation_out)
        _check_integer("in_features", self.in_features)
        _check_integer("out_features", self.out_features)

    @property
    def padded_size(self) -> tuple[int, int]:
        """(in_p, out_p): the sizes of the sides, padded to whole rotation blocks and tiles."""
        return padded_size(tuple(self.trellis.shape))

    def _check_vector(self, name: str, vector: torch.Tensor, size: int, dtypes: tuple[torch.dtype, ...]) -> None:
        _check_dtype(name, vector, dtypes)
        if tuple(vector.shape) != (size,):
            raise ShapeError(f"{name} does not fit the trellis", expected=(size,), got=tuple(vector.shape))
        _check_device(name, vector, self.trellis.device)
        _check_contiguous(name, vector)


def linear(x: torch.Tensor, operand: LinearOperand) -> torch.Tensor:
    """Return ``x @ W.T + bias`` for the weight W of a quantized module (spec/rotation.md §3).

    ``x`` is float32, float16 or bfloat16 of shape (..., in_features), with any strides, on the operand's device. The
    result has its dtype and shape (..., out_features). The weights stay compressed. It is the operator
    `espalier_format.kernels.matmul`, which says how exact it is, what it raises, and that it has no derivative.
    """
    import espalier_format.kernels.ops  # noqa: F401, PLC0415 - registers the operator; it needs what stands here

    return call_operator(
        torch.ops.espalier_format.matmul, x, operand.trellis, operand.suh, operand.svh, operand.bias,
        operand.codebook.name, operand.rotation_in, operand.rotation_out, operand.in_features, operand.out_features,
    )  # fmt: skip


def check_activations(x: torch.Tensor, operand: LinearOperand) -> None:
    """Raise unless ``x`` can be multiplied: DtypeError, ShapeError, or UsageError for another device."""
    _check_dtype("the activations", x, FLOATS)
    if x.dim() == 0 or x.shape[-1] != operand.in_features:
        expected = f"(..., {operand.in_features})"
        raise ShapeError("the activations do not fit the weight", expected=expected, got=tuple(x.shape))
    _check_device("the activations", x, operand.trellis.device)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` in the dtype of ``x``: torch.autocast would compute in another one."""
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def fallback_matmul(x: torch.Tensor, operand: LinearOperand) -> torch.Tensor:
    """The product in plain torch, on any device: rows of W are decoded to the dtype of ``x``, a block at a time.

    Weights are within `torch_decoder.TOLERANCE` of the exact ones; the sums are those of ``torch.nn.functional.linear``
    in that dtype. Memory beyond the result is that of about `CPU_BLOCK` weights, on other devices `GPU_BLOCK`, or of
    one rotation block of rows where that is more. Raises what `linear` raises.
    """
    check_activations(x, operand)
    result = torch.empty((*x.shape[:-1], operand.out_features), dtype=x.dtype, device=x.device)
    if result.numel() == 0:
        return result
    budget = CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK
    for rows in row_blocks(operand.out_features, operand.rotation_out, operand.padded_size[0], 4 * budget):
        weight = decode_rows(operand, x.dtype, rows)
        part = None if operand.bias is None else operand.bias[rows].to(x.dtype)
        result[..., rows] = plain_linear(x, weight, part)
    return result


def decode_rows(operand: LinearOperand, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    """Decode rows that start with a rotation block (or a tile) to (rows, in_features), as `torch_decoder` does."""
    end = padded(rows.stop, operand.rotation_out)
    return torch_decoder.decode_weight(
        operand.trellis[:, rows.start // TILE : end // TILE], operand.suh, operand.svh[rows.start : end],
        operand.codebook, operand.rotation_in, operand.rotation_out, operand.in_features, rows.stop - rows.start, dtype,
    )  # fmt: skip


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a torch tensor", got=type(tensor).__name__)


def _check_integer(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise UsageError(f"{name} must be an integer", got=repr(number))


def _check_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(f"{name} has a dtype that is not supported", expected=expected, got=tensor.dtype)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} must be contiguous", got=f"strides {tuple(tensor.stride())}")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise UsageError(f"{name} must be on the device of the trellis", expected=device, got=tensor.device)
