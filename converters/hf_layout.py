"""Plan a Hugging Face checkpoint: which of its tensors come from which stored matrices and vectors.

Pure planning over names and shapes; no tensor is read. What is particular to an architecture stands in
`hf_architectures`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from espalier_format.checkpoint.text_sections import text_section
from espalier_format.converters.hf_architectures import (
    ARCHITECTURES,
    EXPERT,
    FUSED_EXPERTS,
    GEMMA3_PARAMETER,
    GEMMA3_PROJECTION,
    SLICE,
    SLICED_ALONG_IN,
    SLICED_ALONG_OUT,
    Architecture,
    Join,
    find_baked_scale,
    model_types,
)
from espalier_format.converters.hf_tensors import HfLayout, HfTensor, Row, Stored, StoredModule
from espalier_format.errors import SourceError


def refuse_inexpressible(
    config: Mapping[str, object], modules: Iterable[str], plain: Iterable[str], *, from_exl3: bool
) -> None:
    """Raise SourceError for what plain weights cannot express, naming it: baked-in scales and row tables.

    ``modules`` and ``plain`` are names as in `plan_hf_layout`. ``from_exl3`` says that exllamav3 wrote the weights,
    now or before they became Espalier; only then were scales baked in.
    """
    plain = tuple(plain)
    for name in plain:
        if name.endswith(".trellis"):
            message = "a row table cannot be written as a plain weight: its row codec is not implemented"
            raise SourceError(message, tensor=name)
    if from_exl3:
        linear = (*modules, *(name.removesuffix(".weight") for name in plain if name.endswith(".weight")))
        found = find_baked_scale(config, linear)
        if found is not None:
            baked, identity, module = found
            message = f"{identity} has a scale baked into its weights ({baked.scale}) that is not undone here"
            raise SourceError(message, tensor=module)


def plan_hf_layout(
    config: Mapping[str, object], modules: Mapping[str, StoredModule], plain: Mapping[str, tuple[int, ...]]
) -> HfLayout:
    """Plan the tensors that the loader of the config's architecture expects.

    ``plain`` maps names of unquantized tensors, module biases not among them, to shapes. Raises SourceError for
    groups of tensors that are incomplete or do not fit together.
    """
    types = model_types(config)
    plan = _Plan(modules, plain)
    plan.join_slices()
    for model_type in types:
        plan.adapt(ARCHITECTURES.get(model_type, Architecture()))
    if "gemma3" in types:
        plan.restore_gemma3_projection(config)
    unknown = [f"model type {name} is unknown" for name in types if name not in ARCHITECTURES]
    if not types:
        unknown = ["config.json states no model type"]
    warnings = [f"{what}: tensor names are written as stored, not adapted to its loader" for what in unknown]
    return HfLayout(tuple(plan.tensors.values()), tuple(warnings))


class _Plan:
    """The tensors to write by name, while they are put together."""

    def __init__(self, modules: Mapping[str, StoredModule], plain: Mapping[str, tuple[int, ...]]) -> None:
        self.tensors: dict[str, HfTensor] = {name: _whole(name, Stored(name, s, False)) for name, s in plain.items()}
        for name, module in modules.items():
            # A plain copy of the same weight, as EXL3 keeps some, gives way to the decoded one.
            matrix = Stored(name, (module.out_features, module.in_features), True)
            self.tensors[f"{name}.weight"] = _whole(f"{name}.weight", matrix)
            if module.bias is not None:
                vector = Stored(module.bias, (module.out_features,), False)
                self.tensors[f"{name}.bias"] = _whole(f"{name}.bias", vector)

    def adapt(self, architecture: Architecture) -> None:
        """Apply what one architecture needs."""
        for join in architecture.joins:
            for parent in self._parents(join):
                self._join(parent, join)
        if architecture.fused_experts:
            self._fuse_experts()

    def join_slices(self) -> None:
        """Put ``<base>.slice.<n>`` together again: along ``out``, or along ``in`` for the down projection."""
        groups: dict[str, set[int]] = {}
        for name in self.tensors:
            if name.endswith(".weight") and (match := SLICE.fullmatch(name.removesuffix(".weight"))):
                groups.setdefault(match["base"], set()).add(int(match["index"]))
        for base, numbers in groups.items():
            if numbers != set(range(len(numbers))):
                raise SourceError("the slices are not numbered from 0 without a gap", tensor=base)
            slices = [f"{base}.slice.{n}" for n in range(len(numbers))]
            if self._keep_original(base, slices):
                continue
            kind = base.rpartition(".")[2]
            if kind in SLICED_ALONG_OUT:
                self._stack(f"{base}.weight", [f"{name}.weight" for name in slices])
                self._stack_biases(base, slices)
            elif kind in SLICED_ALONG_IN:
                self._side_by_side(base, slices)
            else:
                raise SourceError(f"it is not known along which side {kind} was sliced", tensor=base)

    def restore_gemma3_projection(self, config: Mapping[str, object]) -> None:
        """Write Gemma 3's projector as the (in, out) parameter it is in the model, under its own name."""
        for name in [n for n in self.tensors if GEMMA3_PROJECTION.fullmatch(n.removesuffix(".weight"))]:
            tensor = self.tensors.pop(name)
            target = f"{name.removesuffix('.mm_input_projection.weight')}.{GEMMA3_PARAMETER}"
            if any(source.quantized for source in tensor.sources()):
                transposed = True
            elif target in self.tensors:
                continue
            else:
                # A plain one may stand as in the model or as a linear layer; its shape says which, unless it is square.
                vision, text = _hidden_size(config.get("vision_config")), _hidden_size(text_section(config))
                if vision == text or tensor.shape not in {(vision, text), (text, vision)}:
                    raise SourceError("its orientation does not follow from its shape and config.json", tensor=name)
                transposed = tensor.shape == (text, vision)
            shape = tensor.shape[::-1] if transposed else tensor.shape
            self.tensors[target] = HfTensor(target, shape, tensor.pages, transposed)

    def _parents(self, join: Join) -> list[str]:
        found: dict[str, None] = {}
        for name in self.tensors:
            for part in join.parts:
                if name.endswith(f".{part}.weight"):
                    parent = name.removesuffix(f".{part}.weight")
                    if join.parent.fullmatch(parent):
                        found[parent] = None
        return list(found)

    def _join(self, parent: str, join: Join) -> None:
        parts = [f"{parent}.{part}" for part in join.parts]
        fused = f"{parent}.{join.fused}"
        if not self._keep_original(fused, parts):
            self._stack(f"{fused}.weight", [f"{part}.weight" for part in parts])
            self._stack_biases(fused, parts)

    def _keep_original(self, whole: str, parts: list[str]) -> bool:
        """Drop the parts if none is quantized and the original is there too: it has the source's own bytes."""
        stored = [self.tensors[f"{part}.weight"] for part in parts if f"{part}.weight" in self.tensors]
        if f"{whole}.weight" not in self.tensors or any(s.quantized for tensor in stored for s in tensor.sources()):
            return False
        for part in parts:
            self.tensors.pop(f"{part}.weight", None)
            self.tensors.pop(f"{part}.bias", None)
        return True

    def _stack_biases(self, target: str, parts: list[str]) -> None:
        biases = [f"{part}.bias" for part in parts]
        if any(name in self.tensors for name in biases):
            self._stack(f"{target}.bias", biases, rank=1)

    def _stack(self, target: str, parts: list[str], *, rank: int = 2) -> None:
        """Replace ``parts`` by one tensor, their rows one below the other."""
        tensors = self._take(target, parts, rank)
        if len({tensor.shape[1:] for tensor in tensors}) != 1:
            raise SourceError("its parts differ in in_features", tensor=target)
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        rows = tuple(row for tensor in tensors for row in tensor.pages[0])
        self._put(HfTensor(target, shape, (rows,)))

    def _side_by_side(self, base: str, slices: list[str]) -> None:
        tensors = self._take(f"{base}.weight", [f"{name}.weight" for name in slices], 2)
        if len({tensor.shape[0] for tensor in tensors}) != 1:
            raise SourceError("its slices differ in out_features", tensor=base)
        shape = (tensors[0].shape[0], sum(tensor.shape[1] for tensor in tensors))
        row = tuple(source for tensor in tensors for source in tensor.sources())
        self._put(HfTensor(f"{base}.weight", shape, ((row,),)))
        biases = [f"{name}.bias" for name in slices if f"{name}.bias" in self.tensors]
        if len(biases) > 1:
            # The layer adds one bias; whether the slices repeat or share it out is recorded nowhere.
            raise SourceError("more than one of its slices has a bias", tensor=base)
        if biases:
            self._stack(f"{base}.bias", biases, rank=1)

    def _put(self, tensor: HfTensor) -> None:
        """Add a joined tensor; a plain copy gives way, but what is quantized as a whole cannot have parts too."""
        whole = self.tensors.get(tensor.name)
        if whole is not None and any(source.quantized for source in whole.sources()):
            raise SourceError("it is quantized as a whole, and in parts as well", tensor=tensor.name)
        self.tensors[tensor.name] = tensor

    def _take(self, target: str, parts: list[str], rank: int) -> list[HfTensor]:
        """Remove and return the parts of a tensor to join, all of which have ``rank`` dimensions and some content."""
        if missing := [name for name in parts if name not in self.tensors]:
            raise SourceError(f"{target} cannot be joined: {missing[0]} is missing", tensor=missing[0])
        tensors = [self.tensors.pop(name) for name in parts]
        for tensor in tensors:
            if len(tensor.shape) != rank or 0 in tensor.shape:
                raise SourceError(
                    f"{target} cannot be joined: this part is no {'matrix' if rank == 2 else 'vector'}",
                    tensor=tensor.name,
                    got=f"shape {list(tensor.shape)}",
                )
        return tensors

    def _fuse_experts(self) -> None:
        banks: dict[str, int] = {}
        for name in self.tensors:
            if name.endswith(".weight") and (match := EXPERT.fullmatch(name.removesuffix(".weight"))):
                banks[match["bank"]] = max(banks.get(match["bank"], 0), int(match["index"]) + 1)
        for bank, count in banks.items():
            for fused, projections in FUSED_EXPERTS.items():
                target = f"{bank}.{fused}"
                pages: list[tuple[Row, ...]] = []
                shapes: set[tuple[int, int]] = set()
                for expert in range(count):
                    parts = self._take(target, [f"{bank}.{expert}.{name}.weight" for name in projections], 2)
                    pages.append(tuple(row for part in parts for row in part.pages[0]))
                    shapes.update((part.shape[1], sum(part.shape[0] for part in parts)) for part in parts)
                if len(shapes) != 1:
                    raise SourceError("its experts differ in size", tensor=target)
                shape = shapes.pop()
                if shape[0] == shape[1]:
                    # transformers 5 tells the two orientations that it accepts apart by their shapes.
                    raise SourceError("a loader cannot tell the orientation of square fused experts", tensor=target)
                self._put(HfTensor(target, (count, *shape), tuple(pages), transposed=True))


def _whole(name: str, source: Stored) -> HfTensor:
    return HfTensor(name, source.shape, (((source,),),))


def _hidden_size(section: object) -> int | None:
    size = section.get("hidden_size") if isinstance(section, Mapping) else None
    return size if isinstance(size, int) else None
