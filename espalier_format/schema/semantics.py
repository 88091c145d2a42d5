"""Rules of ``quantization_config`` that no schema language states: fields that must agree (spec/config.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.container.folder import check_name
from espalier_format.errors import CodebookError, LimitError, SchemaError
from espalier_format.limits import MAX_TENSORS
from espalier_format.schema.base import json_path
from espalier_format.schema.expert_bank import ASSIGNMENT_ALPHABET, PLAIN_EXPERT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from espalier_format.codec.codebook import Codebook
    from espalier_format.schema.config import ModuleSpec, QuantizationConfig
    from espalier_format.schema.expert_bank import Projection

_ROOT = "quantization_config"
_TENSORS_PER_MODULE = 3  # trellis, suh, svh


def check_codebooks(config: QuantizationConfig, path: str | Path | None = None) -> None:
    """Raise ``CodebookError`` unless every codebook is known and stated with the specification's constants.

    A codebook that a module or expert uses and ``codebooks`` does not state is a ``CodebookError`` too,
    since its constants cannot be compared then.
    """
    for name, stated in config.codebooks.items():
        known = _known(name, json_path(_ROOT, ("codebooks", name)), path)
        addend = f"0x{known.addend:08X}" if known.addend else None
        for what, expected, got in (
            ("multiplier", known.multiplier_hex, stated.multiplier),
            ("addend", addend, stated.addend),
            ("sha256", known.sha256, stated.sha256),
        ):
            if expected != got:
                raise CodebookError(
                    f"{json_path(_ROOT, ('codebooks', name, what))} is not the constant of this codebook; decoding "
                    "with other constants would give other weights",
                    path=path,
                    expected=expected,
                    got=got,
                )
    stated_names = set(config.codebooks)
    for where, name in _uses(config):
        if name not in stated_names:
            _known(name, where, path)
            raise CodebookError(f"{where} uses {name}, which {_ROOT}.codebooks does not state", path=path)


def check_semantics(config: QuantizationConfig, path: str | Path | None = None) -> None:
    """Raise ``SchemaError`` where fields that are well-formed by themselves contradict each other."""

    def refuse(parts: tuple[str | int, ...], what: str) -> SchemaError:
        return SchemaError(f"{json_path(_ROOT, parts)}: {what}", path=path)

    unused = set(config.codebooks) - {name for _, name in _uses(config)}
    if unused:
        raise refuse(("codebooks", min(unused)), "no module and no expert uses this codebook")
    for key, bank in config.expert_banks.items():
        if key.rpartition(".")[2] != "experts":
            raise refuse(("expert_banks", key), 'the key of a bank must end in the part "experts"')
        for name, projection in bank.projections.items():
            parts = ("expert_banks", key, "projections", name)
            problem = _projection_problem(projection, bank.num_experts)
            if problem is not None:
                raise refuse((*parts, problem[0]), problem[1])
    for name, module in config.modules.items():
        if _find_projection(config, name) is not None:
            raise refuse(("modules", name), "the module is also in the namespace of an entry of expert_banks")
        problem = _padded_size_problem(module)
        if problem is not None:
            raise refuse(("modules", name, problem[0]), problem[1])
    for position, name in enumerate(config.ignore):
        if name in config.modules or _is_quantized_expert(config, name):
            raise refuse(("ignore", position), f"{name} is a quantized module, and cannot be ignored")
        if position and name <= config.ignore[position - 1]:
            raise refuse(("ignore", position), "names must be sorted and unique")
    if config.source is not None:
        stored: set[str] = set()
        for original, carried in config.source.carried_files.items():
            check_name(original, path=path)
            check_name(carried, path=path)
            if carried in stored:
                raise refuse(("source", "carried_files", original), "another file has been given the same name")
            stored.add(carried)


def check_tensor_count(config: QuantizationConfig, path: str | Path | None = None) -> None:
    """Raise ``LimitError`` where more tensors are called for than a checkpoint may have (spec/errors.md §5).

    An expert is one character of a config, and a thousand bytes as an object.
    """
    count = _TENSORS_PER_MODULE * len(config.modules)
    for bank in config.expert_banks.values():
        for projection in bank.projections.values():
            plain = projection.assignment.count(PLAIN_EXPERT)
            count += plain + _TENSORS_PER_MODULE * (bank.num_experts - plain)
    if count > MAX_TENSORS:
        raise LimitError(f"{_ROOT} calls for too many tensors", path=path, expected=f"at most {MAX_TENSORS}", got=count)


def _known(name: str, where: str, path: str | Path | None) -> Codebook:
    """Return the codebook, or say where an unknown one is named."""
    try:
        return get_codebook(name)
    except CodebookError as error:
        raise CodebookError(f"{where}: {error.message}", path=path) from None


def _find_projection(config: QuantizationConfig, module: str) -> tuple[str, Projection] | None:
    """Return (expert, projection) when a module name lies in the namespace of a bank's projection."""
    parts = module.rsplit(".", 2)
    if len(parts) != 3 or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    bank = config.expert_banks.get(parts[0])
    projection = None if bank is None else bank.projections.get(parts[2])
    return None if projection is None else (parts[1], projection)


def _is_quantized_expert(config: QuantizationConfig, module: str) -> bool:
    found = _find_projection(config, module)
    if found is None:
        return False
    expert, projection = found
    # The length comes first: a number of a million digits must not be converted.
    if len(expert) > len(str(len(projection.assignment))) or (expert[0] == "0" and expert != "0"):
        return False
    index = int(expert)
    return index < len(projection.assignment) and projection.assignment[index] != PLAIN_EXPERT


def _padded_size_problem(sizes: ModuleSpec | Projection) -> tuple[str, str] | None:
    """Return the field and the reason when ``size_source`` is "padded" but a size is not a padded one."""
    if sizes.size_source == "padded":
        for field, size, block in (
            ("in_features", sizes.in_features, sizes.rotation.in_),
            ("out_features", sizes.out_features, sizes.rotation.out),
        ):
            if padded(size, block) != size:
                return field, f'size_source is "padded", but {size} is no multiple of the block'
    return None


def _projection_problem(projection: Projection, num_experts: int) -> tuple[str, str] | None:
    """Return the field and the reason why a projection is refused, or None."""
    assignment = projection.assignment
    if len(assignment) != num_experts:
        return "assignment", f"must have one character per expert ({num_experts}), but has {len(assignment)}"
    books = [get_codebook(name) for name in projection.codebooks]
    order = [(book.half_steps, book.name) for book in books]
    if order != sorted(set(order)):
        return "codebooks", "must be sorted by width, then name, without repeats"
    used = {ASSIGNMENT_ALPHABET.index(character) for character in set(assignment) - {PLAIN_EXPERT}}
    if used and max(used) >= len(books):
        return "assignment", f"{ASSIGNMENT_ALPHABET[max(used)]!r} is beyond the {len(books)} listed codebooks"
    for index, book in enumerate(books):
        if index not in used:
            return "codebooks", f"no expert is assigned {book.name}"
    return _padded_size_problem(projection)


def _uses(config: QuantizationConfig) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, codebook name) for each place that names a codebook."""
    for name, module in config.modules.items():
        yield json_path(_ROOT, ("modules", name, "codebook")), module.codebook
    for key, bank in config.expert_banks.items():
        for name, projection in bank.projections.items():
            where = json_path(_ROOT, ("expert_banks", key, "projections", name, "codebooks"))
            for codebook in projection.codebooks:
                yield where, codebook
