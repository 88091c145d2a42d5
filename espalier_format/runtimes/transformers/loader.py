"""``load``: from_pretrained, with a look at everything it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.files import read_config
from espalier_format.container.folder import CheckpointFolder
from espalier_format.errors import MissingTensorError, ShapeError, SourceError, UnexpectedTensorError, UsageError
from espalier_format.runtimes.transformers.exl3 import not_espalier
from espalier_format.runtimes.transformers.quantizer import EspalierQuantizer
from espalier_format.schema.config import QUANT_METHOD


def load(path: str | Path, *, model_class: Any = AutoModelForCausalLM, **kwargs: Any) -> PreTrainedModel:
    """Load an Espalier checkpoint, or raise; never a model with a random weight.

    ``path`` is a folder, or the id of a repository on the Hub. ``model_class`` is a class with ``from_pretrained``,
    such as ``AutoModelForImageTextToText``; ``kwargs`` go there: ``dtype``, ``device_map``, ``subfolder``…

    ``from_pretrained`` itself refuses the same checkpoints, as long as config.json says that they are Espalier. Where
    somebody has removed the block transformers asks nobody, and only ``load`` notices.

    Two experts of equal width whose places in an assignment are swapped are an assignment as good as any other: only
    the manifest knows which is right, and it is not read here. ``espalier-format verify`` does that.

    Raises:
        RefusedError: one of its subclasses; the folder is not an Espalier checkpoint of version 1, or unreadable.
        InconsistentError: one of its subclasses; the checkpoint contradicts itself, or the model.
        OSError, ValueError: transformers' own refusals, e.g. of an id that does not exist.
    """
    if "output_loading_info" in kwargs:
        raise UsageError("load asks for output_loading_info itself; call from_pretrained to get it")
    folder = Path(path, kwargs.get("subfolder") or "")
    if folder.is_dir() and not _says_espalier(folder):
        with open_checkpoint(folder) as checkpoint:
            raise SourceError(not_espalier(checkpoint.format), path=folder)
    model, report = model_class.from_pretrained(path, output_loading_info=True, **kwargs)
    if not isinstance(getattr(model, "hf_quantizer", None), EspalierQuantizer):
        raise SourceError("config.json does not say that the checkpoint is Espalier", path=path)
    for error, key in (
        (MissingTensorError, "missing_keys"),
        (UnexpectedTensorError, "unexpected_keys"),
        (ShapeError, "mismatched_keys"),
    ):
        if report[key]:
            raise error(f"transformers reports {key}: {sorted(report[key], key=str)[:3]}", path=path)
    loaded: PreTrainedModel = model
    return loaded


def _says_espalier(folder: Path) -> bool:
    """Tell whether config.json names the format: transformers asks the quantizer then, which checks everything."""
    block = (read_config(CheckpointFolder(folder)) or {}).get("quantization_config")
    return isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD
