"""Find the expert banks where no config names them: of an EXL3 checkpoint, or an output (spec/exl3.md §5)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from espalier_format.checkpoint.base import ExpertBankView
from espalier_format.schema.expert_bank import ASSIGNMENT_ALPHABET

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST_NUMBER = 9


class BankMember(NamedTuple):
    """What decides whether a quantized module can be in a bank: its sizes, and ``form``, must be those of the others.

    ``form`` is the source of the sizes, and the rotation where it is not the same everywhere.
    """

    codebook: Hashable
    in_features: int
    out_features: int
    form: Hashable


def derive_banks(
    modules: Mapping[str, BankMember], plain_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ExpertBankView]:
    """Return the banks: modules ``<bank>.<e>.<projection>`` where ``<bank>`` ends in the part ``experts``.

    A projection belongs to the bank when every expert from 0 to the highest of any projection has it,
    quantized or as a plain ``.weight``, all with the same sizes and, if quantized, the same form, in at most 36
    codebooks, and none has a number that is spelled in another way, as in ``experts.07``. The experts of a projection
    that does not qualify are modules of their own.
    """
    odd = {parts for name in (*modules, *plain_shapes) if (parts := _oddly_numbered(name.removesuffix(".weight")))}
    quantized: dict[str, dict[str, dict[int, str]]] = {}
    for name in modules:
        found = _expert(name)
        if found is not None:
            bank, expert, projection = found
            quantized.setdefault(bank, {}).setdefault(projection, {})[expert] = name
    plain: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    for name, shape in plain_shapes.items():
        found = _expert(name[: -len(".weight")]) if name.endswith(".weight") else None
        if found is not None and found[0] in quantized:
            plain.setdefault(found[0], {}).setdefault(found[2], {})[found[1]] = shape
    banks = {}
    for bank, projections in quantized.items():
        beside = plain.get(bank, {})
        numbers = [number for experts in projections.values() for number in experts]
        numbers += [number for shapes in beside.values() for number in shapes]
        highest = max(numbers)
        views = {}
        for projection, experts in projections.items():
            shapes = beside.get(projection, {})
            if (bank, projection) not in odd and _is_uniform(experts, shapes, modules, highest + 1):
                views[projection] = tuple(experts.get(expert) for expert in range(highest + 1))
        if views:
            banks[bank] = ExpertBankView(bank, highest + 1, views)
    return banks


def _expert(name: str) -> tuple[str, int, str] | None:
    """Split ``<bank>.<expert>.<projection>``, or return None."""
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not (parts[0] == "experts" or parts[0].endswith(".experts")):
        return None
    bank, number, projection = parts
    if not projection or min(projection) < " ":
        return None  # a config cannot hold such a name
    canonical = number.isascii() and number.isdigit() and (number == "0" or number[0] != "0")
    return (bank, int(number), projection) if canonical and len(number) <= _LONGEST_NUMBER else None


def _oddly_numbered(name: str) -> tuple[str, str] | None:
    """Return bank and projection of an expert whose number `_expert` does not take: a config cannot have it beside."""
    parts = name.rsplit(".", 2)
    odd = len(parts) == 3 and parts[1].isdigit() and _expert(name) is None
    return (parts[0], parts[2]) if odd else None


def _is_uniform(
    experts: Mapping[int, str],
    plain: Mapping[int, tuple[int, ...]],
    modules: Mapping[str, BankMember],
    num_experts: int,
) -> bool:
    """Tell whether the experts of one projection can share one entry of a bank."""
    # Counting first: a single expert of number 999,999,999 must not cost a loop of that length.
    if len(experts.keys() | plain.keys()) != num_experts:
        return False
    members = [modules[name] for name in experts.values()]
    sizes = {(member.in_features, member.out_features, member.form) for member in members}
    if len(sizes) != 1 or len({member.codebook for member in members}) > len(ASSIGNMENT_ALPHABET):
        return False
    in_features, out_features, _ = sizes.pop()
    return all(shape == (out_features, in_features) for expert, shape in plain.items() if expert not in experts)
