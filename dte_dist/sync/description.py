"""Descriptions taken apart again: what another rank said of itself, checked before anything of it is used.

A description is three int64 lengths and three parts: JSON, the manifest of the module, and the manifest of
`into` or nothing. All ranks read the same bytes (`Communicator.broadcast_bytes` guards them), so what is
wrong with them is the same error on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import DTYPES, Manifest
from dte_dist.options import options_of, shared
from dte_dist.plan.model_map import WireTypes

__all__ = ["MOST_BYTES", "Description", "check_counts"]

MOST_BYTES: Final = 1 << 28
"""Most bytes of a description: two manifests of the most text that they may have, and dtypes by name."""

_HEAD: Final = 24
_KEYS: Final = {"options", "wire", "partial", "nccl", "trained", "world"}
_SAME: Final = "run the same version of dte_dist on every rank"


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """The description of one rank, and of every rank that is placed like it.

    Attributes:
        options: those that all ranks must say alike, see `options.shared`.
        wire: on a source, the dtypes to send.
        partial: a receiver asks for some of the slots only.
        nccl: the rank can send its data over NCCL.
        trained: whether the module is trained, and whether the one to receive into is.
        manifest: of the module.
        into: of the module to receive into, if there is another.
        world: name of the default world of the rank, see `liveness.groups.world_of`.
    """

    options: dict[str, Any]
    wire: WireTypes
    partial: bool
    nccl: bool
    trained: tuple[bool, bool]
    manifest: Manifest
    into: Manifest | None
    world: str = ""

    @classmethod
    def parse(cls, data: bytes, *, rank: int, size: int) -> Description:
        """Read a description.

        Args:
            data: as `describe` wrote it.
            rank: who wrote it, for errors.
            size: ranks in the group.

        Raises:
            LayoutMismatch: something in it is not sound; names the rank.
        """
        try:
            return cls._read(data, size)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, LayoutMismatch) as error:
            text = str(error)[:400]
            raise LayoutMismatch(
                f"the description of a rank is not sound: {text}", ranks=[rank], hint=_SAME
            ) from error

    @classmethod
    def _read(cls, data: bytes, size: int) -> Description:
        head, manifest, into = _parts(data)
        said = json.loads(head)
        if not isinstance(said, dict) or said.keys() != _KEYS:
            raise ValueError("its JSON has other keys")
        if not isinstance(said["world"], str):
            raise ValueError("the name of its world is no text")
        own, other = said["trained"]
        if any(type(flag) is not bool for flag in (said["partial"], said["nccl"], own, other)):
            raise ValueError("partial, nccl or trained is neither true nor false")
        _check_options(said["options"], size)
        first = Manifest.from_bytes(manifest)
        second = Manifest.from_bytes(into) if into else None
        wire = _wire(said["wire"])
        flags = (said["partial"], said["nccl"])
        return cls(said["options"], wire, *flags, (own, other), first, second, said["world"])

    @property
    def manifests(self) -> tuple[Manifest | None, Manifest | None]:
        """Of the module, and of the one to receive into."""
        return self.manifest, self.into

    @property
    def numbers(self) -> int:
        """How many numbers the coordinates of a rank are, on all meshes of both manifests."""
        return sum(
            len(mesh.shape) for manifest in self.manifests if manifest is not None for mesh in manifest.meshes
        )


def check_counts(sizes: Sequence[int]) -> None:
    """Refuse sizes that no description can have, before anyone makes room for them.

    Raises:
        LayoutMismatch: names the rank and the number.
    """
    for rank, size in enumerate(sizes):
        if not _HEAD <= size <= MOST_BYTES:
            expected = f"{_HEAD} to {MOST_BYTES} bytes"
            raise LayoutMismatch(
                "a description cannot have this size", ranks=[rank], expected=expected, got=size, hint=_SAME
            )


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    if len(data) < _HEAD:
        raise ValueError(f"it has {len(data)} bytes")
    sizes = np.frombuffer(data[:_HEAD], np.int64).tolist()
    if min(sizes) < 0 or sum(sizes) != len(data) - _HEAD:
        raise ValueError(f"its parts have {', '.join(map(str, sizes))} bytes, all of it {len(data)}")
    first = _HEAD + sizes[0]
    second = _HEAD + sizes[0] + sizes[1]
    return data[_HEAD:first], data[first:second], data[second:]


def _check_options(said: Any, size: int) -> None:
    """Check that options are some that a call can have."""
    if not isinstance(said, dict) or said.keys() != shared(options_of()).keys():
        raise ValueError("its options are others")
    sources = said["src"]
    timeout = said["timeout"]
    if sources is not None and not (
        isinstance(sources, list)
        and sources
        and all(type(rank) is int and 0 <= rank < size for rank in sources)
        and len(set(sources)) == len(sources)
    ):
        raise ValueError(f"its sources are not different ranks of a group of {size}")
    if type(timeout) not in (int, float):
        raise ValueError("its timeout is no number")
    options_of(**{name: value for name, value in said.items() if name != "src"})


def _wire(said: Any) -> WireTypes:
    if said is None or said == "receiver":
        return said
    if not isinstance(said, dict) or not all(
        isinstance(dtype, str) and dtype in DTYPES for dtype in said.values()
    ):
        raise ValueError("its wire dtypes are no element types by name")
    return said
