"""Read compressed-tensors weights: packed integers times scales, exactly as compressed-tensors itself decodes them.

The unpacking is our own, in numpy: it needs no torch, reads any rows of a matrix in bounded memory, and knows both
layouts of 3, 5, 6 and 7 bits, of which every release of the package knows one and decodes the other to garbage. Tests
compare it with the package bit for bit. `compressed_tensors_modules` finds the modules and checks their shapes,
`compressed_tensors_schemes` reads the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from espalier_format.codec.casting import FLOAT_DTYPES, cast_floats
from espalier_format.converters.compressed_tensors_packing import WORD_BITS
from espalier_format.errors import NonFiniteScaleError, ScaleOverflowError, ShapeError
from espalier_format.kernels.ordered_map import in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.converters.compressed_tensors_packing import Packing

_BLOCK_WEIGHTS: Final = 1 << 18


def decode_rows(module: PackedModule, start: int, stop: int, *, threads: int = 1) -> NDArray[Any]:
    """Decode rows [start, stop) of a module; see `PackedModule.rows`."""
    check_shape(module)
    groups = _groups(module)
    result = np.empty((stop - start, module.in_features), FLOAT_DTYPES[module.dtype])
    # A few rows at a time: what lies in between is several times as large as the result, and is to fit into caches.
    step = max(1, _BLOCK_WEIGHTS // module.in_features)

    def work(first: int) -> NDArray[Any]:
        return _block(module, groups, first, min(first + step, stop))

    first = 0
    for rows in in_order(work, range(start, stop, step), threads):
        result[first : first + len(rows)] = rows
        first += len(rows)
    return result


def _block(module: PackedModule, groups: NDArray[Any] | None, start: int, stop: int) -> NDArray[Any]:
    codes = _codes(module, start, stop)
    scale = _scales(module, start, stop)
    zero = _zero_points(module, start, stop)
    # Codes and zero points have at most 9 bits together, scales 8, 11 or 24: in float32, or in float64 for scales of
    # that dtype, only the last product of all is rounded, and a BF16 or F16 product is exact before it is.
    wide = np.dtype("<f8") if module.dtype == "F64" else np.dtype("<f4")
    if groups is not None:
        scale = scale[:, groups]
        zero = None if zero is None else zero[:, groups]
    elif module.scheme.strategy == "group":
        codes = codes.reshape(stop - start, -1, module.scheme.group_size)
        scale = scale[:, :, np.newaxis]
        zero = None if zero is None else zero[:, :, np.newaxis]
    if zero is not None:
        codes = codes - zero
    with np.errstate(over="ignore"):
        product = codes.astype(wide) * scale
    product = product.reshape(stop - start, module.in_features)
    if not np.isfinite(product).all():
        raise ScaleOverflowError(
            f"a value is too large for {module.dtype}", path=module.scale.shard.path, tensor=module.name
        )
    try:
        return cast_floats(product, "F64" if module.dtype == "F64" else "F32", module.dtype, name=module.name)
    except ScaleOverflowError as error:
        raise ScaleOverflowError(
            error.message, path=module.scale.shard.path, tensor=module.name, got=error.got
        ) from error


def check_values(module: PackedModule) -> None:
    """Check what can be told from the small tensors of a module without decoding it.

    Raises:
        ShapeError: ``weight_shape`` states other sizes than the tensors have, or ``weight_g_idx`` a group that there
            is not.
        NonFiniteScaleError: a scale is infinite or NaN.
    """
    check_shape(module)
    _groups(module)
    _scales(module, 0, module.out_features)


def check_shape(module: PackedModule) -> None:
    """Raise ShapeError where ``weight_shape`` states other sizes than the other tensors have."""
    if module.shape is None:
        return
    stated = [int(size) for size in np.frombuffer(module.shape.data(), "<i4" if module.shape.dtype == "I32" else "<i8")]
    if stated != [module.out_features, module.in_features]:
        raise ShapeError(
            "weight_shape does not fit the other tensors",
            path=module.shape.shard.path,
            tensor=module.shape.name,
            expected=[module.out_features, module.in_features],
            got=stated,
        )


def unpack_codes(words: NDArray[Any], bits: int, codes: int, packing: Packing) -> NDArray[np.int16]:
    """Return the signed codes of each row: stored code - 2^(bits-1), int16 of shape (rows, ``codes``).

    ``words`` are 32-bit words of shape (rows, ``packing.words(bits, codes)``). Bits after the last code are ignored.
    """
    rows, width = words.shape
    each, period = packing.period(bits)
    periods = -(-codes // each)
    stream = np.ascontiguousarray(words).view("<u4")
    if periods * period != width:
        padded = np.zeros((rows, periods * period), "<u4")
        padded[:, :width] = stream
        stream = padded
    stream = stream.reshape(rows, periods, period)
    mask = np.uint32((1 << bits) - 1)
    found = np.empty((rows, periods, each), np.int16)
    for position in range(each):
        word, shift = divmod(position * bits, WORD_BITS)
        code = stream[:, :, word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            code = code | (stream[:, :, word + 1] << np.uint32(WORD_BITS - shift))
        found[:, :, position] = code & mask
    found -= np.int16(1 << (bits - 1))
    return found.reshape(rows, periods * each)[:, :codes]


def _codes(module: PackedModule, start: int, stop: int) -> NDArray[Any]:
    stored = _rows(module.weight, start, stop)
    if module.packing is None:
        return stored.view("i1").astype(np.int16)
    return unpack_codes(stored, module.scheme.bits, module.in_features, module.packing)


def _rows(tensor: TensorRef, start: int, stop: int) -> NDArray[Any]:
    """Read rows of a matrix of 32-bit words or bytes."""
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    item = tensor.nbytes // max(1, tensor.shape[0] * width)
    begin = tensor.info.start + start * width * item
    data = b"".join(tensor.shard.chunks(begin, begin + (stop - start) * width * item))
    return np.frombuffer(data, "<u4" if item == 4 else "u1").reshape(stop - start, width)


def _scales(module: PackedModule, start: int, stop: int) -> NDArray[Any]:
    """Return the scales of some rows, float32 or float64, of a shape that spreads over (rows, groups)."""
    tensor = module.scale
    item = FLOAT_DTYPES[tensor.dtype]
    if module.scheme.strategy == "tensor":
        values = np.frombuffer(bytes(tensor.data()), item).reshape(1, 1)
    else:
        groups = tensor.shape[1]
        data = bytes(tensor.data()[start * groups * item.itemsize : stop * groups * item.itemsize])
        values = np.frombuffer(data, item).reshape(stop - start, groups)
    single = cast_floats(values, tensor.dtype, "F64" if tensor.dtype == "F64" else "F32", name=tensor.name)
    finite = np.isfinite(single)
    if not finite.all():
        bad = single[~finite].flat[0]
        raise NonFiniteScaleError(f"a scale is {bad}", path=tensor.shard.path, tensor=tensor.name)
    return single


def _zero_points(module: PackedModule, start: int, stop: int) -> NDArray[Any] | None:
    """Return the zero points of some rows, int16, of the same shape as their scales."""
    tensor = module.zero_point
    if tensor is None:
        return None
    if module.zero_packing is None:
        if module.scheme.strategy == "tensor":
            return np.frombuffer(bytes(tensor.data()), "i1").astype(np.int16).reshape(1, 1)
        width = tensor.shape[1]
        stored = np.frombuffer(bytes(tensor.data()[start * width : stop * width]), "i1")
        return stored.astype(np.int16).reshape(stop - start, width)
    # Packed along the outputs: each column is a stream, and whole periods of it are read.
    bits = module.scheme.bits
    each, period = module.zero_packing.period(bits)
    first = start // each
    last = min(-(-stop // each) * period, tensor.shape[0])
    row = 4 * tensor.shape[1]
    words = np.frombuffer(bytes(tensor.data()[first * period * row : last * row]), "<u4").reshape(-1, tensor.shape[1])
    columns = unpack_codes(words.T, bits, stop - first * each, module.zero_packing).T
    return columns[start - first * each :]


def _groups(module: PackedModule) -> NDArray[Any] | None:
    """Return the group of each input where that is not simply its place."""
    tensor = module.g_idx
    if tensor is None:
        return None
    groups = np.frombuffer(bytes(tensor.data()), "<i4")
    if (groups == -1).all():  # never set: columns were not reordered
        return np.arange(groups.size, dtype="<i4") // module.scheme.group_size
    count = module.scale.shape[1]
    if ((groups < 0) | (groups >= count)).any():
        bad = int(groups[(groups < 0) | (groups >= count)][0])
        raise ShapeError(
            "weight_g_idx names a group that there is not",
            path=tensor.shard.path,
            tensor=tensor.name,
            expected=f"0 to {count - 1}",
            got=bad,
        )
    return groups
