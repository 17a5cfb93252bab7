# mypy: allow-untyped-defs
"""LLVM for the numba loops: memory by address, and operations on 64 elements at once, which numba cannot be
told in Python.

Addresses are int64. `sample` is any scalar of the type of the elements; only its type counts, so that one
source serves all widths. LLVM makes of each operation what the processor has.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "BLOCK",
    "SOME",
    "add_planes",
    "at_distance",
    "at_least",
    "bit_length",
    "count_trailing_zeros",
    "differing",
    "distance_between",
    "high_product",
    "move",
    "move_down",
    "plane_of",
    "pointer",
    "popcount",
    "scratch",
    "signed_magnitudes",
    "table_column",
    "word",
]

BLOCK: Final = 64
"""Bytes that `differing` compares: two AVX2 registers or one of AVX-512, and at most 64 elements, one bit
each.
"""

SOME: Final = 512
"""Elements that are worked on together: what they need fits into `scratch`, and their cache lines into the
first cache.
"""

_BITS, _INT, _BYTE = (
    ir.VectorType(ir.IntType(1), 64),
    ir.VectorType(ir.IntType(32), 64),
    ir.VectorType(ir.IntType(8), 64),
)


@intrinsic
def pointer(_typing: Any, address: Any, sample: Any) -> Any:
    """Return a pointer to elements of the type of `sample`, which are read and written with
    `pointer[index]`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(sample)(types.int64, sample), generate


@intrinsic
def table_column(_typing: Any, table: Any, number: Any) -> Any:
    """Return a pointer to int64 whose address stands at place `number` of a table of addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        at_number = builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return builder.load(at_number)

    return types.CPointer(types.int64)(types.int64, types.int64), generate


@intrinsic
def differing(_typing: Any, left: Any, right: Any, sample: Any) -> Any:
    """Return a mask of which elements of two blocks of 64 bytes differ, the first in the lowest bit; no
    alignment is needed.
    """
    lanes = BLOCK * 8 // sample.bitwidth

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        block = ir.VectorType(ir.IntType(sample.bitwidth), lanes).as_pointer()
        loaded = [builder.load(builder.inttoptr(address, block), align=1) for address in args[:2]]
        mask = builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(lanes))
        return mask if lanes == 64 else builder.zext(mask, ir.IntType(64))

    return types.uint64(types.int64, types.int64, sample), generate


@intrinsic
def count_trailing_zeros(_typing: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a mask that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def popcount(_typing: Any, mask: Any) -> Any:
    """Return how many bits of a mask are set."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def high_product(_typing: Any, left: Any, right: Any) -> Any:
    """Return the upper 64 of the 128 bits of a product."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def word(_typing: Any, address: Any) -> Any:
    """Read a little-endian uint64 from any address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def move(_typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes between addresses; they must not overlap."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        into, out_of = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, into, out_of, args[2], 1)

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def move_down(_typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes between addresses that may overlap."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        into, out_of = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memmove(builder, into, out_of, args[2], 1)

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def scratch(_typing: Any) -> Any:
    """Return the address of 16 KiB that are this call's own until it returns; the same at every use in one
    function.
    """

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), 2048))
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), generate


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector of 64 equal elements."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    )


def _vector_at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def at_least(_typing: Any, address: Any, bound: Any) -> Any:
    """Return a mask of which of 64 uint32 are at least `bound`, the first in the lowest bit."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(_vector_at(builder, args[0], _INT), align=4)
        bound = _splat(builder, builder.trunc(args[1], ir.IntType(32)), _INT)
        return builder.bitcast(builder.icmp_unsigned(">=", loaded, bound), ir.IntType(64))

    return types.uint64(types.int64, types.int64), generate


@intrinsic
def plane_of(_typing: Any, address: Any, bit: Any) -> Any:
    """Return bit number `bit` of each of 64 int32, as a word."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(_vector_at(builder, args[0], _INT), align=4)
        up = builder.sub(ir.Constant(ir.IntType(32), 31), builder.trunc(args[1], ir.IntType(32)))
        top = builder.shl(loaded, _splat(builder, up, _INT))
        return builder.bitcast(builder.icmp_signed("<", top, ir.Constant(_INT, [0] * 64)), ir.IntType(64))

    return types.uint64(types.int64, types.int64), generate


@intrinsic
def add_planes(_typing: Any, address: Any, shift: Any, planes: Any) -> Any:
    """OR seven planes of bits, shifted left, into 64 int32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        none, total = ir.Constant(_BYTE, [0] * 64), ir.Constant(_BYTE, [0] * 64)
        for bit, word in enumerate(cgutils.unpack_tuple(builder, args[2])):
            total = builder.or_(
                total, builder.select(builder.bitcast(word, _BITS), ir.Constant(_BYTE, [1 << bit] * 64), none)
            )
        wide = builder.shl(
            builder.zext(total, _INT), _splat(builder, builder.trunc(args[1], ir.IntType(32)), _INT)
        )
        into = _vector_at(builder, args[0], _INT)
        builder.store(builder.or_(builder.load(into, align=4), wide), into, align=4)

    return types.void(types.int64, types.int64, types.UniTuple(types.uint64, 7)), generate


@intrinsic
def signed_magnitudes(_typing: Any, address: Any, negative: Any) -> Any:
    """Turn 64 magnitudes, counted from 0 on, into distances: m + 1, or -(m + 1) where a bit of `negative` is
    set.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        into = _vector_at(builder, args[0], _INT)
        inverse = builder.not_(builder.load(into, align=4))
        mask = builder.bitcast(args[1], _BITS)
        builder.store(builder.select(mask, inverse, builder.neg(inverse)), into, align=4)

    return types.void(types.int64, types.uint64), generate


@intrinsic
def bit_length(_typing: Any, word: Any) -> Any:
    """Return the number of bits of a uint32: 0 for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.zext(builder.sub(ir.Constant(ir.IntType(32), 32), zeros), ir.IntType(64))

    return types.int64(types.uint32), generate


def _in_order(builder: Any, bits: Any) -> Any:
    """Return where a bit pattern is in the order, or the reverse: b ^ ((b >> (w - 1)) & most), which is its
    own inverse.
    """
    kind = bits.type
    sign = builder.ashr(bits, ir.Constant(kind, kind.width - 1))
    return builder.xor(bits, builder.and_(sign, ir.Constant(kind, (1 << (kind.width - 1)) - 1)))


@intrinsic
def distance_between(_typing: Any, bits: Any, known: Any) -> Any:
    """Return how far a bit pattern is from a known one, modulo the range of their type, as int32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        away = builder.sub(_in_order(builder, args[0]), _in_order(builder, args[1]))
        return away if bits.bitwidth == 32 else builder.sext(away, ir.IntType(32))

    return types.int32(bits, known), generate


@intrinsic
def at_distance(_typing: Any, bits: Any, distance: Any) -> Any:
    """Return the bit pattern that is so far from another one."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _in_order(builder, builder.add(_in_order(builder, args[0]), args[1]))

    return bits(bits, distance), generate
