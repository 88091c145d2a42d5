"""What config, index and tensors of a compressed-tensors checkpoint say against each other, or leave out.

``inspect`` and ``verify`` report the same. A *finding* makes a runtime go wrong, and ``verify`` fail: it loads other
tensors than there are, or leaves some out. What is harmless, or right for some runtimes only, is a *warning*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.text_sections import text_sections
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME
from espalier_format.converters.compressed_tensors_patterns import spell
from espalier_format.converters.compressed_tensors_schemes import read_schemes
from espalier_format.errors import (
    DtypeError,
    EspalierError,
    IndexMismatchError,
    MissingTensorError,
    SourceError,
    UnexpectedTensorError,
)
from espalier_format.operations.verify_report import judged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.converters.compressed_tensors_schemes import Schemes
    from espalier_format.operations.verify_report import Check

_SHOWN: Final = 3
_MTP_LAYERS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_NO_LINEAR: Final = (".gate", "_embed", "embedding", "embeddings", "embed_tokens", "norm")
"""Ends of modules whose matrix belongs to no linear layer."""


@dataclass(frozen=True, slots=True)
class Contradictions:
    """Everything found; ``checked`` says in a phrase what was looked at."""

    findings: tuple[EspalierError, ...]
    warnings: tuple[str, ...]
    checked: str

    def check(self) -> Check:
        """Return the check *groups* of ``verify``; the warnings are reported apart."""
        return judged("groups", self.checked, list(self.findings))


def find_contradictions(checkpoint: Checkpoint) -> Contradictions:
    """Compare config, index and tensors of a compressed-tensors checkpoint; no tensor is read."""
    path = checkpoint.folder.root / CONFIG_NAME
    schemes = read_schemes(checkpoint.config, path)
    modules = list(dict.fromkeys((*checkpoint.packed, *(n.rpartition(".")[0] for n in checkpoint.plain))))
    spelled = spell(modules)
    findings: list[EspalierError] = []
    warnings: list[str] = []
    if checkpoint.missing:
        message = f"the index names {_shown(checkpoint.missing, 'tensor')} that no shard holds"
        findings.append(IndexMismatchError(message, path=checkpoint.folder.root / INDEX_NAME))
    findings += [
        MissingTensorError(f"the target {entry[:200]!a} of {group.name[:60]!a} matches no module", path=path)
        for group in schemes.groups
        for entry in group.targets.idle(spelled)
    ]
    dead = list(schemes.ignore.idle(spelled, schemes.ignore.prepare(spelled)))
    if dead:
        verb = "matches" if len(dead) == 1 else "match"
        warnings.append(f"{_shown(dead, 'ignore entry', 'ignore entries')} {verb} nothing")
    ignored = [n for n in checkpoint.packed if schemes.ignore.rank(n) and component_of(n) is not Component.MTP]
    if ignored:
        message = f"{_shown(ignored, 'module')} quantized, though the config ignores them"
        findings.append(UnexpectedTensorError(message, path=path))
    plain = [name for name in _plain_though_targeted(checkpoint, schemes) if component_of(name) is not Component.MTP]
    if plain:
        warnings.append(f"{_shown(plain, 'module')} stored plain, though the config targets and does not ignore them")
    heads = [name for name in checkpoint.packed if component_of(name) is Component.HEAD]
    if heads:
        label = checkpoint.packed[heads[0]].scheme.label
        warnings.append(f"{heads[0]} is packed ({label}): runtimes that expect plain weights there cannot load it")
    _draft_model(checkpoint, schemes, findings, warnings)
    checked = f"{len(schemes.groups)} groups, {len(schemes.ignore.entries):,} ignore entries, MTP, head and index"
    return Contradictions(tuple(findings), tuple(warnings), checked)


def contradictions_in_words(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the findings as warnings, for what reads a checkpoint all the same; none for one of another format."""
    if checkpoint.format != "compressed-tensors":
        return ()
    return tuple(str(finding) for finding in find_contradictions(checkpoint).findings)


def _draft_model(checkpoint: Checkpoint, schemes: Schemes, findings: list[EspalierError], warnings: list[str]) -> None:
    """Look at the multi-token-prediction layers: a drafter that loads none of them guesses, and nobody notices."""
    path = checkpoint.folder.root / CONFIG_NAME
    layers, first = _stated_layers(checkpoint.config)
    held = not layers or any(
        component_of(name) is Component.MTP or (first is not None and f"layers.{first}." in f"{name}.")
        for name in (*checkpoint.packed, *checkpoint.plain)
    )
    if not held:
        message = f"config.json states {layers} multi-token-prediction layers, but there are no tensors of them"
        findings.append(MissingTensorError(message, path=path))
    packed = [name for name in checkpoint.packed if component_of(name) is Component.MTP]
    ignored = [name for name in packed if schemes.ignore.rank(name)]
    plain = [name for name in _plain_though_targeted(checkpoint, schemes) if component_of(name) is Component.MTP]
    if ignored:
        what = _shown(ignored, "MTP module")
        message = f"{what} packed, though the config ignores them: a drafter expects plain weights"
        findings.append(DtypeError(message, path=path))
    elif packed:
        warnings.append(f"{_shown(packed, 'MTP module')} packed: only runtimes that quantize the drafter can load them")
    if plain:
        message = f"{_shown(plain, 'MTP module')} plain, though the config targets them: a drafter expects packed ones"
        findings.append(DtypeError(message, path=path))


def _plain_though_targeted(checkpoint: Checkpoint, schemes: Schemes) -> Iterator[str]:
    for name in checkpoint.plain:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(checkpoint.tensors[name].shape) != 2 or module.endswith(_NO_LINEAR):
            continue
        if component_of(module) is Component.EMBEDDINGS or schemes.ignore.rank(module):
            continue
        try:
            scheme = schemes.resolve(module)
        except SourceError:
            continue  # two groups claim it, which only matters for packed modules
        if scheme is not None:
            yield module


def _stated_layers(config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return how many prediction layers config.json states, and the number of decoder layers before them."""
    for section in text_sections(config):
        for key in _MTP_LAYERS:
            count = section.get(key)
            if type(count) is int and count > 0:
                first = section.get("num_hidden_layers")
                return count, first if type(first) is int else None
    return 0, None


def _shown(names: Sequence[str], noun: str, plural: str | None = None) -> str:
    count = len(names)
    shown = ", ".join(name[:120] for name in names[:_SHOWN])
    return f"{count:,} {noun if count == 1 else plural or noun + 's'} ({shown}{', …' if count > _SHOWN else ''})"
