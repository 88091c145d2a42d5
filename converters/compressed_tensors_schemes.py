"""What the ``quantization_config`` of a compressed-tensors checkpoint says: schemes, and whom they are meant for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from espalier_format.converters.compressed_tensors_patterns import Names, spell
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
_ROOT: Final = "quantization_config"


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
    """Tell whether a config.json states this quantization method."""
    block = (config or {}).get(_ROOT)
    return isinstance(block, Mapping) and block.get("quant_method") == METHOD


def read_schemes(config: Mapping[str, Any], path: Path) -> Schemes:
    """Read the ``quantization_config`` of a config.json that states ``quant_method`` "compressed-tensors".

    Raises:
        SchemaError: it is not of the form that compressed-tensors writes.
        SourceError: it says something that changes the weights and is not read here, which is named: a format label, a
            type, a strategy, a number of bits, sparsity, transforms, an argument of later releases.
        LimitError: it has more or longer patterns than are read.
    """
    block = config[_ROOT]
    label = block.get("format")
    if label is not None and str(label) not in _TOP_LABELS:
        raise SourceError(f"the format {str(label)[:60]!a} of compressed-tensors is not read", path=path)
    for key in ("sparsity_config", "transform_config"):
        if block.get(key):
            raise SourceError(f"{_ROOT}.{key} changes the weights in a way that is not read", path=path)
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SchemaError(f"{_ROOT}.config_groups must be an object with a group", path=path)
    if len(groups) > _MAX_GROUPS:
        raise LimitError(f"{_ROOT}.config_groups has too many groups", path=path, expected=_MAX_GROUPS, got=len(groups))
    warnings: list[str] = []
    if block.get("kv_cache_scheme"):
        warnings.append("the config quantizes the key/value cache, which says nothing about weights and is not read")
    parsed = tuple(_group(str(name), group, path, warnings) for name, group in groups.items())
    version = block.get("version")
    return Schemes(
        parsed,
        Names.parse(block.get("ignore") or [], f"{_ROOT}.ignore", path),
        version if isinstance(version, str) else None,
        tuple(dict.fromkeys(warnings)),
    )


def _group(name: str, group: object, path: Path, warnings: list[str]) -> Group:
    where = f"{_ROOT}.config_groups.{name[:60]}"
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
    kind, bits = weights.get("type", "int"), weights.get("num_bits", _MAX_BITS)
    if kind != "int":
        raise SourceError(f"{where}: weights of type {str(kind)[:40]!a} are not read, only int", path=path)
    if type(bits) is not int or not _MIN_BITS <= bits <= _MAX_BITS:
        raise SourceError(f"{where}: num_bits must be {_MIN_BITS} to {_MAX_BITS}", path=path, got=str(bits)[:40])
    if weights.get("dynamic") not in (None, False):
        raise SourceError(f"{where}: dynamic scales of weights are not read", path=path)
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise SchemaError(f"{where}.symmetric must be true or false", path=path)
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise SchemaError(f"{where}.group_size must be a positive integer", path=path, got=str(size)[:40])
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise SourceError(f"{where}: the strategy {str(strategy)[:40]!a} is not read", path=path)
    if strategy == "group" and (size is None or size < 0):
        raise SchemaError(f"{where}: the strategy group needs a group_size", path=path)
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", *_REORDERED):
        raise SourceError(f"{where}: actorder {str(order)[:40]!a} is not read", path=path)
    reordered = order is True or (isinstance(order, str) and order in _REORDERED)
    return Scheme(name, bits, symmetric, strategy, size if strategy == "group" and size else 0, reordered)


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str], where: str, path: Path) -> None:
    unknown = next((key for key, value in values.items() if key not in known and value is not None), None)
    if unknown is not None:
        raise SourceError(f"{where}: {str(unknown)[:60]!a} is not known, and may change the weights", path=path)


def _same(one: Scheme | None, other: Scheme | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.label == other.label and one.reordered == other.reordered
