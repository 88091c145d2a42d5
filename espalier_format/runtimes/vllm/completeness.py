"""What is checked of a checkpoint before vLLM reads a tensor: vLLM itself does not miss a quantized tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from espalier_format.checkpoint import open_checkpoint
from espalier_format.container.folder import is_shard_name
from espalier_format.errors import SourceError
from espalier_format.operations.verify_files import check_sizes, read_manifest

if TYPE_CHECKING:
    from espalier_format.schema.config import QuantizationConfig


def check_folder(path: str | Path, quantization: QuantizationConfig) -> frozenset[str]:
    """Check config, headers, index and shard sizes of a checkpoint; return the quantized modules that have a bias.

    Headers alone are read. Config and headers must name the same quantized tensors, with the right shapes and dtypes;
    index and headers the same tensors, plain ones too; and shards must have the sizes in the manifest, where there is
    one.

    Raises:
        MissingTensorError, UnexpectedTensorError, and what else `open_checkpoint` raises: names the tensor.
        DigestError: a shard that the manifest lists is missing or has another size.
        SourceError: the folder holds another checkpoint than the one that vLLM was given the config of.
    """
    with open_checkpoint(path) as checkpoint:
        if checkpoint.quantization != quantization:
            raise SourceError("config.json in the folder and the config that vLLM uses differ", path=path)
        manifest = read_manifest(checkpoint.folder)
        if manifest is not None:
            # Shards only: people may edit a chat template, say.
            wrong = check_sizes(checkpoint.folder, manifest)
            for name in sorted(name for name in wrong if is_shard_name(name)):
                raise wrong[name]
        biases = {name.removesuffix(".bias") for name in checkpoint.tensors if name.endswith(".bias")}
        return frozenset(biases & set(checkpoint.modules))
