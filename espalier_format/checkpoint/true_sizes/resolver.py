"""Find the true size of each EXL3 module: from a plain weight, else from config.json and the architecture.

EXL3 rounds both sides of a module up to a multiple of 128 and does not keep the sizes before. They are
recovered here without reading a tensor. An answer that does not round up to the stored size is no answer:
such a module, and one of an unknown architecture, keeps its padded size and says why.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from espalier_format.checkpoint.text_sections import text_section
from espalier_format.checkpoint.true_sizes.layouts import SYMBOLS
from espalier_format.checkpoint.true_sizes.model_types import TEXT_MODELS, VISION_MODELS, WRAPPED_TEXT, ModelType
from espalier_format.codec.rotation import EXL3_BLOCK, padded

_INDEX: Final = re.compile(r"\.[0-9]+(?=\.)")
_TEXT: Final = re.compile(r"(?:(?:model|language_model|text_model)\.)*(?:mtp\.)?layers\.\*\.(.+)")
_HEAD_OR_MTP: Final = re.compile(r"(?:(?:model|language_model|text_model)\.)*(lm_head|mtp\.fc)")
_VISION: Final = re.compile(
    r"(?:(?:model|visual|vision_tower|vision_model)\.)+(?:encoder\.layers\.\*\.)?((?:blocks|merger|deep|self_|mlp).*)"
)
_STREAM: Final = re.compile(
    r"(?:(?:model|language_model|text_model)\.)*(?:(embed_tokens)|(?:layers\.[0-9]+\.(?:input_layer|post_attention_layer))?norm)"
    r"\.weight"
)
_SLICE: Final = re.compile(r"(.+\.(?:gate|up|down)_proj)\.slice\.([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class TrueSize:
    """Size of one module, in weights, and where it comes from.

    ``source`` is "exact" for the unpadded size; for "padded" the sizes are the stored ones. ``how`` is
    one phrase for a person: the rule that answered, or why none did.
    """

    in_features: int
    out_features: int
    source: Literal["exact", "padded"]
    how: str


class _Unknown(Exception):  # noqa: N818 - a signal between functions of this file, not an error
    """No rule answers; the text says why."""


def resolve_true_sizes(
    config: Mapping[str, object],
    modules: Mapping[str, tuple[int, int]],
    plain_shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, TrueSize]:
    """Return the true size of every module in ``modules``, in the same order (spec/exl3.md §4).

    ``config`` is the content of config.json ({} where there is none), ``modules`` maps module names to
    their stored sizes (in, out), both multiples of 128, and ``plain_shapes`` maps the full names of
    unquantized tensors to their shapes, which contradict a wrong config.json: norms and embeddings have the true
    hidden and vocabulary size. Never fails: what cannot be known comes back as "padded".
    """
    architecture = _Architecture(config, plain_shapes)
    slices = _Slices(modules)
    by_pattern: dict[tuple[str, tuple[int, int]], TrueSize] = {}
    sizes: dict[str, TrueSize] = {}
    for name, stored in modules.items():
        shape = plain_shapes.get(f"{name}.weight")
        if shape is not None and len(shape) == 2:
            sizes[name] = _checked((shape[1], shape[0]), "the plain weight of the same name", stored)
        elif ".slice." in name:
            sizes[name] = _ask(lambda: slices.size(name, architecture), stored)  # noqa: B023 - called at once
        else:
            # All layers and experts share few patterns: 30,000 experts cost that many look-ups, not more.
            pattern = _INDEX.sub(".*", name)
            known = by_pattern.get((pattern, stored))
            if known is None:
                known = _ask(lambda: architecture.size(pattern), stored)  # noqa: B023 - called at once
                by_pattern[pattern, stored] = known
            sizes[name] = known
    return sizes


def size_warnings(sizes: Mapping[str, TrueSize]) -> tuple[str, ...]:
    """Return one line per reason for which modules keep their padded size, with the first module's name."""
    by_reason: dict[str, list[str]] = {}
    for name, size in sizes.items():
        if size.source == "padded":
            by_reason.setdefault(size.how, []).append(name)
    return tuple(
        f"true size unknown, padded size kept: {names[0]}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        + f": {reason}"
        for reason, names in by_reason.items()
    )


def _ask(rule: Callable[[], tuple[tuple[int, int], str]], stored: tuple[int, int]) -> TrueSize:
    """Return what ``rule`` answers, if it answers and fits."""
    try:
        true, how = rule()
    except _Unknown as reason:
        return TrueSize(*stored, source="padded", how=str(reason))
    return _checked(true, how, stored)


def _checked(true: tuple[int, int], how: str, stored: tuple[int, int]) -> TrueSize:
    """Accept ``true`` only if it rounds up to ``stored``."""
    if min(true) < 1 or tuple(padded(size, EXL3_BLOCK) for size in true) != stored:
        contradiction = f"{how} says {true[0]} x {true[1]}, which does not round up to {stored[0]} x {stored[1]}"
        return TrueSize(*stored, source="padded", how=contradiction)
    return TrueSize(*true, source="exact", how=how)


class _Architecture:
    """The layouts that one config.json selects, with its numbers."""

    def __init__(self, config: Mapping[str, object], plain_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._is_empty = not config
        wrapper = config.get("model_type")
        self._text = text_section(config)
        vision = config.get("vision_config")
        self._vision: Mapping[str, object] = vision if isinstance(vision, dict) else {}
        named = self._text.get("model_type")
        self._text_type = WRAPPED_TEXT.get(str(named or wrapper), str(named or wrapper))
        self._text_model = TEXT_MODELS.get(self._text_type)
        self._vision_type = str(wrapper)
        self._vision_model = VISION_MODELS.get(self._vision_type)
        self._stated_by_tensors = _sizes_of_stream(plain_shapes)

    def size(self, pattern: str) -> tuple[tuple[int, int], str]:
        """Return ((in, out), how) for a module name whose indices are written ``*``."""
        if self._is_empty:
            raise _Unknown("without config.json the true sizes are unknown")
        for regex in (_TEXT, _HEAD_OR_MTP):
            if match := regex.fullmatch(pattern):
                found = self._look_up(match[1], self._text_type, self._text_model, self._text)
                self._check_against_tensors(match[1])
                return found
        if match := _VISION.fullmatch(pattern):
            return self._look_up(match[1], self._vision_type, self._vision_model, self._vision)
        raise _Unknown("no rule for modules of this name")

    def _check_against_tensors(self, part: str) -> None:
        """Raise ``_Unknown`` where config.json gives a number another value than plain tensors have."""
        model = self._text_model
        if model is None:
            return
        used = {factor.strip() for side in model.layout[part] for factor in re.split("[+*]", side)}
        for symbol, (tensor, size) in self._stated_by_tensors.items():
            if symbol in used and _symbol(symbol, self._text, model.defaults) != size:
                stated = _symbol(symbol, self._text, model.defaults)
                raise _Unknown(f"config.json says that {SYMBOLS[symbol]} is {stated}, but {tensor} has {size}")

    @staticmethod
    def _look_up(
        part: str, model_type: str, model: ModelType | None, config: Mapping[str, object]
    ) -> tuple[tuple[int, int], str]:
        if model is None:
            raise _Unknown(f"model_type {model_type} is not in the table of architectures")
        shape = model.layout.get(part)
        if shape is None:
            raise _Unknown(f"model_type {model_type} has no rule for {part}")
        inputs, outputs = shape
        size = (_evaluate(inputs, config, model.defaults), _evaluate(outputs, config, model.defaults))
        return size, f"config.json of model_type {model_type}: {inputs} -> {outputs}"


def _sizes_of_stream(plain_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, int]]:
    """Return what plain tensors of the text model say: symbol to the tensor's name and the size it has."""
    found: dict[str, tuple[str, int]] = {}
    for name, shape in plain_shapes.items():
        match = _STREAM.fullmatch(name) if name.endswith(("norm.weight", "embed_tokens.weight")) else None
        if match is None:
            continue
        if match[1] is None:
            if len(shape) == 1:
                found.setdefault("hidden", (name, shape[0]))
        elif len(shape) == 2:
            found.setdefault("vocab", (name, shape[0]))
            found.setdefault("hidden", (name, shape[1]))
    return found


class _Slices:
    """The sizes of ``.slice.N`` modules: wide MLPs that are stored in several parts.

    All slices but the last are whole multiples of 128, so stored at their true size; the last has the rest.
    """

    def __init__(self, modules: Mapping[str, tuple[int, int]]) -> None:
        self._modules = modules
        self._stored: dict[str, list[int]] = {}

    def size(self, name: str, architecture: _Architecture) -> tuple[tuple[int, int], str]:
        """Return ((in, out), how) of one slice."""
        match = _SLICE.fullmatch(name)
        if match is None:
            raise _Unknown("no rule for modules of this name")
        base, number = match[1], int(match[2])
        inputs_are_sliced = base.endswith("down_proj")
        stored = self._stored.get(base)
        if stored is None:
            stored = self._stored[base] = list(self._sizes(base, 0 if inputs_are_sliced else 1))
        if number >= len(stored):
            raise _Unknown(f"the slices of {base} are not numbered from 0 without a gap")
        (inputs, outputs), how = architecture.size(_INDEX.sub(".*", base))
        part = stored[number]
        if number == len(stored) - 1:
            part = (inputs if inputs_are_sliced else outputs) - sum(stored[:-1])
        return ((part, outputs) if inputs_are_sliced else (inputs, part)), f"slice {number} of {len(stored)}, {how}"

    def _sizes(self, base: str, side: int) -> Iterator[int]:
        for number in itertools.count():
            size = self._modules.get(f"{base}.slice.{number}")
            if size is None:
                return
            yield size[side]


def _evaluate(expression: str, config: Mapping[str, object], defaults: Mapping[str, int]) -> int:
    """Return the value of a sum of products such as ``2*key_heads*key_dim + hidden``."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.strip().split("*"):
            product *= int(factor) if factor.isdecimal() else _symbol(factor, config, defaults)
        total += product
    return total


def _symbol(symbol: str, config: Mapping[str, object], defaults: Mapping[str, int]) -> int:
    if symbol == "gate":
        return 1 if config.get("attn_output_gate") is False else 2
    value = config.get(SYMBOLS[symbol])
    if value is None:
        if symbol in defaults:
            return defaults[symbol]
        if symbol == "head_dim":
            return _symbol("hidden", config, defaults) // _symbol("heads", config, defaults)
        if symbol == "kv_heads":
            return _symbol("heads", config, defaults)
        raise _Unknown(f"config.json does not give {SYMBOLS[symbol]}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise _Unknown(f"{SYMBOLS[symbol]} in config.json is not one positive number")
    return value
