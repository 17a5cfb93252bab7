"""The head of a frame: what it says about itself, and whether that is what the receiver expects.

A frame starts with a `HEAD` and one `ENTRY` per segment, both little-endian and of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dte_dist.errors import FrameError, VersionError, VersionGap, VersionReplay, VersionRestart

__all__ = [
    "CHECKSUM_WORD",
    "ENTRY",
    "HEAD",
    "MOST_ELEMENTS",
    "NONE",
    "SYNC_AGAIN",
    "FrameHead",
    "check_head",
    "check_tensor",
    "head_of",
    "pack_head",
    "read_head",
    "unpack_head",
]

NONE: Final = -1
"""A version that is not there, in memory and on the wire."""

MAGIC: Final = b"DTEF"
FORMAT: Final = 3
CHECKSUM_WORD: Final = 1
_SEED: Final = 1
_KEEP: Final = 2

HEAD: Final = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u2"),
        ("flags", "<u2"),
        ("checksum", "<i8"),
        ("size", "<u8"),
        ("schema", "<u8"),
        ("lineage", "<u8"),
        ("base", "<i8"),
        ("version", "<i8"),
        ("first", "<u8"),
        ("length", "<u8"),
        ("source", "<u4"),
        ("number", "<u4"),
        ("count", "<u4"),
        ("width", "<u4"),
        ("segments", "<u4"),
        ("zero", "<u4"),
    ]
)
"""96 bytes; `size` is of the whole frame, `checksum` is word 1, flag 1 marks a seed, flag 2 a delta whose
positions are to be kept.
"""

ENTRY: Final = np.dtype(
    [
        ("first", "<u8"),
        ("length", "<u4"),
        ("count", "<u4"),
        ("index_bytes", "<u4"),
        ("value_bytes", "<u4"),
        ("index", "u1"),
        ("value", "u1"),
        ("low", "u1"),
        ("shift", "u1"),
        ("spread", "<u2"),
        ("zero", "<u2"),
        ("far", "<u4"),
        ("unary", "<u4"),
    ]
)
"""40 bytes; `index` and `value` are the numbers of the codecs, what follows is what they need to know to read
their streams.
"""

MOST_ELEMENTS: Final = 1 << 28
"""Elements of the longest segment."""

SYNC_AGAIN: Final = "nothing of it was applied; sync again, the next delta contains this one"


_SEED_IT: Final = "seed this receiver with a full sync"


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a frame: it says what the frame is, and its receiver what it expects.

    Attributes:
        schema: 64 bits that stand for the channel: manifests and options.
        lineage: random number of the lineage of versions, so that another run of the trainer is told apart.
        base, version: the frame leads from one to the other.
        source: group rank of the source.
        number, count: which of the frames of this source in this sync, and how many chunks it has.
        width: bytes of an element.
        first, length: the chunk, elements [first, first + length) of the space of that width (see `Segment`).
        seed: the whole chunk, not what changed in it.
        keep: the positions are to be kept for the next delta, see `codec.previous_delta`; it is for the
            sender to say, so it is not compared.
    """

    schema: int
    lineage: int
    base: int
    version: int
    source: int
    number: int
    count: int
    width: int
    first: int
    length: int
    seed: bool = False
    keep: bool = field(default=False, compare=False)


_COLUMNS: Final = HEAD.names or ()
_FIELDS: Final = tuple(each.name for each in fields(FrameHead) if each.name not in {"seed", "keep"})


def pack_head(head: FrameHead, *, size: int, segments: int) -> np.ndarray:
    """Write a head as uint8[96], with a checksum of zero.

    Raises:
        OverflowError: a field does not fit.
    """
    flags = _SEED * head.seed + _KEEP * head.keep
    values = {
        "magic": MAGIC,
        "format": FORMAT,
        "flags": flags,
        "checksum": 0,
        "size": size,
        "segments": segments,
        "zero": 0,
    }
    row = np.array(
        [tuple(values[name] if name in values else getattr(head, name) for name in _COLUMNS)], HEAD
    )
    return row.view(np.uint8)


def unpack_head(start: np.ndarray, size: int) -> dict[str, Any]:
    """Read the fields of `HEAD` from the first bytes of a frame of `size` bytes.

    Raises:
        FrameError: these are not the first bytes of such a frame.
    """
    if len(start) < HEAD.itemsize:
        raise FrameError(
            "a frame is cut short",
            expected=f"at least {HEAD.itemsize} bytes",
            got=f"{size} bytes",
            hint=SYNC_AGAIN,
        )
    row = dict(zip(HEAD.names or (), start[: HEAD.itemsize].view(HEAD)[0].item(), strict=True))
    for name, expected in (("magic", MAGIC), ("format", FORMAT), ("size", size), ("zero", 0)):
        if row[name] != expected:
            raise FrameError(
                f"not a frame, or one cut short: its {name} is wrong",
                expected=expected,
                got=row[name],
                hint=SYNC_AGAIN,
            )
    if row["flags"] not in {0, _SEED, _KEEP}:
        raise FrameError(
            "a frame has flags of a later format", expected="0, 1 or 2", got=row["flags"], hint=SYNC_AGAIN
        )
    return row


def head_of(row: dict[str, Any]) -> FrameHead:
    """Return what an unpacked head says."""
    return FrameHead(
        **{name: row[name] for name in _FIELDS}, seed=row["flags"] == _SEED, keep=row["flags"] == _KEEP
    )


def read_head(frame: Tensor) -> FrameHead:
    """Read what a frame says about itself, without believing it: the checksum is not looked at.

    Raises:
        FrameError: it is not a frame of this format, or not all of it.
    """
    check_tensor(frame)
    return head_of(unpack_head(frame[: HEAD.itemsize].cpu().numpy(), frame.numel()))


def check_tensor(frame: Tensor) -> None:
    """Raise ValueError unless a tensor can be a frame."""
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous():
        raise ValueError(
            f"a frame is a contiguous uint8 tensor of one dimension, not {frame.dtype}{list(frame.shape)}"
        )


def check_head(head: FrameHead, expect: FrameHead) -> None:
    """Compare a head with the one expected.

    Raises:
        FrameError: it belongs to another channel, source, place or kind of sync.
        VersionRestart, VersionGap, VersionReplay, VersionError: it does not lead from the version held to the
            next.
    """
    if head == expect:
        return
    _check_field("schema", head, expect)
    _check_versions(head, expect)
    for name in ("source", "number", "count", "width", "first", "length", "seed"):
        _check_field(name, head, expect)


def _check_field(name: str, head: FrameHead, expect: FrameHead) -> None:
    got, expected = getattr(head, name), getattr(expect, name)
    if got != expected:
        raise FrameError(
            f"a frame does not belong here: its {name} is wrong", expected=expected, got=got, hint=SYNC_AGAIN
        )


def _check_versions(head: FrameHead, expect: FrameHead) -> None:
    if head.lineage != expect.lineage:
        raise VersionRestart(
            "a frame comes from another run of the trainer",
            expected=f"stream {expect.lineage:016x}",
            got=f"stream {head.lineage:016x}",
            hint=_SEED_IT,
        )
    fault: tuple[type[VersionError], str, str] | None = None
    if head.base > expect.base:
        fault = VersionGap, "a frame starts from a later version than is held", _SEED_IT
    elif head.version <= expect.base:
        fault = VersionReplay, "a frame leads to a version that is already held", "drop it"
    elif (head.base, head.version) != (expect.base, expect.version):
        fault = VersionError, "a frame leads from or to another version", _SEED_IT
    if fault:
        kind, what, hint = fault
        raise kind(
            what,
            expected=f"{expect.base} -> {expect.version}",
            got=f"{head.base} -> {head.version}",
            hint=hint,
        )
