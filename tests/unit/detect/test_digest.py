"""Unit tier, no ranks: digests of tensors against plain numpy, whoever holds which part of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dte_dist import kernels
from dte_dist.detect import digest as module
from dte_dist.detect.digest import digests, own_digests
from dte_dist.kernels import Identity, cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.kernels.cpu import index_map as index_map_kernels
from dte_dist.layout import Block
from dte_dist.plan.flat_space import FlatSpace, Piece, Pieces
from dte_dist.plan.index_map import build_index_maps
from dte_dist.tensors.flat import BITS, FlatTensors
from tests.unit.geometry import SHAPES, blocks, mesh_blocks, pairs_of_spaces, whole_space
from tests.unit.kernels.test_index_map import space_of, target_of
from tests.unit.kernels.test_scan import bits_of, make_tensors, random_bits

KERNELS = [cpu, torch_kernels]
widths = pytest.mark.parametrize("width", [1, 2, 4, 8])
some = settings(max_examples=60, deadline=None)


@pytest.fixture(params=KERNELS, ids=["cpu", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Digest with the kernels of either kind of device, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: request.param)
        yield request.param


def reference(bits: np.ndarray, places: Any = None) -> int:
    """Digest elements as docs/protocol.md hashes them: the n-th of a tensor is in place n, unless told
    otherwise.
    """
    words = bits.view(f"u{bits.itemsize}").astype(np.uint64)
    place = np.arange(len(words), dtype=np.uint64) if places is None else np.asarray(places, np.uint64)
    x = words + (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return int((x ^ (x >> np.uint64(33))).sum(dtype=np.uint64).astype(np.int64))


def references(tensors: list[Tensor], width: int) -> list[int]:
    return [reference(bits_of([tensor], width)) for tensor in tensors]


def added(values: list[int]) -> int:
    """Add up modulo 2^64, as int64."""
    return int(np.array(values, np.int64).sum(dtype=np.int64))


def test_the_reference_says_what_the_checksum_of_a_frame_says() -> None:
    """The hash is the one of docs/protocol.md: over words of 8 bytes, a digest and a checksum are one
    number.
    """
    frame = random_bits(1000, 8, seed=5)
    assert (
        own_digests([frame]).tolist()
        == [reference(frame.numpy())]
        == [kernels.on("cpu").checksum(frame.view(torch.uint8), -1)]
    )
    assert reference(np.array([7], np.uint8)) == 1348100354356037461, "worked out by hand"


# One rank ---------------------------------------------------------------------------------------------------


@widths
def test_own_digests_of_all_kinds_of_tensors(kernel: ModuleType, width: int) -> None:
    """Misaligned, empty, of no dimension, transposed, sliced, permuted; NaNs and negative zeros among their
    bits.
    """
    tensors = make_tensors(width)
    assert own_digests(tensors).tolist() == references(tensors, width)
    assert {tensor._version for tensor in tensors} == {0}


def test_own_digests_of_tensors_of_several_widths_in_any_order(kernel: ModuleType) -> None:
    tensors = [
        tensor
        for group in zip(*(make_tensors(width, seed=width) for width in BITS), strict=True)
        for tensor in group
    ]
    assert own_digests(tensors).tolist() == [
        digest for tensor in tensors for digest in references([tensor], tensor.element_size())
    ]
    assert own_digests([]).tolist() == []


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (7,), (3, 5)], ids=str)
def test_a_digest_says_the_bits_whatever_the_dtype(
    kernel: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    bits = random_bits(prod(shape), dtype.itemsize, seed=3)
    if dtype is torch.bool:
        bits = bits & 1
    tensor = bits.view(dtype).view(shape)
    assert own_digests([tensor]).tolist() == [reference(bits.numpy())]
    if len(shape) > 1:
        assert own_digests([tensor.t()]).tolist() == [
            reference(tensor.t().contiguous().view(-1).view(BITS[dtype.itemsize]).numpy())
        ]


def test_an_inference_tensor_and_one_that_requires_grad(kernel: ModuleType) -> None:
    with torch.inference_mode():
        frozen = torch.arange(40.0).view(5, 8)
    trained = torch.nn.Parameter(torch.arange(40.0).view(5, 8))
    one, other, strided = own_digests([frozen, trained, frozen.t()])
    assert one == other != strided
    assert trained._version == 0


FLIPS = [(0, 0), (0, -1), (17, 3), (-1, 0), (-1, -1)]


@widths
@pytest.mark.parametrize(("place", "bit"), FLIPS)
def test_any_single_bit_changes_it(kernel: ModuleType, width: int, place: int, bit: int) -> None:
    bits = random_bits(50, width, seed=8)
    (before,) = own_digests([bits])
    bits[place] ^= torch.tensor(1 << (bit % (8 * width)), dtype=torch.uint64).view(torch.int64).to(bits.dtype)
    assert own_digests([bits]).tolist() == [reference(bits.numpy())] != [before]


def swap(tensor: Tensor) -> None:
    tensor.view(-1)[[3, 90]] = tensor.view(-1)[[90, 3]]


def put(tensor: Tensor, place: int, bits: int) -> None:
    tensor.view(torch.int64).view(-1)[place] = bits


CHANGES = {
    "two elements change places": swap,
    "two signs flip": lambda tensor: tensor.view(-1)[3:91:87].neg_(),
    "all signs flip": lambda tensor: tensor.neg_(),
    "rows move": lambda tensor: tensor.copy_(tensor.roll(1, 0)),
    "columns move": lambda tensor: tensor.copy_(tensor.roll(1, 1)),
    "it is transposed": lambda tensor: tensor.copy_(tensor.t().clone()),
    "one up and one down": lambda tensor: (
        tensor.view(torch.int64).view(-1)[3:91:87].add_(torch.tensor([1, -1]))
    ),
    "a zero becomes negative": lambda tensor: put(tensor, 0, -(1 << 63)),
    "a NaN becomes another NaN": lambda tensor: put(tensor, 1, 0x7FF8000000000001),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_sums_of_floats_or_of_words_do_not_see_changes_it(kernel: ModuleType, change: Any) -> None:
    tensor = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensor.view(-1)[:2] = torch.tensor([0.0, float("nan")])
    before = own_digests([tensor])
    change(tensor)
    assert own_digests([tensor]).tolist() != before.tolist()


def test_equal_elements_in_other_tensors_or_at_other_places_differ() -> None:
    """So that two tensors that were swapped are noticed, and one that is shorter by zeros."""
    tensors = [torch.zeros(count) for count in range(5)] + [torch.ones(4)]
    assert len({*own_digests(tensors).tolist()}) == 6


@pytest.mark.slow
@widths
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_neither_chunks_nor_threads_matter(monkeypatch: pytest.MonkeyPatch, width: int, threads: int) -> None:
    tensors = [*make_tensors(width), random_bits(5000, width, seed=9)]
    expected = references(tensors, width)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for chunk in (1, 7, 100, 1 << 12):
            monkeypatch.setattr(module, "_CHUNK", chunk)
            assert own_digests(tensors).tolist() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_tensor_of_many_chunks_on_several_threads() -> None:
    """With nothing made small; the reference is taken of parts, at the places they have."""
    total = 3 * (1 << 20) + 12_345
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, total, np.uint8))
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert own_digests([bits[:1], bits[1:], bits[:0]]).tolist() == [
                reference(bits[:1].numpy()),
                reference(bits[1:].numpy()),
                0,
            ]
    finally:
        torch.set_num_threads(before)


def test_threads_that_ask_for_the_same_table_at_once_get_one_that_stays() -> None:
    """A table is made when it is first asked for, by whichever thread that is; the loops go on with its
    address.
    """
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            for _ in range(200):
                identity = Identity(64)
                assert (
                    len({*pool.map(lambda _, table=identity: index_map_kernels.tables_at(table), range(8))})
                    == 1
                )
    finally:
        sys.setswitchinterval(before)


# Spaces of others -------------------------------------------------------------------------------------------


@pytest.mark.slow
@some
@given(st.data())
def test_every_piece_of_a_receiver_gets_what_a_source_has_of_it(data: st.DataObject) -> None:
    """Any blocks on both sides; each element at the place that it has in the receiver's piece, wherever in
    the source it is.
    """
    shapes, source, receiver = data.draw(pairs_of_spaces())
    index_maps = build_index_maps(source, receiver)
    for width in BITS:
        flat = target_of(source, 3, data.draw(st.booleans()), width)
        held = {}
        for piece, tensor in zip(source.pieces, flat.tensors, strict=True):
            bits = tensor.contiguous().view(-1).tolist()
            held |= dict(
                zip(
                    ((piece.slot, at) for at in piece.block.global_indices(shapes[piece.slot]).tolist()),
                    bits,
                    strict=True,
                )
            )
        expected = []
        for piece in receiver.pieces:
            indices = piece.block.global_indices(shapes[piece.slot]).tolist()
            places = [place for place, index in enumerate(indices) if (piece.slot, index) in held]
            bits = [held[piece.slot, indices[place]] for place in places]
            expected.append(reference(torch.tensor(bits, dtype=BITS[width]).numpy(), places))
        for kernel in KERNELS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "on", lambda device, kernel=kernel: kernel)
                patch.setattr(module, "_CHUNK", data.draw(st.sampled_from([1, 5, 64, 1 << 20])))
                assert digests(flat, [(index_maps, receiver.starts)])[0].tolist() == expected


@st.composite
def cut_models(draw: Any) -> tuple[list[tuple[int, ...]], list[FlatSpace], FlatSpace]:
    """Draw shapes, the spaces of sources that together hold every element once, and the space of a receiver
    of any blocks.
    """
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    shards: list[list[Piece]] = []
    for slot, shape in enumerate(shapes):
        held: set[tuple[int, ...]] = set()
        for rank, block in enumerate(draw(mesh_blocks(shape))):
            indices = tuple(block.global_indices(shape).tolist())
            shards += [[] for _ in range(rank + 1 - len(shards))]
            if indices and indices not in held:  # a replica is sent by one rank alone
                held.add(indices)
                shards[rank].append(Piece(slot, len(shards[rank]), block))
    receiver = [Piece(slot, slot, draw(blocks(shape))) for slot, shape in enumerate(shapes)]
    return (
        shapes,
        [FlatSpace.of(2, Pieces.of(pieces)) for pieces in shards],
        FlatSpace.of(2, Pieces.of(receiver)),
    )


@pytest.mark.slow
@some
@given(cut_models(), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_the_digests_of_all_shards_add_up_to_those_of_the_whole_tensors_and_of_any_other_layout(
    drawn: Any, width: int, flip: bool
) -> None:
    """And no longer do once a bit of a shard is another one."""
    shapes, sources, receiver = drawn
    wholes = [random_bits(prod(shape), width, seed=slot) for slot, shape in enumerate(shapes)]
    flats = []
    for source in sources:
        parts = [
            wholes[piece.slot][torch.from_numpy(piece.block.global_indices(shapes[piece.slot]))]
            for piece in source.pieces
        ]
        flats.append(
            FlatTensors(
                [part.view(piece.block.shape) for piece, part in zip(source.pieces, parts, strict=True)],
                width,
            )
        )
    full = whole_space(width, *shapes)
    held = [
        wholes[piece.slot][torch.from_numpy(piece.block.global_indices(shapes[piece.slot]))]
        for piece in receiver.pieces
    ]
    expected = [own_digests([whole for whole in wholes if len(whole)]), own_digests(held)]

    def found() -> list[list[int]]:
        """Each element is read once, for both spaces."""
        spaces = [(full, source) for source in sources], [(receiver, source) for source in sources]
        tables = [
            [(build_index_maps(source, other), other.starts) for other, source in space]
            for space in zip(*spaces, strict=True)
        ]
        every = [digests(flat, both) for flat, both in zip(flats, tables, strict=True)]
        return [np.sum(each, axis=0, dtype=np.int64).tolist() for each in zip(*every, strict=True)]

    assert found() == [each.tolist() for each in expected]
    if flip and (some := [tensor for flat in flats for tensor in flat.tensors if tensor.numel()]):
        some[-1].view(-1)[-1] ^= 1
        assert found()[0] != expected[0].tolist()


def test_tables_of_a_tied_tensor_and_of_regions_in_another_order(kernel: ModuleType) -> None:
    source = whole_space(4, (3,), (8, 6), (2,))
    rows = space_of(
        4,
        (1, Block.rectangle((6, 0), (2, 6))),
        (1, Block.rectangle((0, 0), (3, 6))),
        (1, Block.whole((8, 6))),
    )
    bits = random_bits(source.numel, 4)
    whole = bits[3:51].view(8, 6)
    expected = references([whole[6:], whole[:3], whole], 4)
    for tensors in ([bits], [bits[:3], whole, bits[51:]], [bits[:3], whole.t().contiguous().t(), bits[51:]]):
        flat = FlatTensors(tensors, 4)
        assert digests(flat, [(build_index_maps(source, rows), rows.starts)])[0].tolist() == expected


def test_empty_pieces_and_empty_spaces(kernel: ModuleType) -> None:
    """A piece of no elements has the digest 0, and takes none of its neighbours' elements, wherever it
    stands.
    """
    flat = FlatTensors([torch.ones(3), torch.ones(0), torch.zeros(0, 4), torch.ones(2), torch.ones(0)], 4)
    (found,) = digests(flat, [([Identity(5)], flat.starts)])
    assert found.tolist() == [reference(np.ones(3, np.float32)), 0, 0, reference(np.ones(2, np.float32)), 0]
    nothing = FlatTensors([], 4)
    assert [each.tolist() for each in digests(nothing, [([Identity(0)], nothing.starts)])] == [[]]
    assert [each.tolist() for each in digests(flat, [((), flat.starts)])] == [[0] * 5]
    assert digests(flat, []) == []


@pytest.mark.parametrize(
    "sizes", [(np.int32, np.int64, 2), (np.int64, np.int32, 2), (np.int64, np.int64, 3)], ids=str
)
def test_sums_that_do_not_fit_are_refused_before_a_loop_writes_to_them(sizes: Any) -> None:
    starts, sums, pieces = sizes
    with pytest.raises(ValueError, match="int64 starts and sums"):
        cpu.digest(
            Identity(4),
            0,
            torch.zeros(4, dtype=torch.int32),
            np.array([0, 2, 4], starts),
            np.zeros(pieces, sums),
        )


# Casts ------------------------------------------------------------------------------------------------------

CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize(("own", "wire"), CASTS, ids=str)
def test_what_is_digested_is_what_would_be_sent(own: torch.dtype, wire: torch.dtype) -> None:
    """A source that sends a cast digests the cast, tensor by tensor, strided ones too; a receiver has the
    same digest of what it holds.
    """
    finite = torch.linspace(-100, 100, 300, dtype=torch.float64).to(own)
    tensors = [
        finite[:100].view(10, 10),
        finite[100:101],
        finite[101:101],
        finite[101:].view(-1, 199)[:, ::2],
        finite[:96].view(8, 12).t(),
    ]
    cast = [tensor.contiguous().view(-1).to(wire).view(tensor.shape) for tensor in tensors]
    flat = FlatTensors(tensors, wire.itemsize).read_as([wire] * len(tensors))
    assert digests(flat, [([Identity(len(flat))], flat.starts)])[0].tolist() == own_digests(cast).tolist()
    assert own_digests(cast).tolist() == references(cast, wire.itemsize)


def test_a_space_of_which_some_tensors_are_cast() -> None:
    masters = [torch.randn(50), torch.randn(7).bfloat16(), torch.randn(6, 5).t()]
    flat = FlatTensors(masters, 2).read_as([torch.bfloat16, torch.bfloat16, torch.float16])
    sent = [masters[0].bfloat16(), masters[1], masters[2].half()]
    assert digests(flat, [([Identity(len(flat))], flat.starts)])[0].tolist() == references(sent, 2)
