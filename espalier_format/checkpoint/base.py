"""An open checkpoint of any format: headers are read and checked, tensors are read when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from espalier_format.errors import MissingTensorError
from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy as np
    import torch

    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.codec.dtype_names import DtypeName
    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard
    from espalier_format.schema.config import QuantizationConfig

Format = Literal["espalier", "exl3", "compressed-tensors", "plain"]


@dataclass(frozen=True, slots=True)
class ExpertBankView:
    """The experts of one layer: per projection, the quantized module of each expert.

    ``projections`` maps a projection to one module name per expert, None where that expert is stored plain.
    """

    name: str
    num_experts: int
    projections: Mapping[str, tuple[str | None, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "projections", ReadOnlyDict(self.projections))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that ``open_checkpoint`` has checked.

    ``config`` is config.json ({} where there is none); ``quantization`` is its checked block, for an
    Espalier checkpoint only. ``tensors`` holds all tensors in shard order, ``modules`` all quantized
    modules, experts included, in the order of their trellis tensors; ``plain`` the tensors that belong to
    no quantized module, in shard order; ``other_files`` the files that are no shard, index, config.json or
    manifest. ``warnings`` are lines for a person about what was found and does no harm. ``packed`` holds the
    quantized modules of a compressed-tensors checkpoint, which has no ``modules``: integers are no trellis.
    ``missing`` names tensors that the index names and no shard holds; there are none in an Espalier checkpoint. No
    mapping can be changed; the values in ``config`` are as JSON gives them.

    Reading is lazy and memory-mapped; reading from several threads is safe, closing meanwhile is not. The
    files must not be changed while the checkpoint is open.
    """

    folder: CheckpointFolder
    format: Format
    config: Mapping[str, Any]
    quantization: QuantizationConfig | None
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorRef]
    modules: Mapping[str, QuantizedModule]
    expert_banks: Mapping[str, ExpertBankView]
    plain: Mapping[str, TensorRef]
    other_files: tuple[str, ...]
    warnings: tuple[str, ...]
    packed: Mapping[str, PackedModule] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("config", "modules", "expert_banks", "packed"):
            mapping = getattr(self, name)
            if isinstance(mapping, dict):  # a LazyMapping stays one
                object.__setattr__(self, name, ReadOnlyDict(mapping))

    @property
    def was_exl3(self) -> bool:
        """Whether exllamav3 wrote the weights: it is EXL3, or was made from it (``spec/config.md`` §7)."""
        origin = None if self.quantization is None else self.quantization.source
        return self.format == "exl3" or (origin is not None and origin.format == "exl3")

    def __repr__(self) -> str:
        modules = len(self.modules) + len(self.packed)
        counts = ((modules, "quantized module"), (len(self.tensors), "tensor"), (len(self.shards), "shard"))
        listed = ", ".join(f"{number:,} {noun}{'' if number == 1 else 's'}" for number, noun in counts)
        return f"<Checkpoint {self.folder.root}: {self.format}, {listed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards. Arrays that were handed out stay valid."""
        for shard in self.shards:
            shard.close()

    def module(self, name: str) -> QuantizedModule:
        """Return a quantized module.

        Raises:
            MissingTensorError: there is no quantized module of that name.
        """
        if name not in self.modules:
            raise MissingTensorError("there is no quantized module of this name", path=self.folder.root, tensor=name)
        return self.modules[name]

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as stored, a read-only array; BF16 as uint16 bit patterns.

        Raises:
            MissingTensorError: there is no tensor of that name.
        """
        if name not in self.tensors:
            raise MissingTensorError("there is no tensor of this name", path=self.folder.root, tensor=name)
        return self.tensors[name].array()

    @overload
    def decode(self, name: str, dtype: DtypeName = "float32", device: None = None) -> np.ndarray: ...

    @overload
    def decode(self, name: str, dtype: DtypeName, device: str | torch.device) -> torch.Tensor: ...

    @overload
    def decode(self, name: str, dtype: DtypeName = "float32", *, device: str | torch.device) -> torch.Tensor: ...

    def decode(self, name: str, dtype: DtypeName = "float32", device: str | torch.device | None = None) -> Any:
        """Return a weight in full, shape (out_features, in_features), as Hugging Face checkpoints store it.

        ``name`` is a quantized module, or a plain floating-point tensor, which is returned in its own
        shape. ``dtype`` is "float32", "float16" or "bfloat16", or one of these in short: "fp32", "fp16", "bf16".
        Without ``device`` the result is a numpy array (bfloat16 as uint16 bit patterns), correctly rounded from the
        exact value to nearest even (``spec/rotation.md``). With one, e.g. "cpu" or "cuda", it is a torch tensor on
        that device; modules are then decoded by the torch decoder, within its stated tolerance.

        Raises:
            MissingTensorError: there is no such module or tensor.
            NonFiniteScaleError: a scale of the module is infinite or NaN.
            ScaleOverflowError: a weight is too large for ``dtype``; names the module and its file.
            UsageError: another dtype, a plain tensor that is not floating-point, or a device that torch cannot use.
            DependencyError: ``device`` is given, and torch is not installed.
        """
        from espalier_format.checkpoint.decoding import (  # noqa: PLC0415 - imports numpy
            decode_module,
            decode_packed,
            decode_plain,
        )
        from espalier_format.codec.dtype_names import parse_dtype  # noqa: PLC0415 - as above

        target = parse_dtype(dtype)
        if name in self.modules:
            return decode_module(self.modules[name], target, device)
        if name in self.packed:
            return decode_packed(self.packed[name], target, device)
        if name not in self.tensors:
            raise MissingTensorError(
                "there is no quantized module and no tensor of this name", path=self.folder.root, tensor=name
            )
        return decode_plain(self.tensors[name], target, device)

    def codes(self, name: str) -> np.ndarray:
        """Return a module's codes in the rotated basis: (padded_in, padded_out), int8 for grids, else float16.

        Raises:
            MissingTensorError: there is no quantized module of that name.
        """
        from espalier_format.kernels.numpy_decoder import decode_codes  # noqa: PLC0415 - imports numpy

        module = self.module(name)
        return decode_codes(module.trellis.array(), module.codebook)

    def digest(self, name: str, device: str | torch.device | None = None) -> str:
        """Return a module's decode digest, in hexadecimal (``spec/manifest.md`` §4); memory stays bounded.

        It is decoded by numpy or, with ``device``, e.g. "cuda", by torch on that device.

        Raises:
            MissingTensorError: there is no quantized module of that name.
            UsageError: torch cannot use ``device``.
            DependencyError: ``device`` is given, and torch is not installed.
        """
        module = self.module(name)
        if device is not None:
            from espalier_format.kernels import torch_digest  # noqa: PLC0415 - needs torch

            return torch_digest.decode_digest(module.trellis.view(), module.codebook, device)
        from espalier_format.kernels.digest import decode_digest  # noqa: PLC0415 - imports numpy

        return decode_digest(module.trellis.array(), module.codebook)
