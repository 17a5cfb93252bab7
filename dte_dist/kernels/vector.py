"""Operations of the codec loops on 64 elements at once, and on single bit patterns: intrinsics that
numba cannot be told in Python.

LLVM makes of each what the processor has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["add_planes", "at_distance", "at_least", "bit_length", "distance", "plane", "to_distances"]

_BITS, _INT, _BYTE = (
    ir.VectorType(ir.IntType(1), 64),
    ir.VectorType(ir.IntType(32), 64),
    ir.VectorType(ir.IntType(8), 64),
)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector of 64 equal elements."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    )


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def at_least(_typing: Any, address: Any, bound: Any) -> Any:
    """Return a mask of which of 64 uint32 are at least `bound`, the first in the lowest bit."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(builder, args[0], _INT), align=4)
        bound = _splat(builder, builder.trunc(args[1], ir.IntType(32)), _INT)
        return builder.bitcast(builder.icmp_unsigned(">=", loaded, bound), ir.IntType(64))

    return types.uint64(types.int64, types.int64), generate


@intrinsic
def plane(_typing: Any, address: Any, bit: Any) -> Any:
    """Return bit number `bit` of each of 64 int32, as a word."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(builder, args[0], _INT), align=4)
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
        into = _pointer(builder, args[0], _INT)
        builder.store(builder.or_(builder.load(into, align=4), wide), into, align=4)

    return types.void(types.int64, types.int64, types.UniTuple(types.uint64, 7)), generate


@intrinsic
def to_distances(_typing: Any, address: Any, negative: Any) -> Any:
    """Turn 64 magnitudes, counted from 0 on, into distances: m + 1, or -(m + 1) where a bit of `negative` is
    set.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        into = _pointer(builder, args[0], _INT)
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
def distance(_typing: Any, bits: Any, known: Any) -> Any:
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
