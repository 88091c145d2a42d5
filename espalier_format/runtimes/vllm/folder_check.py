"""When the folder of a checkpoint is checked: before vLLM loads it, or once vLLM has downloaded it from the Hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from espalier_format.runtimes.vllm.completeness import check_folder

if TYPE_CHECKING:
    from espalier_format.schema.config import QuantizationConfig

_LOGGER = logging.getLogger(__name__)
_CONFIG = "config.json"


class FolderCheck:
    """Runs `check_folder` once for a model; the methods of all its layers share one."""

    def __init__(self, quantization: QuantizationConfig) -> None:
        self._quantization = quantization
        self._biases: frozenset[str] | None = None
        self._pending: tuple[str, str | None] | None = None
        self._download: str | None = None

    def before_loading(self, model: str, revision: str | None) -> None:
        """Check a local folder; remember the address and revision of anything else. Raises what it finds."""
        if Path(model).is_dir():
            self._biases = check_folder(model, self._quantization)
        else:
            self._pending = (model, revision)

    def will_load(self, download: str | None, *, loads: bool) -> None:
        """Say where vLLM downloads weights to, None for huggingface_hub's cache, and whether it loads them at all."""
        self._download = download
        if not loads:
            self._pending = None

    def after_loading(self) -> frozenset[str] | None:
        """Check a downloaded folder, unless that is done; return the quantized modules that have a bias.

        None means that there was no folder to check, which a warning said. Raises what `check_folder` finds.
        """
        if self._pending is not None:
            model, revision = self._pending
            self._pending = None
            folder = cached_folder(model, revision, self._download)
            if folder is None:
                _LOGGER.warning(
                    "%s: its files were not found in the download cache, so that only the tensors are checked that "
                    "vLLM has loaded, not index, manifest and what it leaves out; a local folder is checked in full",
                    model,
                )
            else:
                self._biases = check_folder(folder, self._quantization)
        return self._biases


def cached_folder(repository: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the snapshot in huggingface_hub's cache that holds the config of a repository; None if there is none.

    Nothing is downloaded. ``cache`` is another folder for the cache.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - vLLM brings it; most uses need it not
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(repository, _CONFIG, cache_dir=cache, revision=revision)
    except HFValidationError:  # the address of a bucket, say
        return None
    return Path(found).parent if isinstance(found, str) else None
