"""Payloads written into tensors that have no version: in place, or into copies; all checks come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dte_dist.codec.named_tensors import Change, Payload, read_payload
from dte_dist.layout.named import NamedTensors, named
from dte_dist.sync.named_changes import segments_of
from dte_dist.sync.named_sides import Incoming, WholeTensors
from dte_dist.sync.versioned_copy import VersionedCopy

__all__ = ["apply_payload", "reconstruct_against_base", "stage"]


def reconstruct_against_base(payload: Payload, base_tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors that a payload makes of a base, in full.

    Args:
        payload: full or a delta; that the base is its base version is the caller's to know.
        base_tensors: pairs or a mapping; they are left as they are.

    Returns:
        By name, new contiguous tensors on the devices of the base, which share no memory with base or
        payload.

    Raises:
        FrameError, LayoutMismatch: the payload is damaged or does not fit the base; names the tensor.

    Example:
        >>> tracker, weights = dte_dist.DeltaTracker(), {"w": torch.ones(2)}
        >>> payload = tracker.diff(weights, version=1)
        >>> dte_dist.reconstruct_against_base(payload, {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    base = named(base_tensors)
    changes = read_payload(payload)
    side = WholeTensors()
    local, incoming = side.targets(base)
    side.check(payload, changes, incoming, local.tensors)
    whole = {change.name for change in changes if change.positions is None}
    made = {name: _copy(tensor, filled=name not in whole) for name, tensor in base.items()}
    apply_payload(payload, made)
    return made


def apply_payload(payload: Payload, tensors: Mapping[str, Tensor]) -> None:
    """Write a payload into named tensors in place, whatever version they hold; all checks come first.

    Raises:
        FrameError, LayoutMismatch: the payload is damaged or does not fit the tensors; names the tensor.

    Example:
        >>> weights = {"w": torch.zeros(2)}
        >>> apply_payload(dte_dist.payload_of({"w": torch.ones(2)}, version=1), weights)
        >>> weights["w"]
        tensor([1., 1.])
    """
    changes = read_payload(payload)
    side = WholeTensors()
    local, incoming = side.targets(tensors)
    side.check(payload, changes, incoming, local.tensors)
    copy = VersionedCopy(incoming.spaces, list(incoming.slots))
    copy.begin_with(lambda: local, incoming.index_maps)
    stage(copy, incoming, payload.sender, changes)
    copy.apply()


def _copy(tensor: Tensor, *, filled: bool) -> Tensor:
    """Return a contiguous tensor of the same kind, with the same bits if it is to be filled."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if filled:
        copy.copy_(tensor.detach())
    return copy


def stage(copy: VersionedCopy, incoming: Incoming, sender: int, changes: Sequence[Change]) -> None:
    """Stage the changes of one sender in each of a receiver's spaces of their width."""
    for width, segment in segments_of(changes, incoming.senders[sender]):
        for number, space in incoming.spaces.items():
            if space.width == width:
                copy.stage(number, sender, segment)
