"""Decode every module and compare its digest with the manifest (spec/manifest.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.container.names import MANIFEST_NAME
from espalier_format.errors import DigestError, EspalierError, UsageError
from espalier_format.operations.accelerator import decoding_device
from espalier_format.operations.parallel import map_in_threads
from espalier_format.operations.verify_report import Check, counted, judged, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.progress import Progress
    from espalier_format.schema.manifest import Manifest


def check_digests(
    checkpoint: Checkpoint, manifest: Manifest | None, progress: Progress, *, record: bool = False
) -> tuple[Check, dict[str, str]]:
    """Decode all quantized modules; return the comparison, and module → digest in checkpoint order.

    A digest that differs, and one for a module that is not there, is a ``DigestError`` finding. A module that the
    manifest has no digest of is decoded all the same, which shows that its trellis can be; where there are none at all
    the check is skipped, and says how to add them unless ``record`` is about to.
    """
    if not checkpoint.modules:
        return skipped("digests", "there are no quantized modules"), {}
    stated = manifest.decode_digests if manifest is not None else None
    stated = {} if stated is None else stated
    computed, findings, where = _decode_all(checkpoint, progress)
    path = checkpoint.folder.root / MANIFEST_NAME
    compared = 0
    for name, digest in computed.items():
        if name in stated:
            compared += 1
            if stated[name] != digest:
                text = "decode digest differs from the manifest"
                findings.append(DigestError(text, path=path, tensor=name, expected=stated[name], got=digest))
    findings += [
        DigestError("the manifest has a decode digest of a module that is not there", path=path, tensor=name)
        for name in stated
        if name not in checkpoint.modules
    ]
    if not stated and not findings:
        can_add = manifest is not None and checkpoint.format == "espalier" and not record
        how = " (add them: --deep --record)" if can_add else ""
        verb = "decodes" if len(computed) == 1 else "decode"
        return skipped("digests", f"{counted(len(computed), 'module')} {verb}{where}; no digests{how}"), computed
    weights = sum(module.weights for module in checkpoint.modules.values())
    detail = f"{counted(len(computed), 'module')}, {counted(weights, 'weight')} decoded{where}"
    if compared == len(computed):
        detail += ", all compared"
    elif compared:
        detail += f", {compared:,} compared; the manifest has no digest of the others"
    else:
        detail += ", none compared"
    return judged("digests", detail, findings), computed


def _decode_all(checkpoint: Checkpoint, progress: Progress) -> tuple[dict[str, str], list[EspalierError], str]:
    """Decode on the GPU where there is one, else by one thread per processor; the last result says where."""
    device = decoding_device()
    failed: list[str] = []

    def decode(name: str) -> str:
        if device is not None and not failed:
            try:
                return checkpoint.digest(name, device)
            except (RuntimeError, UsageError) as error:  # out of memory, or a GPU that this torch cannot use
                failed.append(str(error).partition("\n")[0][:100])
        return checkpoint.digest(name)

    def digest(name: str, report: Callable[[int], object]) -> str | EspalierError:
        try:
            return decode(name)
        except EspalierError as error:
            return error
        finally:
            report(checkpoint.modules[name].trellis_bytes)

    sizes = {name: module.trellis_bytes for name, module in checkpoint.modules.items()}
    # The largest first, so that no thread is left alone with it at the end.
    order = sorted(sizes, key=lambda name: -sizes[name])
    progress.start(sum(sizes.values()), "decoding modules")
    results = dict(map_in_threads(digest, order, progress))
    progress.finish()
    digests: dict[str, str] = {}
    errors: list[EspalierError] = []
    for name in sizes:
        result = results[name]
        if isinstance(result, EspalierError):
            errors.append(result)
        else:
            digests[name] = result
    if device is None:
        return digests, errors, ""
    return digests, errors, f" (not all on {device}: {failed[0]})" if failed else f" on {device}"
