"""One quantized linear module of an open checkpoint, whichever format it is stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.codec.rotation import padded
from espalier_format.errors import NonFiniteScaleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.codec.codebook import Codebook
    from espalier_format.container.header import TensorInfo
    from espalier_format.container.shard import Shard


class Blocks(NamedTuple):
    """Hadamard block size of the input and output side; 0 where the side is not rotated."""

    in_: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule:
    """A quantized linear module: its sizes and where its tensors lie; nothing is read before ``scales``.

    ``in_features`` and ``out_features`` are the true sizes where ``size_source`` is "exact", the stored
    ones where it is "padded"; ``size_how`` says in a phrase how they are known ("" for an Espalier
    checkpoint, whose config states them). ``trellis``, ``suh``, ``svh`` are I16, F16, F16; with
    ``packed_su`` or ``packed_sv`` the scale is EXL3's legacy form instead, I16 packed signs. ``marker``
    is EXL3's codebook marker.
    """

    name: str
    codebook: Codebook
    in_features: int
    out_features: int
    rotation: Blocks
    size_source: Literal["exact", "padded"]
    trellis: TensorRef
    suh: TensorRef
    svh: TensorRef
    bias: TensorRef | None = None
    marker: TensorRef | None = None
    packed_su: bool = False
    packed_sv: bool = False
    size_how: str = ""

    @property
    def component(self) -> Component:
        """Part of the model that the module belongs to."""
        return component_of(self.name)

    @property
    def padded_in(self) -> int:
        """Stored input size: ``in_features`` rounded up to the input block, or to 16."""
        return padded(self.in_features, self.rotation.in_)

    @property
    def padded_out(self) -> int:
        """Stored output size: ``out_features`` rounded up to the output block, or to 16."""
        return padded(self.out_features, self.rotation.out)

    @property
    def weights(self) -> int:
        """Number of weights, without padding."""
        return self.in_features * self.out_features

    @property
    def trellis_bytes(self) -> int:
        """Bytes of the packed codes."""
        return self.trellis.nbytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of both scale vectors as stored."""
        return self.suh.nbytes + self.svh.nbytes

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All stored tensors of the module, bias and marker included."""
        stored = (self.suh, self.svh, self.bias, self.marker, self.trellis)
        return tuple(tensor for tensor in stored if tensor is not None)

    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (suh, svh) as float16 arrays of the padded sizes; legacy signs are expanded to ±1.

        Raises:
            NonFiniteScaleError: a scale is infinite or NaN.
        """
        return _scale(self.suh, packed=self.packed_su), _scale(self.svh, packed=self.packed_sv)


def _scale(stored: TensorRef, *, packed: bool) -> np.ndarray:
    import numpy as np  # noqa: PLC0415 - opening a checkpoint must not cost the import of numpy

    values = stored.array()
    if packed:
        from espalier_format.codec.signs import unpack_signs  # noqa: PLC0415 - as above

        return unpack_signs(values)
    finite = np.isfinite(values)
    if not finite.all():
        position = int(np.argmin(finite))
        raise NonFiniteScaleError(
            f"scale {position} of {values.size} is {values[position]}", path=stored.shard.path, tensor=stored.name
        )
    return values


def expect_scales(modules: Iterable[QuantizedModule]) -> None:
    """Ask the disk for the scales of all modules, which lie scattered over the shards, before they are read in turn."""
    scales: dict[Shard, list[TensorInfo]] = {}
    for module in modules:
        for scale in (module.suh, module.svh):
            scales.setdefault(scale.shard, []).append(scale.info)
    for shard, infos in scales.items():
        shard.expect(infos)
