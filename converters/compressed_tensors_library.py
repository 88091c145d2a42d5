"""The compressed-tensors package as a second decoder, module by module, where it is right and is installed.

Its whole-checkpoint dequantizer is never called: it takes the first group that matches, which decodes modules of other
groups to garbage. Releases up to 0.17.1 know only the word-aligned layout of 3, 5, 6 and 7 bits, later ones only the
dense one, and from 0.19 on columns that were ordered by activation cannot be decoded at all.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from espalier_format.converters.compressed_tensors_packing import WORD_BITS, layout_of_release

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef

PACKAGE: Final = "compressed-tensors"
_BLOCK_WEIGHTS: Final = 1 << 22
_LEAST_ROWS: Final = 64


def installed_version() -> str | None:
    """Return the release of compressed-tensors that is installed, without importing it; None if there is none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def is_right(module: PackedModule, release: str) -> bool:
    """Tell whether that release of the package decodes a module right."""
    if module.g_idx is not None or _has_unpacked_zero_points(module):
        return False
    odd = module.packing is not None and WORD_BITS % module.scheme.bits != 0
    return not odd or layout_of_release(release) is module.packing


def _has_unpacked_zero_points(module: PackedModule) -> bool:
    """Tell whether zero points of groups or rows lie unpacked beside packed weights, as early releases wrote them."""
    unpacked = module.zero_point is not None and module.zero_packing is None
    return unpacked and module.packing is not None and module.scheme.strategy != "tensor"


def compare(module: PackedModule) -> bool:
    """Decode a module with the package, in blocks of rows, and tell whether it gives what `PackedModule.rows` gives.

    Raises whatever the package raises.
    """
    return all(
        np.array_equal(_bits(_decompressed(module, start, stop)), _bits_of(module, start, stop))
        for start, stop in _blocks(module)
    )


def _blocks(module: PackedModule) -> Iterator[tuple[int, int]]:
    # Zero points are packed along the rows: a block begins where a word of them does, and has more than one of them,
    # which 0.20.1 cannot unpack.
    each = 1 if module.zero_packing is None else module.zero_packing.period(module.scheme.bits)[0]
    step = max(_LEAST_ROWS, _BLOCK_WEIGHTS // module.in_features) // each * each
    start = 0
    while start < module.out_features:
        stop = start + step
        if module.out_features - stop < _LEAST_ROWS:
            stop = module.out_features
        yield start, stop
        start = stop


def _decompressed(module: PackedModule, start: int, stop: int) -> torch.Tensor:
    import torch  # noqa: PLC0415 - an optional dependency
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415 - as above
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: PLC0415

    stated = module.scheme
    arguments = QuantizationArgs(
        num_bits=stated.bits,
        symmetric=stated.symmetric,
        strategy=stated.strategy,
        group_size=stated.group_size or None,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    rows = slice(start, stop)
    whole = slice(None)
    state = {"weight_scale": _tensor(module.scale, whole if stated.strategy == "tensor" else rows)}
    if module.packing is None:
        label = "naive-quantized"
        state["weight"] = _tensor(module.weight, rows)
    else:
        label = "pack-quantized"
        state["weight_packed"] = _tensor(module.weight, rows)
        state["weight_shape"] = torch.tensor([stop - start, module.in_features])
    if module.zero_point is not None:
        state["weight_zero_point"] = _tensor(module.zero_point, _zero_rows(module, start, stop))
    decoded: torch.Tensor = BaseCompressor.get_value_from_registry(label).decompress(state, scheme)["weight"]
    return decoded


def _zero_rows(module: PackedModule, start: int, stop: int) -> slice:
    if module.zero_packing is None:
        return slice(None) if module.scheme.strategy == "tensor" else slice(start, stop)
    each, period = module.zero_packing.period(module.scheme.bits)
    first = start // each * period
    return slice(first, first + module.zero_packing.words(module.scheme.bits, stop - start))


def _tensor(stored: TensorRef, rows: slice) -> torch.Tensor:
    import torch  # noqa: PLC0415 - an optional dependency

    values = np.array(stored.view()[rows])  # a copy, for torch takes no read-only memory
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if stored.dtype == "BF16" else tensor


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import torch  # noqa: PLC0415 - an optional dependency

    bits: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return bits


def _bits_of(module: PackedModule, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(module.rows(start, stop).tobytes(), np.uint8)
