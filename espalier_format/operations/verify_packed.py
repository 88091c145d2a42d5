"""Checks of the values of each module of a compressed-tensors checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from espalier_format.errors import EspalierError, MalformedError
from espalier_format.operations.parallel import map_in_threads
from espalier_format.operations.verify_report import Check, counted, judged, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.progress import Progress

_BLOCK_BYTES: Final = 16 * 1024 * 1024


def check_packed(checkpoint: Checkpoint, progress: Progress, *, deep: bool) -> Check:
    """Read the scales, orders and shapes of all modules; with ``deep`` every weight is decoded. Memory is bounded."""
    from espalier_format.converters.compressed_tensors import check_values  # noqa: PLC0415 - imports numpy

    if not checkpoint.packed:
        return skipped("packed", "there are no quantized modules")

    def check(name: str, report: Callable[[int], object]) -> EspalierError | None:
        module = checkpoint.packed[name]
        try:
            check_values(module)
            if deep:
                step = max(1, _BLOCK_BYTES // (4 * module.in_features))
                for start in range(0, module.out_features, step):
                    module.rows(start, min(start + step, module.out_features))
        except EspalierError as error:
            return error
        finally:
            report(module.weights)
        return None

    total = sum(module.weights for module in checkpoint.packed.values())
    progress.start(total, "decoding modules" if deep else "reading scales")
    results = map_in_threads(check, checkpoint.packed, progress)
    findings = [error for _, error in results if error is not None]
    progress.finish()
    what = f"{total:,} weights decoded" if deep else "scales, orders and shapes read; --deep decodes the weights"
    return judged("packed", f"{counted(len(checkpoint.packed), 'module')}, {what}", findings)


def check_library(checkpoint: Checkpoint, progress: Progress) -> Check:
    """Let the compressed-tensors package, if it is installed, decode each module that it decodes right, and compare."""
    from espalier_format.converters import compressed_tensors_library as library  # noqa: PLC0415 - imports numpy

    release = library.installed_version()
    if release is None:
        return skipped("library", f"{library.PACKAGE} is not installed, so there is no second opinion")
    modules = [module for module in checkpoint.packed.values() if library.is_right(module, release)]
    if not modules:
        return skipped("library", f"{library.PACKAGE} {release} does not decode such modules right")
    findings: list[EspalierError] = []
    failed = 0
    progress.start(sum(module.weights for module in modules), f"decoding with {library.PACKAGE}")
    try:
        for module in modules:
            try:
                if not library.compare(module):
                    message = f"{library.PACKAGE} {release} decodes other values"
                    findings.append(MalformedError(message, path=module.weight.shard.path, tensor=module.name))
            except EspalierError:
                pass  # reported by the check of the values
            except (TypeError, ValueError, KeyError, RuntimeError):
                failed += 1  # the package's own fault: what it refuses, it does not decode wrong
            progress.advance(module.weights)
    except ImportError as error:
        reason = str(error).partition("\n")[0][:100]
        return skipped("library", f"{library.PACKAGE} {release} cannot be used: {reason}")
    progress.finish()
    left_out = len(checkpoint.packed) - len(modules) + failed
    detail = f"{library.PACKAGE} {release} decodes {counted(len(modules) - failed, 'module')}"
    detail += " to the same bits" if not findings else f", {len(findings):,} of them to other values"
    if left_out:
        detail += f"; left out {left_out:,} that this release does not decode right"
    return judged("library", detail, findings)
