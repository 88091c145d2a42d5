"""Quantize an open checkpoint: prepare, measure, choose, encode, assemble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.storage_claims import STORAGE_NAME
from espalier_format.container.header import tensor_bytes
from espalier_format.container.names import CONFIG_NAME, WORKSPACE_NAME
from espalier_format.container.writer import CheckpointWriter
from espalier_format.converters.espalier_block import output_bits
from espalier_format.converters.output import Meter, manifest_bytes
from espalier_format.encoder.effort import get_effort
from espalier_format.encoder.options import EncoderOptions
from espalier_format.kernels.ordered_map import processors
from espalier_format.progress import NullProgress, Progress
from espalier_format.quantize.allocation import choose_codebooks
from espalier_format.quantize.documents import config_document, storage_document
from espalier_format.quantize.encode import encode
from espalier_format.quantize.job import describe_job
from espalier_format.quantize.measure import measure, weighted_errors
from espalier_format.quantize.prepare import prepare
from espalier_format.quantize.report import ModuleReport, QuantizeReport
from espalier_format.quantize.state import QuantizeState

if TYPE_CHECKING:
    from pathlib import Path

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.codec.codebook import Codebook
    from espalier_format.container.hashing import FileRecord
    from espalier_format.quantize.measure import Measurement
    from espalier_format.quantize.options import QuantizeOptions
    from espalier_format.quantize.prepare import Preparation
    from espalier_format.quantize.recipe import Recipe
    from espalier_format.quantize.state import ModuleResult

_SHOWN: Final = 3


def quantize_opened(
    source: Checkpoint,
    destination: Path,
    recipe: Recipe,
    options: QuantizeOptions,
    *,
    sensitivity: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize an open checkpoint into ``destination``, as `operations.quantize.quantize_checkpoint` describes it.

    Everything that can be refused is refused before the work begins, except what only reading the weights shows.
    Each finished module is durable at once, in a hidden folder inside the destination: after an interruption of any
    kind ``options.resume`` goes on from there. Memory: one module's codes and the buffers of the encoder.

    Raises:
        EspalierError: as `operations.quantize.quantize_checkpoint`.
    """
    started = time.monotonic()
    progress = progress or NullProgress()
    preparation = prepare(source, recipe, options, sensitivity or {})
    plan = preparation.plan
    encoder = EncoderOptions(
        effort=get_effort(options.effort), backend=options.backend, threads=options.threads or processors()
    )
    job = describe_job(
        source,
        plan,
        bits=preparation.bits,
        seed=options.seed,
        hessians=options.hessians,
        effort=options.effort,
        weights=preparation.weights,
    )
    writing = _Writing()
    with CheckpointWriter(
        destination,
        force=options.force,
        sources=[source.folder.root],
        progress=writing,
        workspace=WORKSPACE_NAME,
        resume=options.resume,
    ) as writer:
        state = QuantizeState(writer.workspace, job)
        try:
            measured = measure(
                plan.modules,
                state,
                seed=options.seed,
                hessians=options.hessians,
                options=encoder,
                progress=progress,
            )
            chosen = choose_codebooks(plan, preparation.pools, weighted_errors(measured, preparation.weights))
            results, resumed = encode(
                plan.modules,
                chosen,
                state,
                seed=options.seed,
                hessians=options.hessians,
                options=encoder,
                progress=progress,
            )
        except BaseException:
            state.leave()
            raise
        writing.meter = Meter(progress, _output_bytes(source, preparation, chosen), "writing")
        records = _assemble(source, preparation, chosen, results, options, writer, writing.meter)
    average = output_bits(preparation.output_modules(chosen))
    return QuantizeReport(
        source=source.folder.root,
        destination=destination,
        source_format=source.format,
        target_format=options.to,
        recipe=recipe.name,
        requested_bits=preparation.bits,
        bits=average.bits,
        head_bits=average.head_bits,
        seed=options.seed,
        effort=options.effort,
        modules=tuple(_module_reports(preparation, measured, results)),
        kept=len(plan.kept),
        resumed=resumed,
        seconds=time.monotonic() - started,
        bytes_read=sum(shard.header.file_size for shard in source.shards),
        bytes_written=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        warnings=(*source.warnings, *preparation.warnings, *_encoder_warnings(results)),
    )


def _output_bytes(source: Checkpoint, preparation: Preparation, chosen: Mapping[str, Codebook]) -> int:
    """Return about how many bytes the output has: headers and small files are not counted."""
    shards = preparation.shards(source, chosen, lambda _module, _kind: iter(()))
    tensors = (tensor for shard in shards for tensor in shard.tensors)
    copies = sum(source.folder.resolve(name).stat().st_size for name in preparation.copied)
    return copies + sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors)


class _Writing:
    """Passes on what the writer reports, once it is known how much there will be."""

    def __init__(self) -> None:
        self.meter: Meter | None = None

    def __call__(self, n_bytes: int) -> None:
        """Report ``n_bytes`` more as written."""
        if self.meter is not None:
            self.meter.advance(n_bytes)


def _assemble(
    source: Checkpoint,
    preparation: Preparation,
    chosen: Mapping[str, Codebook],
    results: Mapping[str, ModuleResult],
    options: QuantizeOptions,
    writer: CheckpointWriter,
    meter: Meter,
) -> Mapping[str, FileRecord]:
    """Write the checkpoint from the results; return its files."""
    shards = preparation.shards(source, chosen, lambda module, kind: results[module].chunks(kind))
    modules = preparation.output_modules(chosen)
    config, block = config_document(
        source, modules, shards, seed=options.seed, exl3=options.exl3, unties=preparation.unties
    )
    for output in shards:
        if output.changed:
            writer.add_shard(output.shard.name, output.tensors, output.metadata, pad=not options.exl3)
        else:
            writer.add_copy(output.shard.name, output.shard.path, header=output.shard.header)
    for name in preparation.copied:
        writer.add_copy(name, source.folder.resolve(name))
    if options.exl3:
        writer.add_bytes(STORAGE_NAME, storage_document(block, shards))
    writer.add_bytes(CONFIG_NAME, config)
    digests: dict[str, str] = {}
    if options.digests and not options.exl3:
        digests = {name: results[name].digest if name in results else source.digest(name) for name in modules}
    meter.finish()
    index = not options.exl3 or len(shards) > 1
    return writer.finish(index=index, manifest=lambda files: manifest_bytes(files, digests))


def _module_reports(
    preparation: Preparation, measured: Mapping[str, Measurement], results: Mapping[str, ModuleResult]
) -> Iterator[ModuleReport]:
    for module in preparation.plan.modules:
        result = results[module.name]
        names = [codebook.name for codebook in module.candidates]
        relative = measured[module.name].relative if module.name in measured else ()
        yield ModuleReport(
            name=module.name,
            codebook=result.codebook,
            in_features=module.linear.in_features,
            out_features=module.linear.out_features,
            rotation=module.rotation,
            relative_mse=result.report["relative_mse"],
            relative_proxy_loss=result.report["relative_proxy_loss"],
            damping=result.report["damping"],
            sum_of_squares=result.report["sum_of_squares"],
            measured=dict(zip(names, relative, strict=False)),
            weight=preparation.weights[module.name],
            warnings=tuple(result.report["warnings"]),
        )


def _encoder_warnings(results: Mapping[str, ModuleResult]) -> Iterator[str]:
    found = [f"{name}: {line}" for name, result in results.items() for line in result.report["warnings"]]
    yield from found[:_SHOWN]
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN} more warnings of the encoder are in the report"
