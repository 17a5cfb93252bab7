"""Whatever comes from other ranks, damaged at random: a reader returns the right thing, or refuses.

Where a checksum or a guard goes with the input it is left as it was, and then nothing but what was sent may
come out; or it is mended, as a program with a fault would have written it, and then whatever comes out must
be safe to work with. Inputs are small, and so is the memory that reading may take.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from dte_dist import Payload, kernels
from dte_dist.codec import (
    CodecSelector,
    FrameHead,
    FrameWriter,
    PreviousDelta,
    Segment,
    read_frame,
    read_head,
)
from dte_dist.codec.header import CHECKSUM_WORD
from dte_dist.codec.named_tensors import (
    HEADER,
    MAGIC,
    Change,
    write_payload,
)
from dte_dist.codec.payload_bytes import Arrival, Packed, frame_sizes
from dte_dist.codec.payload_bytes import Description as PayloadDescription
from dte_dist.errors import FrameError, PeerLost, from_wire, to_wire
from dte_dist.kernels import cpu
from dte_dist.kernels import torch as torch_kernels
from dte_dist.layout import WHOLE, Block, Cut, Entry, Layout, Manifest, MeshSpec, Placement
from dte_dist.liveness.board import Verdict
from dte_dist.liveness.notes import read_note
from dte_dist.liveness.places import Place
from dte_dist.liveness.presence import Process
from dte_dist.liveness.rendezvous import _said
from dte_dist.options import options_of
from dte_dist.sync.agreement import _check_numbers, _unflatten, describe
from dte_dist.sync.control import NONE, ControlRow, check_calls, common_version, decide
from dte_dist.sync.description import Description as RankDescription
from dte_dist.sync.description import check_counts
from dte_dist.sync.payload_apply import apply_payload
from dte_dist.sync.protocol import Sync
from dte_dist.sync.row_bounds import check_rows
from dte_dist.tensors.flat import BITS
from dte_dist.transport.all_or_none import AgreedError
from dte_dist.transport.guard import guard_of
from dte_dist.transport.meeting import _check_rows
from tests.unit.fuzzing import EXTREMES, damage_bytes, damage_json, fuzz, limited_memory

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before memory is limited, and anything is timed."""
    kernels.precompile(BITS)
    cases()


# Frames -----------------------------------------------------------------------------------------------------

HEAD_OF = FrameHead(
    schema=5, lineage=6, base=7, version=8, source=3, number=1, count=4, width=2, first=1000, length=200_000
)
CODECS = [
    "fast",
    "small",
    "i32+raw",
    "u16+ulp",
    "ef+planes",
    "bitmap+ulp8",
    "again+planes",
    "dense+planes",
    "ef+raw",
]


class Case:
    """A frame, what its reader expects and knows, and what comes out of it."""

    def __init__(self, codec: str, width: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        selector = CodecSelector(codec, sparse_bytes_ratio=1.0)
        self.expect = replace(HEAD_OF, width=width, source=seed)
        self.writer_history, self.history = PreviousDelta(), PreviousDelta()
        before = self._written(rng, selector, replace(self.expect, base=6, version=7), width)
        if len(before):
            read_frame(before, replace(self.expect, base=6, version=7), self.history)
        for history in (self.writer_history, self.history):
            history.commit(7, 6)
        self.frame = self._written(rng, selector, self.expect, width)
        self.segments = said(read_frame(self.frame, self.expect, self.history))
        self.data = self.frame.numpy().tobytes()

    def _written(
        self, rng: np.random.Generator, selector: CodecSelector, head: FrameHead, width: int
    ) -> Tensor:
        writer = FrameWriter(head, CPU, selector, self.writer_history)
        for first, length, density in (
            (1000, 300, 0.2),
            (1300, 70_000, 0.001),
            (80_000, 500, 1.0),
            (90_000, 64, 0.5),
        ):
            known = bits(rng, length, width)
            where = rng.random(length) < density if density < 1 else np.ones(length, np.bool_)
            new = known.clone()
            new[torch.from_numpy(where)] += torch.from_numpy(rng.integers(1, 4, int(where.sum()))).to(
                new.dtype
            )
            positions = torch.from_numpy(np.flatnonzero(where).astype(np.int32))
            relative = selector.relative(width)
            values = (
                torch_kernels.ulp_deltas(known[positions.long()], new[positions.long()])
                if relative
                else new[positions.long()]
            )
            writer.add(
                first,
                length,
                None if density == 1 else positions,
                values,
                relative=relative,
                whole=lambda new=new: new,
            )
        return writer.finish()


def bits(rng: np.random.Generator, count: int, width: int) -> Tensor:
    return (
        torch.from_numpy(rng.integers(0, 256, (count + 1) * width, np.uint8))
        .view(BITS[width])[:count]
        .clone()
    )


def said(segments: list[Segment]) -> list[Any]:
    """What segments mean, as values."""
    return [
        (
            each.first,
            each.length,
            each.relative,
            None if each.positions is None else each.unpacked().tolist(),
            each.values.tolist(),
        )
        for each in segments
    ]


@cache
def cases() -> list[Case]:
    found = []
    for seed, codec in enumerate(CODECS):
        for width in (1, 2, 4, 8):
            if width < 8 or codec.split("+")[-1] not in ("ulp", "ulp8", "planes"):
                found.append(Case(codec, width, seed))
    return found


def check_segments(segments: list[Segment], expect: FrameHead) -> None:
    """Whatever is given out can be applied without a further look."""
    assert segments
    border = expect.first
    for segment in segments:
        assert border <= segment.first < segment.first + segment.length <= expect.first + expect.length
        border = segment.first + segment.length
        assert segment.values.dtype == BITS[expect.width] and segment.values.dim() == 1
        if segment.positions is None:
            assert len(segment.values) == segment.length
        else:
            positions = segment.unpacked()
            assert len(segment.values) == len(positions) > 0
            assert positions.diff().gt(0).all() and 0 <= positions[0] <= positions[-1] < segment.length


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def sealed(data: bytes) -> Tensor:
    """Return a frame whose size and checksum are right, if it has a head."""
    frame = tensor_of(data).clone()
    if len(frame) >= 96:
        frame[16:24] = torch.from_numpy(np.array([len(frame)], "<u8").view(np.uint8))
        if len(frame) % 8 == 0:
            frame.view(torch.int64)[CHECKSUM_WORD] = cpu.checksum(frame, CHECKSUM_WORD)
    return frame


def a_frame(rng: Random) -> tuple[Case, bytes]:
    """Return a damaged frame, more often than not behind its head, which is looked at first."""
    case, others = rng.choice(cases()), [rng.choice(cases()).data for _ in range(2)]
    head = rng.choice([0, 96, 96])
    return case, case.data[:head] + damage_bytes(rng, case.data[head:], [other[head:] for other in others])


def frame_as_it_came(rng: Random) -> str:
    case, data = a_frame(rng)
    frame = tensor_of(data)
    read_head(frame) if len(frame) and rng.random() < 0.3 else None
    segments = read_frame(frame, case.expect, rng.choice([None, case.history]), packed=rng.random() < 0.5)
    assert data == case.data or said(segments) == case.segments, (
        "the checksum is right, but not what was sent"
    )
    return "read"


def frame_with_its_checksum_mended(rng: Random) -> str:
    case, data = a_frame(rng)
    segments = read_frame(
        sealed(data), case.expect, rng.choice([None, case.history]), packed=rng.random() < 0.5
    )
    check_segments(segments, case.expect)
    return "read"


def frame_on_a_device(rng: Random) -> str:
    """The same with the kernels of accelerators, over CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on", lambda device: torch_kernels)
        case, data = a_frame(rng)
        segments = read_frame(sealed(data), case.expect, rng.choice([None, case.history]))
        check_segments(segments, case.expect)
    return "read"


# Layouts ----------------------------------------------------------------------------------------------------

MESHES = (MeshSpec((2, 2), (0, 1, 2, 3)), MeshSpec((2,), (1, 3)))


@cache
def manifests() -> list[Manifest]:
    cut = Placement(0, (Cut(0, 1), Cut(0, 0, 2)))
    left, right = (Placement(block=Block.rectangle((0, column), (4, 2))) for column in (0, 2))
    rows = [Entry(f"layers.{n}.weight", (8, 3), "bfloat16", Placement(0, (Cut(0, 1),))) for n in range(4)]
    fused = [Entry("fused", (4, 4), "float32", left), Entry("fused", (4, 4), "float32", right)]
    return [
        Manifest.build(
            [*rows, Entry("scalar", (), "int64", WHOLE), *fused],
            MESHES,
            [["layers.0.weight", "layers.1.weight"]],
        ),
        Manifest.build(
            [Entry("w", (7, 3), "float32", WHOLE), Entry("é模", (0, 4), "bool", Placement(1))], MESHES[:2]
        ),
        Manifest.build([Entry("norm", (7,), "float8_e4m3fn", Placement(1))], MESHES, []),
        Manifest.build([Entry("w", (16, 16), "float16", cut)], MESHES),
        Manifest.build([]),
    ]


def check_manifest(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest and len(manifest.digest()) == 16
    coordinates = [(0,) * len(mesh.shape) for mesh in manifest.meshes]
    for entry in range(len(manifest.entries)):
        block = manifest.block(entry, coordinates)
        assert block is not None and block.fits(manifest.entries[entry].shape)


def manifest_as_it_came(rng: Random) -> str:
    manifest = rng.choice(manifests())
    data = damage_bytes(rng, manifest.to_bytes(), [other.to_bytes() for other in manifests()])
    read = Manifest.from_bytes(data)
    assert read in manifests()
    return "read"


def manifest_with_other_json(rng: Random) -> str:
    text = damage_json(rng, json.loads(zlib.decompress(rng.choice(manifests()).to_bytes())))
    check_manifest(Manifest.from_bytes(zlib.compress(text, 1)))
    return "read"


@cache
def descriptions() -> list[bytes]:
    layout = Layout.from_tensors({"w": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)})
    return [
        describe(torch.nn.Linear(2, 3), None, options_of(), "cpu:gloo").data,
        describe(
            torch.nn.Linear(2, 3),
            None,
            options_of(group_src=(2, 0), wire_dtype=torch.bfloat16, anchor_interval=7),
            "cpu:gloo",
        ).data,
        describe(
            layout,
            Layout.from_tensors({"w": torch.zeros(3, 2)}),
            options_of(wire_dtype="receiver"),
            "cpu:gloo",
        ).data,
    ]


def check_description(said: RankDescription) -> None:
    assert isinstance(said.partial, bool) and isinstance(said.nccl, bool) and said.numbers >= 0
    assert said.options["src"] is None or all(0 <= rank < 4 for rank in said.options["src"])
    assert 64 <= said.options["bucket_bytes"] <= 1 << 30 and said.options["timeout"] > 0
    for manifest in said.manifests:
        if manifest is not None:
            check_manifest(manifest)


def description_as_it_came(rng: Random) -> str:
    data = damage_bytes(rng, rng.choice(descriptions()), descriptions())
    check_counts([len(data)])
    check_description(RankDescription.parse(data, rank=1, size=4))
    return "read"


def description_with_other_json(rng: Random) -> str:
    data = rng.choice(descriptions())
    sizes = np.frombuffer(data[:24], np.int64).tolist()
    head, rest = data[24 : 24 + sizes[0]], data[24 + sizes[0] :]
    head = damage_json(rng, json.loads(head))
    check_description(
        RankDescription.parse(np.array([len(head), *sizes[1:]]).tobytes() + head + rest, rank=1, size=4)
    )
    return "read"


def numbers_of_an_opening(rng: Random) -> str:
    """Sizes of descriptions, numbers of coordinates, and coordinates."""
    manifest = rng.choice(manifests())
    said = RankDescription({}, None, False, False, (False, False), manifest, rng.choice([None, *manifests()]))
    sound = [rng.choice([-1] * 2 + [0, 1])] * said.numbers
    numbers = [
        rng.choice([number, rng.choice(EXTREMES)]) if rng.random() < 0.2 else number for number in sound
    ]
    check_counts([rng.choice([24, 300, 1 << 28]), rng.choice([300, 300, rng.choice(EXTREMES)])])
    _check_numbers([rng.choice([len(numbers)] * 3 + [rng.choice(EXTREMES)])], [said])
    places = _unflatten(said, numbers, 3)
    for each, places_of in zip(said.manifests, places, strict=True):
        for mesh, place in zip(each.meshes if each is not None else (), places_of, strict=True):
            assert place is None or all(0 <= at < size for at, size in zip(place, mesh.shape, strict=True))
    return "read"


# Rows -------------------------------------------------------------------------------------------------------


def a_table(rng: Random) -> tuple[list[ControlRow], list[int], list[int]]:
    """Return sound rows of three to five ranks, and which are sources and receivers."""
    ranks, version = rng.randint(3, 5), rng.choice([NONE, 1, 7, 1 << 40])
    sources = sorted(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
    receivers = [rank for rank in range(ranks) if rank not in sources or rng.random() < 0.2]
    rows = []
    for rank in range(ranks):
        row = ControlRow(proposed_lineage=rng.randrange(1, 1 << 62), newest=version)
        if rank in sources:
            full = int(version == NONE)
            row = replace(row, is_source=1, source_version=version, source_lineage=5, full=full, reason=full)
        if rank in receivers:
            at, why = rng.choice([(version, 0), (version, 0), (NONE, 1), (3, 0)])
            row = replace(row, is_receiver=1, receiver_version=at, receiver_lineage=5, seed_reason=why)
        rows.append(row)
    return rows, sources, receivers


def control_rows(rng: Random) -> str:
    rows, sources, receivers = a_table(rng)
    route = SimpleNamespace(
        max_bytes={source: [800, 800] for source in sources}, chunks={source: [0, 0] for source in sources}
    )
    table = np.stack([row.pack([8, 800] if row.is_source else [], 5) for row in rows])
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        table[rng.randrange(len(table)), rng.randrange(table.shape[1])] = rng.choice(
            [*EXTREMES, *range(-1, 9), rng.getrandbits(62)]
        )
    check_rows(table, sources, receivers)
    unpacked, _ = ControlRow.unpack(table)
    check_calls(unpacked)
    sizes, sync = table[:, ControlRow.columns() :], cast(Sync, SimpleNamespace(_route=route))
    Sync._check_sizes(sync, sizes)
    assert all(0 <= size <= 800 and size % 8 == 0 for size in sizes.flatten().tolist())
    decision = decide(unpacked, sources[0])
    version, ranks = common_version(unpacked)
    assert sorted([*decision.followers, *decision.seeded]) == receivers and set(ranks) <= set(receivers)
    assert (
        version >= NONE
        and 0 < decision.version < 1 << 62
        and decision.version > decision.base
        and decision.reason is not None
    )
    return "decided"


def rows_of_a_meeting(rng: Random) -> str:
    rows = np.array([[3, 0, 0], [3, 104, 800], [3, 0, 0]])
    for _ in range(rng.choice([0, 1, 1, 2])):
        rows[rng.randrange(3), rng.randrange(3)] = rng.choice([*EXTREMES, 104, 800])
    try:
        _check_rows(rows, [0, 1, 2], [1])
    except AgreedError as agreed:
        raise agreed.error from None
    assert 8 <= rows[1, 1] <= 1 << 26 and 0 <= rows[1, 2] <= 1 << 48 and not rows[[0, 2], 1:].any()
    return "read"


def guarded_row(rng: Random) -> str:
    """No damage to a row or its guard passes; nor is it taken for that of another rank or exchange."""
    turn = rng.randrange(1, 1000)
    row = np.array([rng.choice([0, 1, rng.getrandbits(62)]) for _ in range(rng.randint(1, 20))])
    data = np.array([*row, guard_of(row, 2, turn)]).tobytes()
    others = [
        np.array([*row, guard_of(row, *each)]).tobytes()
        for each in ((1, turn), (3, turn), (2, turn + 1), (2, turn - 1))
    ]
    damaged = rng.choice(others) if rng.random() < 0.1 else damage_bytes(rng, data, others)
    came = np.frombuffer(
        (damaged + bytes(len(data)))[: len(data)], np.int64
    )  # a short message leaves what was there
    sound = guard_of(came[:-1], 2, turn) == came[-1]
    assert sound == (came.tobytes() == data)
    return "sound" if sound else "refused"


def errors_of_others(rng: Random) -> str:
    kinds = [FrameError("cut short", ranks=[3]), PeerLost("gone é"), ValueError("no"), OSError("x" * 9000)]
    written = [to_wire(kind, 256) for kind in kinds]
    found = from_wire(damage_bytes(rng, rng.choice(written), written))
    assert found is None or isinstance(found, FrameError | ValueError | RuntimeError)
    assert found is None or to_wire(found, 256)
    return "an error" if found is not None else "none"


@cache
def notes() -> dict[str, Any]:
    place = Place(1, 2, "actor", 4, {1: 3, 2: 4}, 2, True, False)
    return {
        "verdict": json.loads(Verdict("late", (2, 3), "ranks 2 and 3 did not answer é", (4, 5)).pack()),
        "process": asdict(Process.this()),
        "note": {"origin": 3, "process": asdict(Process.this())},
        "places": [asdict(place), asdict(replace(place, name=None))],
    }


def notes_in_the_store(rng: Random) -> str:
    kind = rng.choice(list(notes()))
    data = json.dumps(notes()[kind]).encode()
    data = damage_json(rng, json.loads(data)) if rng.random() < 0.8 else damage_bytes(rng, data)
    if kind == "verdict":
        verdict = Verdict.parse(data)
        assert str(verdict.error()).encode() is not None and json.loads(verdict.pack())
    elif kind == "process":
        process = read_note("a process", data, Process.read)
        assert replace(process, machine="elsewhere").is_dead() is False
    elif kind == "note":
        origin, _ = read_note("a note", data, _said)
        assert origin is None or origin >= 0
    else:
        for place in read_note("places", data, lambda said: [*map(Place.parse, said)]):
            assert str(place) and place.is_before(place) in (True, False)
    return "read"


# Payloads ---------------------------------------------------------------------------------------------------


@cache
def packed() -> list[Packed]:
    tensors = {"w": torch.arange(6.0).view(2, 3), "é": torch.ones(3, dtype=torch.bool), "s": torch.tensor(7)}
    delta = write_payload(
        7, 4, [Change("w", torch.tensor([1, 5]), torch.ones(2)), Change("b", None, torch.ones(3))], lineage=9
    )
    return [
        Packed(Payload(3, -1, True, tensors, 5, 0, 2, b"plan")),
        Packed(delta),
        Packed(Payload(1, 0, False, {})),
    ]


def described(rng: Random) -> str:
    """The description of a payload, damaged as bytes or as JSON."""
    each = rng.choice(packed())
    text = (
        damage_json(rng, json.loads(each.text))
        if rng.random() < 0.7
        else damage_bytes(rng, each.text, [p.text for p in packed()])
    )
    found = PayloadDescription.from_bytes(text)
    assert PayloadDescription.from_bytes(found.to_bytes()) == found and found.nbytes % 8 == 0
    arrival = Arrival(len(found.to_bytes()), min(found.nbytes, 1 << 20), CPU)
    arrival._describe(found.to_bytes())
    return "read"


def pieces_of(pieces: list[tuple[int, Callable[[Tensor], object]]]) -> list[bytes]:
    made = [torch.empty(size, dtype=torch.uint8) for size, _ in pieces]
    for (_, write), piece in zip(pieces, made, strict=True):
        write(piece)
    return [piece.numpy().tobytes() for piece in made]


@cache
def all_pieces() -> list[bytes]:
    return [piece for each in packed() for piece in pieces_of(each.frames())]


def pieces_as_they_came(rng: Random) -> str:
    """Damaged pieces of a description and of data: what comes out is what went in."""
    each = rng.choice(packed())
    frames = pieces_of(each.frames())
    assert [len(frame) for frame in frames] == frame_sizes(len(each.text), each.nbytes)
    arrival = Arrival(len(each.text), each.nbytes, CPU)
    for number, frame in enumerate(frames):
        came = damage_bytes(rng, frame, all_pieces(), most=2) if rng.random() < 0.4 else frame
        arrival.take(number, tensor_of((came + bytes(len(frame)))[: len(frame)]))
    assert pieces_of(Packed(arrival.payload()).frames()) == frames
    return "read"


BASE = {
    "w": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "e": torch.zeros(0, 3),
}
OTHER_NAMES = ["w", "b", "w@delta_idx", "w@delta_val", "b@delta_idx", "@delta_val", HEADER, "x", "", 3, None]
STRANGE: list[Any] = [
    torch.zeros(3),
    torch.zeros(3, 4),
    torch.zeros(()),
    torch.tensor([3, 2]),
    torch.zeros(0),
    None,
    3,
    "w",
    torch.tensor([1, 1], dtype=torch.int32),
    torch.tensor([11], dtype=torch.int32),
    torch.tensor([12], dtype=torch.int32),
    torch.tensor([-1, 3], dtype=torch.int32),
    torch.tensor([1 << 62]),
    torch.tensor([(1 << 63) - 1]),
    torch.zeros(2, device="meta"),
    torch.zeros(2).to_sparse(),
    torch.zeros(1).expand(1 << 40),
    torch.zeros(6, dtype=torch.int64),
    torch.zeros(2, dtype=torch.complex128),
    torch.zeros(5, dtype=torch.bfloat16),
    torch.empty(0, 1 << 40),
    torch.arange(10, dtype=torch.int32)[::3],
    torch.zeros(2, 3).t(),
    torch.zeros(3, 4, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.bool),
    torch.ones(2, requires_grad=True),
]


def payload_of_tensors(rng: Random) -> str:
    full = rng.random() < 0.3
    positions = torch.tensor([1, 5, 11], dtype=torch.int32)
    changes = [Change("w", positions, torch.ones(3)), Change("b", None, torch.ones(5, dtype=torch.bfloat16))]
    if full:
        changes = [Change(name, None, tensor.clone()) for name, tensor in BASE.items()]
    tensors: dict[Any, Any] = dict(write_payload(7, -1 if full else 4, changes).tensors)
    for _ in range(rng.randint(1, 3)):
        name, how = rng.choice(list(tensors)), rng.randrange(6)
        if how == 0:
            del tensors[name]
        elif how == 1:
            tensors[rng.choice(OTHER_NAMES)] = tensors[name]
        elif (
            how == 2
            and HEADER in tensors
            and isinstance(tensors[HEADER], Tensor)
            and tensors[HEADER].shape == (6,)
        ):
            header = tensors[HEADER].clone()
            header[rng.randrange(6)] = rng.choice([*EXTREMES, MAGIC, 1, 4, 7])
            tensors[HEADER] = header
        elif how == 3:
            other = rng.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        else:
            tensors[name] = rng.choice(STRANGE)
        if not tensors:
            break
    wrong = rng.choice([*EXTREMES, None, 7.0, "7"]) if rng.random() < 0.1 else 7
    payload = Payload(wrong, -1 if full else 4, full, MappingProxyType(tensors))
    targets = {name: tensor.clone() for name, tensor in BASE.items()}
    apply_payload(payload, targets)
    assert all(targets[name].shape == tensor.shape for name, tensor in BASE.items())
    return "applied"


READERS: dict[Callable[[Random], str], int] = {
    frame_as_it_came: 3000,
    frame_with_its_checksum_mended: 4000,
    frame_on_a_device: 800,
    manifest_as_it_came: 3000,
    manifest_with_other_json: 3000,
    description_as_it_came: 3000,
    description_with_other_json: 3000,
    numbers_of_an_opening: 3000,
    control_rows: 5000,
    rows_of_a_meeting: 3000,
    guarded_row: 5000,
    notes_in_the_store: 3000,
    errors_of_others: 3000,
    described: 3000,
    pieces_as_they_came: 1500,
    payload_of_tensors: 4000,
}
"""How many inputs of each are read in the suite: less than a minute for all, on a slow machine."""

READABLE = {"read", "decided", "sound", "an error", "applied"}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.timeout(3600)
def test_damaged_inputs_are_refused_or_harmless(reader: Callable[[Random], str]) -> None:
    counts = fuzz(reader.__name__, READERS[reader], reader)
    assert sum(counts.values()) > 0 and counts.keys() - READABLE, f"no input was ever refused: {counts}"


def test_there_is_no_memory_for_a_huge_allocation() -> None:
    with limited_memory(), pytest.raises(RuntimeError, match="memory"):
        torch.empty(1 << 30, dtype=torch.uint8)
    torch.empty(1 << 30, dtype=torch.uint8)


def test_what_is_not_damaged_is_read() -> None:
    """The inputs that damage is done to are sound."""
    for case in cases():
        assert said(read_frame(tensor_of(case.data), case.expect, case.history)) == case.segments
        assert torch.equal(sealed(case.data), tensor_of(case.data))
    for manifest in manifests():
        check_manifest(manifest)
    for data in descriptions():
        check_description(RankDescription.parse(data, rank=0, size=4))
    assert Verdict.parse(json.dumps(notes()["verdict"]).encode()).ranks == (2, 3)
    assert _said(notes()["note"]) == (3, Process.this())
    assert asdict(Place.parse(json.loads(json.dumps(notes()["places"][0])))) == notes()["places"][0]
    for each in packed():
        assert PayloadDescription.from_bytes(each.text).nbytes == each.nbytes
    for _ in range(50):
        rows, sources, receivers = a_table(Random(3))
        check_rows(np.stack([row.pack([], 0) for row in rows]), sources, receivers)
