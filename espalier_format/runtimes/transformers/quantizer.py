"""What transformers calls while it loads an Espalier checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.quantizers.base import HfQuantizer

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import IndexMismatchError, SchemaError, ShapeError, SourceError, UsageError
from espalier_format.kernels.linear import FLOATS
from espalier_format.runtimes.transformers.banks import read_bank
from espalier_format.runtimes.transformers.dtypes import cast_tensors, wanted_dtypes
from espalier_format.runtimes.transformers.exl3 import not_espalier
from espalier_format.runtimes.transformers.experts import QuantizedExperts
from espalier_format.runtimes.transformers.linear import QuantizedLinear
from espalier_format.runtimes.transformers.loading import LoadingCheck
from espalier_format.runtimes.transformers.names import IgnoredNames, ModelNames
from espalier_format.runtimes.transformers.places import check_overflow, find_sources
from espalier_format.runtimes.transformers.replacement import Replacement, replace_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.runtimes.transformers.config import EspalierConfig


class EspalierQuantizer(HfQuantizer):
    """Loads Espalier checkpoints, and refuses what is none or does not fit; it cannot quantize, train or save.

    Only hooks that transformers 5.17 to 5.24 share are used.
    """

    requires_calibration = True
    quantization_config: EspalierConfig

    def __init__(self, quantization_config: EspalierConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise UsageError(
                "the checkpoint is not quantized, and transformers cannot quantize it: use espalier-format quantize"
            )
        super().__init__(quantization_config, **kwargs)
        self._folder: Path | None = None
        self._replacement = Replacement()
        self._check: LoadingCheck | None = None
        self._dtype = FLOATS[0]
        self._dtypes: dict[str, torch.dtype] = {}
        self._model: nn.Module | None = None
        self._sources: dict[str, list[str]] | None = None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype asked for; UsageError for one that no matrix product is made in."""
        if dtype not in FLOATS:
            names = ", ".join(str(name).removeprefix("torch.") for name in FLOATS)
            raise UsageError("the model cannot have this dtype", expected=names, got=str(dtype).removeprefix("torch."))
        self._dtype = dtype
        return dtype

    def update_device_map(self, device_map: Any) -> Any:
        """Return ``device_map``; UsageError if it sends layers to the disk and there are experts."""
        # accelerate would look there for buffers that the checkpoint has under other names.
        on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if on_disk and self.quantization_config.parsed.expert_banks:
            raise UsageError("experts cannot be offloaded to disk; they are compressed: leave them in memory")
        return device_map

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Check the whole folder, then replace modules; ``model`` is on the "meta" device."""
        if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
            raise UsageError("tensor parallelism is not supported with transformers; load without tp_plan")
        files = _local_files(checkpoint_files)
        folder = files[0].parent
        with open_checkpoint(folder) as checkpoint:
            self._check_folder(checkpoint, files, model)
            replacement = replace_modules(model, checkpoint)
            _check_plain_sizes(model, checkpoint)
        self._folder = folder
        self._replacement = replacement
        self._dtypes = wanted_dtypes(model, self._dtype)
        self._check = LoadingCheck(model, folder, replacement.accounted)
        self._model = model
        self._sources = None

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Check what each tensor of the checkpoint fills, now that transformers knows how it is going to rename."""
        update: Any = super().update_weight_conversions
        conversions: list[Any] = update(weight_conversions, *args)
        # The argument that follows depends on the release. Adapters may ask as well, once the model is loaded.
        if self._model is not None and self._folder is not None:
            with open_checkpoint(self._folder) as checkpoint:
                self._sources = find_sources(self._model, checkpoint, self._replacement, conversions)
            self._model = None
        return conversions

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        """Read the experts, freeze the model, and make sure that nothing is missing."""
        check, folder = self._check, self._folder
        if check is None or folder is None:
            raise UsageError("the model was not loaded from a checkpoint")
        check.finish(named=self._sources is not None)
        self._check = None
        cast_tensors(model, self._dtypes)
        with open_checkpoint(folder) as checkpoint:
            check_overflow(model, checkpoint, self._sources or {})
            for name, place in self._replacement.banks.items():
                self._fill(model.get_submodule(place), checkpoint, name)
        self._sources = None
        outputs = getattr(model, "get_output_embeddings", None)
        if outputs is not None and isinstance(outputs(), QuantizedLinear):
            # transformers would resize the embedding, and only then find that the head has no weight.
            vars(model)["resize_token_embeddings"] = _no_resizing
        # Nothing here has a gradient; so autograd need not remember the activations.
        model.requires_grad_(False)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Raise UsageError: what the model class leaves out would be lost, e.g. MTP and vision tensors."""
        raise UsageError(
            "a model with compressed weights is not saved: the checkpoint it came from is complete and unchanged, copy "
            f"that ({self._folder}); espalier-format convert --to hf writes decoded weights"
        )

    @property
    def is_trainable(self) -> bool:
        """Always false."""
        return False

    def _dequantize(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a loaded model stays compressed; espalier-format convert --to hf decodes its checkpoint ({self._folder})"
        )

    def _fill(self, module: nn.Module, checkpoint: Checkpoint, name: str) -> None:
        if not isinstance(module, QuantizedExperts):
            raise UsageError(f"the experts of {name} have been replaced by a {type(module).__name__} while loading")
        if module.trellis.device.type == "meta":
            raise UsageError("experts cannot be offloaded: load without offload_buffers", tensor=name)
        module.fill(read_bank(checkpoint, name, module.plan, module.dtype))

    def _check_folder(self, checkpoint: Checkpoint, files: Sequence[Path], model: nn.Module) -> None:
        root = checkpoint.folder.root
        if checkpoint.quantization is None:
            raise SourceError(not_espalier(checkpoint.format), path=root)
        if checkpoint.quantization != self.quantization_config.parsed:
            raise SchemaError("is not what the given config says: the quantization_config is another one", path=root)
        read = {file.name for file in files}
        ignored = IgnoredNames(model)
        for shard in checkpoint.shards:
            if shard.name not in read and any(name not in ignored for name in shard.header.tensors):
                raise IndexMismatchError(
                    f"transformers reads {', '.join(sorted(read)[:3])} and not {shard.name}, which has weights as well",
                    path=root,
                )


def _no_resizing(*_: Any, **__: Any) -> NoReturn:
    raise UsageError("the vocabulary of a model with a quantized head cannot be resized")


def _local_files(checkpoint_files: Sequence[str] | None) -> list[Path]:
    files = [Path(file) for file in checkpoint_files or ()]
    if not files:
        raise UsageError("an Espalier checkpoint is loaded from its folder, not from a state_dict")
    if others := [file for file in files if file.parent != files[0].parent]:
        raise UsageError(f"the files of a checkpoint lie in one folder, but {others[0]} does not", path=files[0].parent)
    return files


def _check_plain_sizes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ShapeError for a tensor whose number of values contradicts the model; transformers may change its shape."""
    state = model.state_dict()
    places = ModelNames(state)
    for name in checkpoint.plain:
        place = places.find(name)
        if place is None:
            continue
        tensor, expected = checkpoint.tensors[name], state[place]
        values = 1
        for size in tensor.shape:
            values *= size
        if values != expected.numel():
            raise ShapeError(
                "does not fit the model",
                path=tensor.shard.path,
                tensor=name,
                expected=list(expected.shape),
                got=list(tensor.shape),
            )
