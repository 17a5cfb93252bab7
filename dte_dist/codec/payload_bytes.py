"""A payload as frames of bytes: a description, which is checked before anything is believed, and the data.

The description is JSON:

    {"format": 1, "version": int, "base_version": int, "full": bool, "lineage": int, "base_lineage": int,
     "sender": int, "plan": hex digits, "names": [name, ...], "dtypes": [dtype, ...], "shapes": [[size, ...],
     ...]}

and blanks up to a multiple of 8 bytes. The data are the tensors of all names end to end, those of the widest
elements first so that each lies at a multiple of its element size, and zeros up to a multiple of 8 bytes.
Each travels in frames, those of the description first: up to `PIECE` bytes, and behind them 8 bytes with a
checksum (`Kernels.checksum`) to which the number of the piece is added, and for data a checksum of the
description. So no frame is taken for another one. Where a piece begins follows from its number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.named_tensors import Payload
from dte_dist.errors import FrameError, LayoutMismatch
from dte_dist.tensors.dtypes import DTYPES, dtype_name
from dte_dist.tensors.flat import BITS, FlatTensors

__all__ = [
    "MOST_DATA",
    "MOST_TEXT",
    "PIECE",
    "Arrival",
    "Description",
    "Packed",
    "Piece",
    "frame_sizes",
    "piece_sizes",
]

PIECE: Final = 1 << 24
"""Most bytes of data in one piece."""

MOST_TEXT: Final = 1 << 26
"""Most bytes of a description."""

MOST_DATA: Final = 1 << 48
"""Most bytes of data of a payload."""

Piece = tuple[int, Callable[[Tensor], object]]
"""The bytes of a piece with its checksum, and what writes it into a uint8 buffer of that size."""

_FORMAT: Final = 1
_MOST: Final = 1 << 62
_SUM: Final = 8
_AGAIN: Final = "push again; if it stays, the ranks run different versions of dte_dist"


@dataclass(frozen=True, slots=True)
class Description:
    """All of a payload but the data.

    Attributes:
        head: version, base_version, full, lineage, base_lineage, sender, plan of the payload.
        names, dtypes, shapes: of its tensors.
    """

    head: tuple[int, int, bool, int, int, int, bytes]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, payload: Payload) -> Description:
        """Describe a payload.

        Raises:
            LayoutMismatch: a tensor in it cannot be sent; names it.
            ValueError: it is no payload of named tensors.
        """
        if not isinstance(payload, Payload) or not all(
            isinstance(tensor, Tensor) for tensor in payload.tensors.values()
        ):
            raise ValueError("a transport sends a Payload of named tensors")
        head = (
            payload.version,
            payload.base_version,
            payload.full,
            payload.lineage,
            payload.base_lineage,
            payload.sender,
            payload.plan,
        )
        for name, tensor in payload.tensors.items():
            dtype_name(name, tensor.dtype)
        shapes = tuple(tuple(tensor.shape) for tensor in payload.tensors.values())
        return cls(
            head, tuple(payload.tensors), tuple(tensor.dtype for tensor in payload.tensors.values()), shapes
        )

    def to_bytes(self) -> bytes:
        """Write the description.

        Example:
            >>> description = Description.of(Payload(3, -1, True, {"w": torch.zeros(2, 3)}))
            >>> Description.from_bytes(description.to_bytes()) == description, description.nbytes
            (True, 24)
        """
        version, base, full, lineage, base_lineage, sender, plan = self.head
        document = {
            "format": _FORMAT,
            "version": version,
            "base_version": base,
            "full": full,
            "lineage": lineage,
            "base_lineage": base_lineage,
            "sender": sender,
            "plan": plan.hex(),
            "names": self.names,
            "dtypes": [dtype_name(name, dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)],
            "shapes": self.shapes,
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        return text.ljust(-(-len(text) // 8) * 8)

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Read what `to_bytes` wrote; every part is checked.

        Raises:
            FrameError: the bytes are no description.
        """
        try:
            return cls._read(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"the description of a payload is damaged: {str(error)[:400]}"
            raise FrameError(what, hint=_AGAIN) from error

    @classmethod
    def _read(cls, document: Any) -> Description:
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"it is not in format {_FORMAT}")
        numbers = [_int(document[key], low) for key, low in _NUMBERS.items()]
        version, base, lineage, base_lineage, sender = numbers
        if type(document["full"]) is not bool:
            raise ValueError("full is neither true nor false")
        names, dtypes = _list(document["names"]), _list(document["dtypes"])
        shapes = [tuple(_int(size, 0) for size in _list(shape)) for shape in _list(document["shapes"])]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError("the names are not all different texts")
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes")
        for shape in shapes:
            if len(shape) > 64 or prod(size or 1 for size in shape) > _MOST:
                raise ValueError("a tensor cannot have such a shape")
        head = (
            version,
            base,
            document["full"],
            lineage,
            base_lineage,
            sender,
            bytes.fromhex(document["plan"]),
        )
        return cls(head, tuple(names), tuple(_dtype(name) for name in dtypes), tuple(shapes))

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return -(-sum(map(self.size, range(len(self.names)))) // 8) * 8

    def size(self, index: int) -> int:
        """Return the bytes of one tensor."""
        return prod(self.shapes[index]) * self.dtypes[index].itemsize

    def order(self) -> list[int]:
        """Return the indices of the tensors in the order of the data."""
        return sorted(range(len(self.names)), key=lambda index: -self.dtypes[index].itemsize)


_NUMBERS: Final = {"version": 0, "base_version": -1, "lineage": 0, "base_lineage": 0, "sender": 0}


class Packed:
    """A payload, ready to be sent.

    Args:
        payload: of tensors on any devices.

    Attributes:
        text: its description.
        nbytes: of the data.

    Raises:
        LayoutMismatch, ValueError: it cannot be sent.
    """

    def __init__(self, payload: Payload) -> None:
        description = Description.of(payload)
        self.text, self.nbytes = description.to_bytes(), description.nbytes
        if len(self.text) > MOST_TEXT or self.nbytes > MOST_DATA:
            got = f"{len(self.text)} and {self.nbytes} bytes"
            raise LayoutMismatch(
                "the payload is too large",
                expected=f"{MOST_TEXT} and {MOST_DATA}",
                got=got,
                hint="split the model",
            )
        self._tensors = [payload.tensors[description.names[index]] for index in description.order()]

    def frames(self) -> list[Piece]:
        """Return the frames, as many and as large as `frame_sizes` says."""
        text = FlatTensors([torch.frombuffer(bytearray(self.text), dtype=torch.uint8)], 1)
        return [*_pieces(text, 0), *_pieces(self._data(), zlib.crc32(self.text))]

    def _data(self) -> FlatTensors:
        """Return the bytes of all tensors on the device of the largest, and the zeros behind them."""
        device = (
            max(self._tensors, key=lambda tensor: tensor.numel() * tensor.element_size()).device
            if self._tensors
            else None
        )
        parts = [_bytes(tensor.detach().to(device)) for tensor in self._tensors]
        padding = self.nbytes - sum(map(len, parts))
        zeros = torch.zeros(padding, dtype=torch.uint8, device=device)
        return FlatTensors([*parts, zeros] if padding else parts, 1)


class Arrival:
    """A payload that is coming in.

    Args:
        text_bytes, nbytes: of its description and of its data, as the sender said.
        device: where the data will lie.

    Raises:
        MemoryError, RuntimeError: there is no room.
    """

    def __init__(self, text_bytes: int, nbytes: int, device: torch.device) -> None:
        self._text = _Bytes(text_bytes, device)
        self._data = _Bytes(nbytes, device)
        self._description: Description | None = None
        self._key = 0

    def take(self, number: int, frame: Tensor) -> None:
        """Take over a frame of the size that `frame_sizes` gives it; those of the description come first.

        Raises:
            FrameError: its checksum is wrong, or the description is damaged, or not of that much data.
        """
        first = self._text.count
        if number < first:
            self._text.take(number, frame, 0)
            if not self._text.missing:
                self._describe(self._text.whole().cpu().numpy().tobytes())
        else:
            self._data.take(number - first, frame, self._key)

    def _describe(self, text: bytes) -> None:
        description = Description.from_bytes(text)
        nbytes = len(self._data.bytes)
        if description.nbytes != nbytes:
            raise FrameError(
                "the data of a payload are not what it describes",
                expected=f"{nbytes} bytes",
                got=f"{description.nbytes} bytes",
                hint=_AGAIN,
            )
        self._description, self._key = description, zlib.crc32(text)

    def payload(self) -> Payload:
        """Return the payload; its tensors are views of one buffer.

        Raises:
            FrameError: a frame has not come.
        """
        self._text.whole()
        data, described = self._data.whole(), self._description
        if described is None:
            raise FrameError("a payload has no description", hint=_AGAIN)
        tensors: dict[str, Tensor] = dict.fromkeys(described.names, data)
        begin = 0
        for index in described.order():
            end = begin + described.size(index)
            elements = data[begin:end].view(described.dtypes[index])
            tensors[described.names[index]] = elements.view(described.shapes[index])
            begin = end
        version, base, full, lineage, base_lineage, sender, plan = described.head
        return Payload(version, base, full, MappingProxyType(tensors), lineage, base_lineage, sender, plan)


class _Bytes:
    """Bytes that come in pieces.

    Attributes:
        bytes: uint8, as far as they have come.
        count: of their pieces.
        missing: numbers of those that have not come.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.count = len(piece_sizes(nbytes))
        self.missing = set(range(self.count))

    def take(self, number: int, piece: Tensor, key: int) -> None:
        """Take over a piece of the bytes that `key` stands for."""
        data, said = piece[:-_SUM], piece[-_SUM:].view(torch.int64)
        if int(_checksum(data)) != int(said - _place_sum(key, number)):
            raise FrameError("a piece of a payload is damaged: its checksum is wrong", hint=_AGAIN)
        self.bytes[number * PIECE : number * PIECE + len(data)].copy_(data)
        self.missing.discard(number)

    def whole(self) -> Tensor:
        """Return all of them, uint8.

        Raises:
            FrameError: a piece has not come.
        """
        if self.missing:
            missing = f"{len(self.missing)} pieces are missing"
            raise FrameError("a payload is not complete", got=missing, hint=_AGAIN)
        return self.bytes


def frame_sizes(text_bytes: int, nbytes: int) -> list[int]:
    """Return the bytes of each frame of a payload whose description and data are so long.

    Example:
        >>> frame_sizes(40, PIECE + 8)
        [48, 16777224, 16]
    """
    return [*piece_sizes(text_bytes), *piece_sizes(nbytes)]


def piece_sizes(nbytes: int) -> list[int]:
    """Return the bytes of each piece of so much data, checksums included.

    Example:
        >>> piece_sizes(PIECE + 8)
        [16777224, 16]
    """
    return [min(PIECE, nbytes - begin) + _SUM for begin in range(0, nbytes, PIECE)]


def _pieces(flat: FlatTensors, key: int) -> list[Piece]:
    """Return the pieces of some bytes."""
    return [(size, partial(_write, flat, number, key)) for number, size in enumerate(piece_sizes(len(flat)))]


def _write(flat: FlatTensors, number: int, key: int, place: Tensor) -> None:
    data, begin = place[:-_SUM], number * PIECE
    if place.device == flat.device:
        kernels.on(flat.device).read(flat, begin, data)
    else:
        staged = torch.empty(len(data), dtype=torch.uint8, device=flat.device)
        kernels.on(flat.device).read(flat, begin, staged)
        data.copy_(staged)
    place[-_SUM:].view(torch.int64).fill_(_checksum(data)).add_(_place_sum(key, number))


def _checksum(data: Tensor) -> int | Tensor:
    return kernels.on(data.device).checksum(data)


def _place_sum(key: int, number: int) -> int:
    """Return an int64 that is added to the checksum of a piece: so it is not taken for another one."""
    mixed = (key << 32 | number) * 0x9E3779B97F4A7C15 % (1 << 64)
    return mixed - (1 << 64 if mixed >> 63 else 0)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order; no copy if it is contiguous."""
    return tensor.contiguous().view(BITS[tensor.element_size()]).reshape(-1).view(torch.uint8)


def _int(value: Any, low: int) -> int:
    if type(value) is not int or not low <= value < _MOST:
        raise ValueError(f"{str(value)[:40]} is no number from {low} to 2^62")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a list was expected, not a {type(value).__name__}")
    return value


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{str(name)[:40]!r} is no element type")
    return DTYPES[name]
