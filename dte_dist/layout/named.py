"""Named tensors as an engine gets them: pairs or a mapping, each checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.entries import EntryBuilder, wait_collective
from dte_dist.layout.names import refuse_duplicates
from dte_dist.tensors.devices import home_of
from dte_dist.tensors.live import LiveTensors

__all__ = ["NamedTensors", "Slots", "named", "read_named", "refuse_difference", "slots_of"]

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A mapping, or pairs as `module.named_parameters()` gives them."""

Slots = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""By name, shape and dtype."""


def named(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return named tensors as a dict, in the order given.

    Args:
        tensors: plain tensors of any shape, strides and device; elements of 1, 2, 4 or 8 bytes.

    Raises:
        LayoutMismatch: a name comes twice, or a tensor cannot be sent as it is; names it.
        ValueError: an item is no pair of a name and a tensor.

    Example:
        >>> list(named([("w", torch.zeros(3))]))
        ['w']
    """
    pairs = [_pair(item) for item in (tensors.items() if isinstance(tensors, Mapping) else tensors)]
    refuse_duplicates(name for name, _ in pairs)
    describer = EntryBuilder()
    return {name: _usable(describer, name, tensor) for name, tensor in pairs}


def _pair(item: Any) -> tuple[str, Tensor]:
    match item:
        case (str(name), Tensor() as tensor):
            return name, tensor
    kinds = (
        ", ".join(type(part).__name__ for part in item) if isinstance(item, tuple) else type(item).__name__
    )
    raise ValueError(f"a named tensor is (name, tensor), not ({kinds})")


def _usable(describer: EntryBuilder, name: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        hint = (
            "give tensor.full_tensor(), or tensor.to_local() under a name of its own; "
            "delta_broadcast takes DTensors as they are"
        )
        raise LayoutMismatch("a DTensor is only a part of its tensor", tensor=name, hint=hint)
    if tensor.dtype is torch.complex128:
        raise LayoutMismatch(
            "elements of 16 bytes cannot be sent",
            tensor=name,
            got=tensor.dtype,
            hint="give torch.view_as_real(tensor)",
        )
    describer.entry(name, tensor)
    return wait_collective(tensor)


def read_named(tensors: Mapping[str, Tensor]) -> LiveTensors:
    """Return what the hot path wants to know of named tensors; on one device, see `tensors.devices`.

    Raises:
        LayoutMismatch: they are on several accelerators; names some.

    Example:
        >>> read_named({"w": torch.zeros(2, 3)}).numels.tolist()
        [6]
    """
    held = list(tensors.values())
    home, away = home_of(held, list(tensors))
    read = replace(LiveTensors.of(held), device=home)
    return read.at_home(away) if away else read


def slots_of(tensors: Mapping[str, Tensor]) -> Slots:
    """Return shape and dtype of each tensor.

    Example:
        >>> slots_of({"w": torch.zeros(2, 3)})
        {'w': ((2, 3), torch.float32)}
    """
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def refuse_difference(expected: Slots, got: Slots, *, what: str, ranks: Sequence[int] | None = None) -> None:
    """Compare names, shapes and dtypes.

    Args:
        expected: as it was agreed on.
        got: as it is now.
        what: whose tensors these are, for the text of the error.
        ranks: whose, for the same.

    Raises:
        LayoutMismatch: names what is missing, extra or different.
    """
    for fault, names in (
        ("missing", expected.keys() - got.keys()),
        ("not expected", got.keys() - expected.keys()),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:8])) + (
                f" and {len(names) - 8} more" if len(names) > 8 else ""
            )
            hint = "give the same names on both sides; an iterator that was used before gives none"
            raise LayoutMismatch(f"{what}: {fault} are {shown}", tensor=min(names), ranks=ranks, hint=hint)
    for name, (shape, dtype) in expected.items():
        for kind, wanted, found in zip(("shape", "dtype"), (shape, dtype), got[name], strict=True):
            if wanted != found:
                raise LayoutMismatch(
                    f"{what}: another {kind}", tensor=name, ranks=ranks, expected=wanted, got=found
                )
