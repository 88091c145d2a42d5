"""What the ``quantization_config`` of a compressed-tensors checkpoint says: schemes, and whom they are meant for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.stated_quantization import BLOCK, stated_quantization
from espalier_format.converters.compressed_tensors_patterns import Names, spell
from espalier_format.converters.compressed_tensors_presets import preset_group
from espalier_format.converters.compressed_tensors_values import lower, truth, whole
from espalier_format.errors import LimitError, SchemaError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

METHOD: Final = "compressed-tensors"
"""``quant_method`` of the checkpoints that are read here."""

INTEGER_LABELS: Final = frozenset({"pack-quantized", "int-quantized", "naive-quantized"})
"""Format labels of the layouts that are read; which of them a module has is told by its tensors."""

_TOP_LABELS: Final = INTEGER_LABELS | {"mixed-precision", "dense"}
_STRATEGIES: Final = frozenset({"group", "channel", "tensor"})
_WEIGHT_KEYS: Final = frozenset(
    {
        "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder",
        "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
    }
)  # fmt: skip
_GROUP_KEYS: Final = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_REORDERED: Final = frozenset({"group", "dynamic"})
_MIN_BITS: Final = 2
_MAX_BITS: Final = 8
_MAX_GROUPS: Final = 256


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a group of modules are stored.

    ``strategy`` is "group" (of ``group_size`` inputs), "channel" or "tensor". ``reordered``: columns were assigned to
    groups by activation, so each module has a ``weight_g_idx``. ``group`` is the name of the config group.
    """

    group: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int
    reordered: bool = False

    @property
    def label(self) -> str:
        """How people call it: "int4 g128", "int8 channel asymmetric"."""
        where = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"int{self.bits} {where}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A config group: targets, and the scheme of their weights; None where weights are not quantized."""

    name: str
    targets: Names
    scheme: Scheme | None


@dataclass(frozen=True, slots=True, eq=False)
class Schemes:
    """All groups in order, what is ignored, the version of the writer, and lines for a person."""

    groups: tuple[Group, ...]
    ignore: Names
    version: str | None
    warnings: tuple[str, ...]

    def prepare(self, modules: Iterable[str]) -> None:
        """Match the targets against many modules at once, so that ``resolve`` is quick for each of them."""
        spelled = spell(modules)
        for group in self.groups:
            group.targets.prepare(spelled)

    def resolve(self, module: str) -> Scheme | None:
        """Return the scheme that is meant for a linear module, whether it is ignored or not.

        The most specific target decides, whatever the order of the groups: an exact name before an expression, an
        expression before the class.

        Raises:
            SourceError: two groups claim the module in the same way, with schemes that differ.
        """
        best, claims = 0, list[Group]()
        for group in self.groups:
            rank = group.targets.rank(module)
            if rank > best:
                best, claims = rank, [group]
            elif rank and rank == best:
                claims.append(group)
        if not claims:
            return None
        first = claims[0].scheme
        for other in claims[1:]:
            if not _same(first, other.scheme):
                message = f"the config groups {claims[0].name!a} and {other.name!a} claim it alike, and differ"
                raise SourceError(message, tensor=module)
        return first


def is_compressed_tensors(config: Mapping[str, Any] | None) -> bool:
    """Tell whether a config.json states this quantization method, wherever it does (`stated_quantization`)."""
    stated = stated_quantization(config)
    return stated is not None and stated.method == METHOD


def read_schemes(config: Mapping[str, Any], path: Path) -> Schemes:
    """Read what a config.json says whose ``quant_method`` is "compressed-tensors" (`is_compressed_tensors`).

    Raises:
        SchemaError: it is not of the form that compressed-tensors writes.
        SourceError: it says something that changes the weights and is not read here, which is named: a format label, a
            type, a strategy, a number of bits, sparsity, transforms, an argument of later releases.
        LimitError: it has more or longer patterns than are read.
    """
    stated = stated_quantization(config)
    if stated is None:
        raise SchemaError(f"there is no {BLOCK}", path=path)
    root, block = stated
    label = block.get("format")
    if label is not None and str(label) not in _TOP_LABELS:
        raise SourceError(f"the format {str(label)[:60]!a} of compressed-tensors is not read", path=path)
    for key, changes in (("sparsity_config", _makes_sparse), ("transform_config", _transforms)):
        if changes(block.get(key)):
            raise SourceError(f"{root}.{key} changes the weights in a way that is not read", path=path)
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SchemaError(f"{root}.config_groups must be an object with a group", path=path)
    if len(groups) > _MAX_GROUPS:
        raise LimitError(f"{root}.config_groups has too many groups", path=path, expected=_MAX_GROUPS, got=len(groups))
    warnings: list[str] = []
    if block.get("kv_cache_scheme"):
        warnings.append("the config quantizes the key/value cache, which says nothing about weights and is not read")
    parsed = tuple(
        _group(str(name), group, f"{root}.config_groups.{str(name)[:60]}", path, warnings)
        for name, group in groups.items()
    )
    version = block.get("version")
    return Schemes(
        parsed,
        Names.parse(block.get("ignore") or [], f"{root}.ignore", path),
        version if isinstance(version, str) else None,
        tuple(dict.fromkeys(warnings)),
    )


def _makes_sparse(config: object) -> bool:
    """Tell whether weights are stored sparse: "dense" only says how many of them are 0."""
    return bool(config) and not (isinstance(config, Mapping) and config.get("format") == "dense")


def _transforms(config: object) -> bool:
    """Tell whether anything is transformed: there may be no groups, or groups that apply to nothing."""
    if not isinstance(config, Mapping) or any(value for key, value in config.items() if key != "config_groups"):
        return bool(config)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return bool(groups)
    return any(not isinstance(group, Mapping) or group.get("apply", []) != [] for group in groups.values())


def _group(name: str, group: object, where: str, path: Path, warnings: list[str]) -> Group:
    if isinstance(group, list):
        group = preset_group(name, group, where, path)
    if not isinstance(group, Mapping):
        raise SchemaError(f"{where} must be an object", path=path)
    _refuse_unknown(group, _GROUP_KEYS, where, path)
    targets = Names.parse(group.get("targets") or [], f"{where}.targets", path)
    warnings += [
        f"{side} of the config group {name[:60]!a} are quantized at run time, which is not kept: weights only are read"
        for side in ("input_activations", "output_activations")
        if group.get(side)
    ]
    weights = group.get("weights")
    if weights is None:
        return Group(name, targets, None)
    if not isinstance(weights, Mapping):
        raise SchemaError(f"{where}.weights must be an object", path=path)
    label = group.get("format")
    if label == "dense":
        return Group(name, targets, None)
    if label is not None and str(label) not in INTEGER_LABELS:
        raise SourceError(f"{where}: the format {str(label)[:60]!a} is not read", path=path)
    return Group(name, targets, _scheme(name, weights, f"{where}.weights", path))


def _scheme(name: str, weights: Mapping[str, Any], where: str, path: Path) -> Scheme:
    _refuse_unknown(weights, _WEIGHT_KEYS, where, path)
    kind, bits = lower(weights.get("type", "int")), whole(weights.get("num_bits", _MAX_BITS))
    if kind != "int":
        raise SourceError(f"{where}: weights of type {str(kind)[:40]!a} are not read, only int", path=path)
    if bits is None or not _MIN_BITS <= bits <= _MAX_BITS:
        got = str(weights.get("num_bits"))[:40]
        raise SourceError(f"{where}: num_bits must be {_MIN_BITS} to {_MAX_BITS}", path=path, got=got)
    if weights.get("dynamic") not in (None, False):
        raise SourceError(f"{where}: dynamic scales of weights are not read", path=path)
    symmetric = truth(weights.get("symmetric", True))
    if symmetric is None:
        raise SchemaError(f"{where}.symmetric must be true or false", path=path)
    strategy, size = _strategy(weights, where, path)
    order = lower(weights.get("actorder"))
    if order not in (None, False, True, "weight", "static", *_REORDERED):
        raise SourceError(f"{where}: actorder {str(order)[:40]!a} is not read", path=path)
    reordered = order is True or (isinstance(order, str) and order in _REORDERED)
    return Scheme(name, bits, symmetric, strategy, size, reordered)


def _strategy(weights: Mapping[str, Any], where: str, path: Path) -> tuple[str, int]:
    """Return the strategy and, of the strategy "group", how many inputs share a scale; 0 for the others."""
    stated = weights.get("group_size")
    size = None if isinstance(stated, str) else whole(stated)
    strategy = lower(weights.get("strategy"))
    if stated is not None and (size is None or size < -1 or (size == 0 and strategy is None)):
        raise SchemaError(f"{where}.group_size must be a positive integer", path=path, got=str(stated)[:40])
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise SourceError(f"{where}: the strategy {str(strategy)[:40]!a} is not read", path=path)
    if strategy != "group":
        return strategy, 0
    if size is None or size <= 0:
        raise SchemaError(f"{where}: the strategy group needs a group_size", path=path)
    return strategy, size


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str], where: str, path: Path) -> None:
    unknown = next((key for key, value in values.items() if key not in known and value is not None), None)
    if unknown is not None:
        raise SourceError(f"{where}: {str(unknown)[:60]!a} is not known, and may change the weights", path=path)


def _same(one: Scheme | None, other: Scheme | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.label == other.label and one.reordered == other.reordered
