# mypy: allow-untyped-defs
"""Memory by address, for the numba loops: what numba itself has no words for.

Addresses are int64. `sample` is any scalar of the type of the elements; only its type counts, so that one
source serves all widths.
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
    "at",
    "column",
    "differing",
    "high_product",
    "lowest",
    "move",
    "move_down",
    "ones",
    "stack",
    "word",
]

BLOCK: Final = 64
"""Bytes that `differing` compares: two AVX2 registers or one of AVX-512, and at most 64 elements, one bit
each.
"""

SOME: Final = 512
"""Elements that are worked on together: what they need fits into `stack`, and their cache lines into the
first cache.
"""


@intrinsic
def at(_typing: Any, address: Any, sample: Any) -> Any:
    """Return a pointer to elements of the type of `sample`, which are read and written with
    `pointer[index]`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(sample)(types.int64, sample), generate


@intrinsic
def column(_typing: Any, table: Any, number: Any) -> Any:
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
def lowest(_typing: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a mask that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def ones(_typing: Any, mask: Any) -> Any:
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
def stack(_typing: Any) -> Any:
    """Return the address of 16 KiB that are this call's own until it returns; the same at every use in one
    function.
    """

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), 2048))
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), generate
