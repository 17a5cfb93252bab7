"""The named-tensor payload of the Delta Transfer Engine: what its tensors mean, written, read and checked.

| name | tensor |
|---|---|
| `__awex_delta_header__` | int64[6]: magic 0x41574558, codec 1, version, base version, pairs, whole tensors |
| `w@delta_idx` | flat row-major positions in `w`, ascending; int32, int64 beyond 2^31 elements |
| `w@delta_val` | the new values at these positions, in the dtype of `w` |
| `w` | all of `w`, instead of the pair |

A tensor that did not change is left out. A sender that is one of several sends its parts
(`plan.sender_space`): `w@delta_idx` still counts in all of `w`, and a whole `w` is all that the sender
holds of it.

A full payload has every tensor, whole. In the Delta Transfer Engine it has no header: that is how receivers
tell it from a delta, and they take its version from the caller. Here it has a header, too, with base version
-1, unless the sender asks for none. Both kinds are read; without a header, the `Payload` around the tensors
says the version.

No tensor says a lineage (`Payload.lineage`). Its number travels beside the tensors where the transport
carries it, and counts as not known where it does not.

Nothing that is read is believed: `read_payload` checks what a payload says about itself,
`sync.named_changes` what it says about the tensors it will be written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from dte_dist import kernels
from dte_dist.codec.header import NONE
from dte_dist.errors import FrameError, LayoutMismatch, VersionError
from dte_dist.layout import brought_home
from dte_dist.layout.named import named
from dte_dist.tensors.flat import BITS

__all__ = [
    "CODEC",
    "HEADER",
    "INDEX",
    "MAGIC",
    "VALUE",
    "Change",
    "Payload",
    "check_version",
    "flat_bits",
    "index_dtype",
    "payload_of",
    "read_payload",
    "refuse_reserved",
    "write_payload",
]

HEADER: Final = "__awex_delta_header__"
INDEX: Final = "@delta_idx"
VALUE: Final = "@delta_val"
MAGIC: Final = 0x41574558
CODEC: Final = 1
_FIELDS: Final = ("magic", "codec", "version", "base version", "sparse count", "dense count")
_AGAIN: Final = "nothing of it was applied; push again, in full if it stays"


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Everything that leads from one version of what a sender holds to the next, as named tensors; nobody
    writes to them any more.

    Attributes:
        version: that it makes.
        base_version: that it starts from; -1 if it is full.
        full: every tensor is there, whole.
        tensors: by name, whole tensors or pairs of positions and values, and a header, which a full payload
            may lack; see `codec.named_tensors`.
        lineage: random number of the run that holds `version`, 0 if not known; receivers tell a restart by
            it.
        base_lineage: the same of `base_version`; it differs where a push in between may or may not have
            arrived.
        sender: rank of the sender in the plan; 0 if there is no plan.
        plan: digest of the plan, if the sender is one of several and sends its share of each tensor; empty if
            it sends whole tensors.

    Example:
        >>> payload = Payload(8, 7, False, {})
        >>> payload.nbytes, payload.sender
        (0, 0)
    """

    version: int
    base_version: int
    full: bool
    tensors: Mapping[str, Tensor]
    lineage: int = 0
    base_lineage: int = 0
    sender: int = 0
    plan: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors.

        Example:
            >>> dte_dist.payload_of({"w": torch.zeros(3, dtype=torch.bfloat16)}, version=1).nbytes
            6
        """
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New values of one tensor.

    Attributes:
        name: of the tensor.
        positions: flat row-major positions, ascending; None if the values are the whole tensor.
        values: one for each position; or of the shape of the tensor.
    """

    name: str
    positions: Tensor | None
    values: Tensor


def index_dtype(numel: int) -> torch.dtype:
    """Return the dtype of positions in a tensor of so many elements.

    Example:
        >>> index_dtype(1 << 31), index_dtype((1 << 31) + 1)
        (torch.int32, torch.int64)
    """
    return torch.int32 if numel <= 1 << 31 else torch.int64


def flat_bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers in row-major order, in one dimension; no copy if the tensor is
    contiguous.

    Example:
        >>> flat_bits(torch.tensor([[-0.0]]))
        tensor([-2147483648], dtype=torch.int32)
    """
    return tensor.detach().view(BITS[tensor.element_size()]).contiguous().view(-1)


def refuse_reserved(names: Iterable[str]) -> None:
    """Refuse names that mean something else in a payload.

    Raises:
        LayoutMismatch: names it.
    """
    for name in names:
        if name == HEADER or name.endswith((INDEX, VALUE)):
            raise LayoutMismatch(
                "the name is reserved in payloads", tensor=name, hint="give the tensor another name"
            )


def check_version(version: int) -> None:
    """Check that a number can be a version.

    Raises:
        ValueError: it is no int, or negative.
        VersionError: it is too large.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"a version is an int of at least 0, not {version!r}")
    if version >= 1 << 62:
        raise VersionError(
            "the version does not fit", expected="< 2^62", got=version, hint="count versions from 1"
        )


def write_payload(
    version: int,
    base: int,
    changes: Sequence[Change],
    *,
    lineage: int = 0,
    base_lineage: int = 0,
    header: bool = True,
) -> Payload:
    """Write changes as a payload, which takes over their tensors.

    Args:
        version: that the payload makes.
        base: version that it starts from, -1 for a full one.
        changes: all tensors, whole, for a full one.
        lineage, base_lineage: see `Payload`.
        header: whether a full payload has a header; a delta has one in any case.

    Example:
        >>> changes = [Change("w", None, torch.zeros(2))]
        >>> [sorted(write_payload(1, -1, changes, header=header).tensors) for header in (True, False)]
        [['__awex_delta_header__', 'w'], ['w']]
    """
    sparse = sum(change.positions is not None for change in changes)
    counts = (MAGIC, CODEC, version, base, sparse, len(changes) - sparse)
    tensors: dict[str, Tensor] = {}
    if header or base != NONE:
        tensors[HEADER] = torch.tensor(counts, dtype=torch.int64, device="cpu")
    for change in changes:
        if change.positions is None:
            tensors[change.name] = change.values
        else:
            tensors |= {change.name + INDEX: change.positions, change.name + VALUE: change.values}
    return Payload(version, base, base == NONE, MappingProxyType(tensors), lineage, base_lineage)


def payload_of(
    tensors: Mapping[str, Tensor], version: int | None = None, *, lineage: int = 0, base_lineage: int = 0
) -> Payload:
    """Return the payload that bare named tensors are, such as those that a Delta Transfer Engine sends.

    Only the header is looked at; the rest is checked where the payload is read.

    Args:
        tensors: by name, with a header; without one they are a full payload.
        version: that the payload makes. Needed where there is no header, compared with it where there is one.
        lineage, base_lineage: see `Payload`, if they are known.

    Raises:
        FrameError: the header is not sound, or of another version; or there is none, and no `version`.
        ValueError, VersionError: `version` is no version.

    Example:
        >>> full = payload_of({"w": torch.zeros(2)}, version=2)
        >>> delta = payload_of({"__awex_delta_header__": torch.tensor([0x41574558, 1, 3, 2, 0, 0])})
        >>> full.full, full.version, delta.full, delta.base_version, delta.version
        (True, 2, False, 2, 3)
    """
    if version is not None:
        check_version(version)
    if HEADER in tensors:
        said, base = _header(tensors)[2:4]
    elif version is None:
        what, expected = "a payload without a header is a full one, and does not say its version", "version="
        hint = "pass version=, the number that its sender gave it"
        raise FrameError(what, expected=expected, got="none", hint=hint)
    else:
        said, base = version, NONE
    if version not in (None, said):
        what, hint = "a payload makes another version", "ask for the version that it makes"
        raise FrameError(what, tensor=HEADER, expected=version, got=said, hint=hint)
    return Payload(said, base, base == NONE, tensors, lineage, base_lineage)


def read_payload(payload: Payload) -> tuple[Change, ...]:
    """Read the changes of a payload and check all that can be checked without the tensors they are for.

    Returns:
        The changes, which share the memory of the payload.

    Raises:
        FrameError: something in it is not sound; names it.
        LayoutMismatch: a tensor in it is not one array of elements; names it.
    """
    if HEADER not in payload.tensors:
        return _read_bare(payload)
    _, _, version, base, sparse, dense = _header(payload.tensors)
    said = (payload.version, payload.base_version, payload.full)
    if said != (version, base, base == NONE):
        raise _bad(
            "the header of a payload contradicts it",
            HEADER,
            f"version, base, full {said}",
            (version, base, base == NONE),
        )
    changes = _collect(payload.tensors)
    pairs = sum(change.positions is not None for change in changes)
    if (pairs, len(changes) - pairs) != (sparse, dense):
        raise _bad(
            "a payload is not complete",
            HEADER,
            f"{sparse} pairs, {dense} whole",
            f"{pairs} pairs, {len(changes) - pairs} whole",
        )
    if payload.full and pairs:
        raise _bad("a full payload has changes that are not whole", HEADER, "0 pairs", f"{pairs} pairs")
    _check_order(changes)
    return changes


def _read_bare(payload: Payload) -> tuple[Change, ...]:
    """Read a payload that has no header: it can only be a full one, in which all tensors are whole."""
    said = (payload.full, payload.base_version)
    if said != (True, NONE):
        expected = f"full, base {(True, NONE)}, or a header"
        raise _bad("a payload without a header is a full one", HEADER, expected, said)
    for name in payload.tensors:
        if isinstance(name, str) and name.endswith((INDEX, VALUE)):
            what = "a payload without a header is a full one, and this is part of a delta"
            raise _bad(what, name, "a whole tensor, or a header", "neither")
    return _collect(payload.tensors)


def _header(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the six numbers of the header, having checked each by itself."""
    header = tensors.get(HEADER)
    if not isinstance(header, Tensor) or header.dtype is not torch.int64 or tuple(header.shape) != (6,):
        got = f"{header.dtype}{list(header.shape)}" if isinstance(header, Tensor) else type(header).__name__
        raise _bad("the header of a payload is none", HEADER, "int64[6]", got)
    said: list[int] = named({HEADER: header})[HEADER].tolist()
    _, _, version, base, *counts = said
    lows = (MAGIC, CODEC, max(base + 1, 0), NONE, 0, 0)
    highs = (MAGIC, CODEC, (1 << 62) - 1, (1 << 62) - 1, *[len(tensors)] * len(counts))
    for field, low, value, high in zip(_FIELDS, lows, said, highs, strict=True):
        if not low <= value <= high:
            raise _bad(
                f"the {field} of a payload is wrong",
                HEADER,
                low if low == high else f"{low} to {high}",
                value,
            )
    if version <= base:
        raise _bad("a payload leads backwards", HEADER, f"a version above {base}", version)
    return said


def _collect(tensors: Mapping[str, Tensor]) -> tuple[Change, ...]:
    """Put pairs together."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise _bad(
                "something in a payload is no tensor", str(name), "a name and a tensor", type(tensor).__name__
            )
    _, arrays = brought_home(named({name: tensor for name, tensor in tensors.items() if name != HEADER}))
    changes = []
    for name, tensor in arrays.items():
        if name.endswith(INDEX):
            changes.append(_pair(name.removesuffix(INDEX), tensor, arrays))
        elif not name.endswith(VALUE):
            changes.append(Change(name, None, tensor))
        elif name.removesuffix(VALUE) + INDEX not in arrays:
            raise _bad(
                "values without positions", name, f"{name.removesuffix(VALUE)}{INDEX} beside it", "none"
            )
    return tuple(changes)


def _pair(name: str, positions: Tensor, arrays: Mapping[str, Tensor]) -> Change:
    values = arrays.get(name + VALUE)
    if values is None:
        raise _bad("positions without values", name, f"{name}{VALUE} beside them", "none")
    if name in arrays:
        raise _bad("a tensor is there whole and in part", name, "one of them", "both")
    if positions.dtype not in (torch.int32, torch.int64):
        raise _bad("positions of another dtype", name, "int32 or int64", positions.dtype)
    if positions.dim() != 1 or values.shape != positions.shape:
        got = f"{list(positions.shape)} and {list(values.shape)}"
        raise _bad("positions and values are not of one length in one dimension", name, "[n] and [n]", got)
    return Change(name, positions.contiguous(), values)


def _check_order(changes: Sequence[Change]) -> None:
    """Check that positions ascend and none is negative; waits for an accelerator once."""
    sparse = [(change.name, change.positions) for change in changes if change.positions is not None]
    verdicts = [
        kernels.on(positions.device).strictly_increasing(positions, 1 << 62) for _, positions in sparse
    ]
    on_device = [verdict for verdict in verdicts if isinstance(verdict, Tensor)]
    if on_device and len(on_device) == len(verdicts):
        verdicts = torch.stack(on_device).tolist()
    for (name, _), sound in zip(sparse, verdicts, strict=True):
        if not sound:
            raise _bad(
                "positions of a payload are not sound", name, "strictly ascending, none negative", "others"
            )


def _bad(what: str, name: str, expected: object, got: object) -> FrameError:
    return FrameError(what, tensor=name, expected=expected, got=got, hint=_AGAIN)
