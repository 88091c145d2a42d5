"""Decode every module and compare its digest with the manifest (spec/manifest.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.files import MANIFEST_NAME
from espalier_format.errors import DigestError, EspalierError
from espalier_format.operations.parallel import map_in_threads
from espalier_format.operations.verify_report import Check, judged, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.progress import Progress
    from espalier_format.schema.manifest import Manifest


def check_digests(
    checkpoint: Checkpoint, manifest: Manifest | None, progress: Progress
) -> tuple[Check, dict[str, str]]:
    """Decode all quantized modules; return the comparison, and module → digest in checkpoint order.

    A digest that differs, and one for a module that is not there, is a ``DigestError`` finding. A module that the
    manifest has no digest of is decoded all the same, which shows that its trellis can be.
    """
    if not checkpoint.modules:
        return skipped("digests", "there are no quantized modules"), {}
    stated = manifest.decode_digests if manifest is not None else None
    stated = {} if stated is None else stated
    computed, findings = _decode_all(checkpoint, progress)
    path = checkpoint.folder.root / MANIFEST_NAME
    compared = 0
    for name, digest in computed.items():
        if name in stated:
            compared += 1
            if stated[name] != digest:
                text = "another decode digest than in the manifest"
                findings.append(DigestError(text, path=path, tensor=name, expected=stated[name], got=digest))
    findings += [
        DigestError("the manifest has a decode digest of a module that is not there", path=path, tensor=name)
        for name in stated
        if name not in checkpoint.modules
    ]
    weights = sum(module.weights for module in checkpoint.modules.values())
    detail = f"{len(computed):,} modules, {weights:,} weights decoded"
    if compared == len(computed):
        detail += ", all compared"
    elif compared:
        detail += f", {compared:,} compared; the manifest has no digest of the others"
    else:
        detail += "; there are no digests to compare with"
    return judged("digests", detail, findings), computed


def _decode_all(checkpoint: Checkpoint, progress: Progress) -> tuple[dict[str, str], list[EspalierError]]:
    def digest(name: str, report: Callable[[int], object]) -> str | EspalierError:
        try:
            return checkpoint.digest(name)
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
    return digests, errors
