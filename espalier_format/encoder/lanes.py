"""Explicit vectors for numba kernels: a handful of integers that one instruction works on.

Numba compiles plain loops, and LLVM vectorises them as it sees fit: for a Viterbi step it widens 16-bit metrics and
spreads them with gathers, several times slower than the processor can. These functions say what is meant in LLVM's own
vector operations, without naming an instruction set: LLVM makes AVX-512, AVX2, SSE or NEON of them.

A `Lanes` value holds 64 bytes of unsigned integers: 32 of 16 bits or 16 of 32 bits, like the array it was loaded from.
The functions may only be called in compiled code. Each describes itself to numba as numba's intrinsics do: the types of
its arguments come in, the type of its result and a function that emits LLVM go out. Importing this imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES_BYTES: Final = 64
"""Size of a vector: `load` and `store` are fastest at addresses that are a multiple of it."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_intrinsic: Final[_Decorator] = intrinsic
_intrinsic_of_literals: Final[_Decorator] = intrinsic(prefer_literal=True)
_represents: Final[Callable[[type], Callable[[type], type]]] = register_model


class Lanes(types.Type):  # type: ignore[misc] # numba is not typed
    """The numba type of a vector of unsigned integers of ``bits`` bits."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.count = 8 * LANES_BYTES // bits
        super().__init__(name=f"Lanes({bits})")

    def llvm(self, bits: int | None = None) -> Any:
        """Return the LLVM vector type of as many integers, of the same or another size."""
        return ir.VectorType(ir.IntType(bits or self.bits), self.count)


@_represents(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc] # the same
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.llvm())


@_intrinsic
def load(_: Any, array: Any, index: Any) -> Any:  # noqa: ARG001 - numba wants to know of every argument
    """Load the lanes at ``array[index:]`` of a C-contiguous one-dimensional array of unsigned integers."""
    lanes = Lanes(array.dtype.bitwidth)

    def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer = _address(context, builder, array, arguments, lanes.llvm())
        return builder.load(pointer, align=lanes.bits // 8)

    return lanes(array, types.intp), emit


@_intrinsic_of_literals
def load_repeated(_: Any, array: Any, index: Any, times: Any) -> Any:  # noqa: ARG001 - as above
    """Load the elements at ``array[index:]``, each ``times`` times, as many as it takes to fill the lanes.

    ``times`` is a literal power of two; from the number of lanes on, all lanes hold one element.
    """
    lanes = Lanes(array.dtype.bitwidth)
    repeats = min(times.literal_value, lanes.count)
    few = ir.VectorType(ir.IntType(lanes.bits), lanes.count // repeats)

    def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer = _address(context, builder, array, arguments[:2], few)
        elements = builder.load(pointer, align=lanes.bits // 8)
        order = _constant([lane // repeats for lane in range(lanes.count)])
        return builder.shuffle_vector(elements, elements, order)

    return lanes(array, types.intp, times), emit


@_intrinsic
def store(_: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001 - as above
    """Store the lanes at ``array[index:]``, each cut to the low bits that an element of the array holds."""
    bits = array.dtype.bitwidth
    cut = value.llvm(bits)

    def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        stored = arguments[2] if bits == value.bits else builder.trunc(arguments[2], cut)
        builder.store(stored, _address(context, builder, array, arguments[:2], cut), align=bits // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), emit


@_intrinsic
def fill(_: Any, like: Any, number: Any) -> Any:
    """Return lanes of the type of ``like`` that all hold ``number``, negative ones in two's complement."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalar = context.cast(builder, arguments[1], signature.args[1], _integer(like))
        first = builder.insert_element(ir.Constant(like.llvm(), ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, first, _constant([0] * like.count))

    return like(like, number), emit


@_intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """Return a + b modulo the size of a lane."""
    return a(a, b), lambda _, builder, __, arguments: builder.add(*arguments)


@_intrinsic
def subtract(_: Any, a: Any, b: Any) -> Any:
    """Return a - b modulo the size of a lane."""
    return a(a, b), lambda _, builder, __, arguments: builder.sub(*arguments)


@_intrinsic
def shift_left(_: Any, a: Any, b: Any) -> Any:
    """Return a shifted left by b bits."""
    return a(a, b), lambda _, builder, __, arguments: builder.shl(*arguments)


@_intrinsic
def square(_: Any, a: Any) -> Any:
    """Return the squares of lanes of 32 bits, modulo 2^32, or the high halves of the squares of lanes of 16 bits."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        if a.bits == 32:
            return builder.mul(arguments[0], arguments[0])
        wide = builder.zext(arguments[0], a.llvm(32))
        return builder.trunc(builder.lshr(builder.mul(wide, wide), _constant([16] * a.count)), a.llvm())

    return a(a), emit


@_intrinsic
def absolute(_: Any, a: Any) -> Any:
    """Return the absolute values of lanes that are read as signed."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _call(builder, a, "abs", [arguments[0], ir.Constant(ir.IntType(1), 0)], a.llvm())

    return a(a), emit


@_intrinsic
def minimum(_: Any, a: Any, b: Any) -> Any:
    """Return the smaller of each two lanes."""
    return a(a, b), lambda _, builder, __, arguments: _call(builder, a, "umin", arguments, a.llvm())


@_intrinsic
def smallest(_: Any, a: Any) -> Any:
    """Return the smallest lane, as a number."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _call(builder, a, "vector.reduce.umin", arguments, ir.IntType(a.bits))

    return _integer(a)(a), emit


@_intrinsic
def where_less(_: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Return, lane by lane, ``yes`` where a < b and else ``no``."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.select(builder.icmp_unsigned("<", *arguments[:2]), *arguments[2:])

    return yes(a, b, yes, no), emit


def _integer(lanes: Lanes) -> Any:
    """Return the numba type of one lane."""
    return types.Integer.from_bitwidth(lanes.bits, signed=False)


def _constant(values: list[int]) -> Any:
    """Return an LLVM vector of 32-bit constants."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), values)


def _call(builder: Any, lanes: Lanes, name: str, arguments: Any, result: Any) -> Any:
    """Emit a call of the LLVM intrinsic ``name`` for these lanes."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    full_name = f"llvm.{name}.v{lanes.count}i{lanes.bits}"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, full_name), arguments)


def _address(context: Any, builder: Any, array_type: Any, array_and_index: Any, element: Any) -> Any:
    """Emit the address of an element of an array, as a pointer to ``element``."""
    array, index = array_and_index
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())
