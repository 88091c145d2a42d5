"""Which modules of the checkpoint make up a layer of vLLM's model, and which part of each this rank holds.

vLLM merges q, k and v, or gate and up, into one layer with several output partitions. Here each stays a module of its
own, so that widths, codebooks and rotation blocks may differ between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.errors import ShapeError, UsageError
from espalier_format.runtimes.tensor_parallel import FeatureRange, ModuleSlice, equal_share, join_ranges, slice_module
from espalier_format.schema.config import ModuleSpec
from espalier_format.schema.expert_bank import Projection

_QKV: Final = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True, slots=True)
class TrueSizes:
    """The sizes of a module as the model uses it."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A linear layer as vLLM makes it: the input size, whole and on this rank, and its output partitions on this rank.

    ``inputs`` is the whole input size, ``rank_inputs`` this rank's; ``rank_outputs`` has the size of each partition on
    this rank.
    """

    inputs: int
    rank_inputs: int
    rank_outputs: tuple[int, ...]
    rank: int
    world: int

    def input_range(self) -> FeatureRange:
        """Return the inputs of this rank."""
        return _share(self.inputs, self.rank_inputs, self)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One module of a layer: its name in the checkpoint, the partitions that it fills, and what this rank holds.

    ``rank_outputs`` has the size of each of its partitions on this rank; ``whole`` is the module as the checkpoint
    stores it, for all ranks. ``codebook``, ``slice`` and ``whole`` are None for a plain module, whose size is not known
    before its weight is seen.
    """

    name: str
    partitions: tuple[int, ...]
    rank_outputs: tuple[int, ...]
    codebook: Codebook | None = None
    slice: ModuleSlice | None = None
    whole: ModuleSlice | None = None

    @property
    def out_features(self) -> int:
        """Outputs that this rank holds."""
        return sum(self.rank_outputs)


def layer_parts(modules: Mapping[str, ModuleSpec | None], shape: LayerShape) -> tuple[LayerPart, ...]:
    """Return the parts of a layer, in the order of its partitions.

    ``modules`` has each module by its name in the checkpoint, in order, None for a plain one.

    Raises:
        UsageError: this rank would hold part of a rotation block or of a tile; names the module and says why.
        ShapeError: the modules do not have the sizes of the layer.
    """
    parts = []
    for (name, spec), partitions in zip(modules.items(), _deal(modules, shape), strict=True):
        try:
            parts.append(_part(name, spec, partitions, shape))
        except (UsageError, ShapeError) as error:
            raise type(error)(error.message, tensor=name, expected=error.expected, got=error.got) from None
    return tuple(parts)


def part_of_shard(parts: Sequence[LayerPart], shard: str | int | tuple[int, ...] | None) -> int:
    """Return the place of the part that vLLM means by a shard id: "q", a partition, several, or None for the only one.

    Raises UsageError if there is no such part.
    """
    if shard is None and len(parts) == 1:
        return 0
    first = shard[0] if isinstance(shard, tuple) and shard else shard
    partition = _QKV.get(first) if isinstance(first, str) else first
    for place, part in enumerate(parts):
        if partition in part.partitions:
            return place
    raise UsageError(
        "vLLM loads a shard that the layer does not have", expected=[part.name for part in parts], got=shard
    )


def output_ranges(sizes: Sequence[int], whole: int, shape: LayerShape) -> tuple[FeatureRange, ...]:
    """Return the outputs that this rank holds of a module with ``whole`` outputs that fills partitions of these sizes.

    A partition alone may be the same on several ranks, as key and value heads are where there are fewer of them than
    ranks. Raises ShapeError where the sizes do not fit.
    """
    if len(sizes) == 1:
        return (_share(whole, sizes[0], shape),)
    if sum(sizes) * shape.world != whole:
        raise ShapeError(
            "the module has another size than the layer of the model", expected=sum(sizes) * shape.world, got=whole
        )
    ranges, start = [], 0
    for size in sizes:
        share = _share(size * shape.world, size, shape)
        ranges.append(FeatureRange(start + share.start, start + share.stop))
        start += size * shape.world
    return join_ranges(ranges)


def true_sizes(spec: ModuleSpec | Projection, in_features: int, out_features: int) -> TrueSizes:
    """Return the sizes that the model gives a module, after comparing them with those of the checkpoint.

    Where the checkpoint knows padded sizes only, it is the model that knows the true ones. Raises ShapeError.
    """
    wanted, stated = (out_features, in_features), (spec.out_features, spec.in_features)
    if spec.size_source == "padded":
        padded_sizes = padded(out_features, spec.rotation.out), padded(in_features, spec.rotation.in_)
        fits = padded_sizes == stated
    else:
        fits = wanted == stated
    if not fits:
        raise ShapeError("the module has another size than the layer of the model", expected=wanted, got=stated)
    return TrueSizes(in_features, out_features)


def _deal(modules: Mapping[str, ModuleSpec | None], shape: LayerShape) -> list[tuple[int, ...]]:
    """Return which partitions each module fills; some models have one module for several of them."""
    count = len(shape.rank_outputs)
    if len(modules) == count:
        return [(place,) for place in range(count)]
    dealt: list[tuple[int, ...]] = []
    left = list(range(count))
    for place, spec in enumerate(modules.values()):
        later = len(modules) - place - 1
        taken = [left.pop(0)] if left else []
        # At the last module, all; before, as many as its size says.
        while left and (later == 0 or (spec is not None and _padded_whole(taken, spec, shape) < spec.out_features)):
            taken.append(left.pop(0))
        dealt.append(tuple(taken))
    if left or not all(dealt):
        raise ShapeError("the layer has other parts than the checkpoint", expected=count, got=list(modules))
    return dealt


def _padded_whole(partitions: Sequence[int], spec: ModuleSpec, shape: LayerShape) -> int:
    whole = sum(shape.rank_outputs[place] for place in partitions) * shape.world
    return whole if spec.size_source == "exact" else padded(whole, spec.rotation.out)


def _part(name: str, spec: ModuleSpec | None, partitions: tuple[int, ...], shape: LayerShape) -> LayerPart:
    sizes = tuple(shape.rank_outputs[place] for place in partitions)
    if spec is None:
        return LayerPart(name, partitions, sizes)
    whole = spec.out_features if spec.size_source == "exact" else _unpadded_size(sizes, spec, shape)
    true, rotation = true_sizes(spec, shape.inputs, whole), (spec.rotation.in_, spec.rotation.out)
    sliced = slice_module(true, rotation, shape.input_range(), output_ranges(sizes, whole, shape))
    return LayerPart(name, partitions, sizes, get_codebook(spec.codebook), sliced, slice_module(true, rotation))


def _unpadded_size(sizes: Sequence[int], spec: ModuleSpec, shape: LayerShape) -> int:
    """Return the whole size of a module stored at its padded size: as few shares of a rank as fill that when padded."""
    share = sum(sizes)
    shares = (number for number in range(1, shape.world + 1) if shape.world % number == 0)
    fitting = (share * number for number in shares if padded(share * number, spec.rotation.out) == spec.out_features)
    return next(fitting, share * shape.world)


def _share(whole: int, part: int, shape: LayerShape) -> FeatureRange:
    """Return this rank's features when ranks hold ``part`` of ``whole`` each, some of them perhaps the same."""
    if part < 1 or whole % part:
        raise ShapeError("the module has another size than the layer of the model", expected=part, got=whole)
    shares = whole // part
    if shares > shape.world or shape.world % shares:
        raise ShapeError("the module has another size than the layer of the model", expected=part, got=whole)
    return equal_share(whole, shape.rank * shares // shape.world, shares)
