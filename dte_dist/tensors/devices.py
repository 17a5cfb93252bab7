"""On which device the tensors of a rank are looked at, where they lie on two.

All that finds, codes and writes changes works on one device. FSDP2's CPUOffloadPolicy leaves the tensors of a
rank on
two: parameters on the CPU, buffers on the accelerator. So the device that holds more bytes is home:

1. `home_of` says which one that is, whenever a tensor is new or has moved, and which tensors are away.
2. A reading copies these into `StandIns` at home. Sources compare and send them, receivers write to them.
3. `StandIns.write_back` puts what was written to a stand-in into the tensor that it stands for, in place.

It costs room for the stand-ins during a sync, at most half of the rank's bytes, and at each reading one copy
across for each tensor that is away, which waits for the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dte_dist._torch_compat import versions
from dte_dist.errors import LayoutMismatch
from dte_dist.kernels import BITS

__all__ = ["StandIns", "brought_home", "home_of", "one_device"]

_CPU: Final = torch.device("cpu")
_SHOWN: Final = 4
"""Tensors that an error names."""

_device_of: Callable[[Tensor], torch.device] = attrgetter("device")
"""Asks a tensor for its device; nothing else here does, so that tests may tell devices apart on one."""


def home_of(tensors: Sequence[Tensor], names: Sequence[str]) -> tuple[torch.device, list[int]]:
    """Return the device that all tensors can be looked at on, and the indices of those that are on another.

    Args:
        tensors: of one rank, on one device or on the CPU and one accelerator.
        names: of their slots.

    Raises:
        LayoutMismatch: they are on several accelerators; names those that are not where the others are.

    Example:
        >>> home_of([torch.zeros(2), torch.zeros(3)], ["a", "b"])
        (device(type='cpu'), [])
    """
    devices = list(map(_device_of, tensors))
    found = set(devices)
    if len(found) < 2:
        return devices[0] if devices else _CPU, []
    if len(found - {_CPU}) > 1:
        _refuse_devices(devices, names, "are on several accelerators")
    held = dict.fromkeys(found, 0)
    for tensor, device in zip(tensors, devices, strict=True):
        held[device] += tensor.numel() * tensor.element_size()
    home = max(found, key=lambda device: (held[device], device == _CPU))
    return home, [index for index, device in enumerate(devices) if device != home]


def brought_home(
    tensors: dict[str, Tensor],
) -> tuple[torch.device, dict[str, Tensor]]:
    """Return the device that named tensors can be read on, and all of them there: copies where they are away.

    Raises:
        LayoutMismatch: as `home_of`.

    Example:
        >>> brought_home({"w": torch.zeros(2)})
        (device(type='cpu'), {'w': tensor([0., 0.])})
    """
    names = list(tensors)
    held = list(tensors.values())
    home, away = home_of(held, names)
    if not away:
        return home, tensors
    stand_ins = StandIns.of(held, away, home)
    places = zip(away, stand_ins.places.tolist(), strict=True)
    return home, tensors | {names[index]: stand_ins.copies[place] for index, place in places}


def one_device(tensors: Sequence[Tensor], names: Sequence[str]) -> torch.device:
    """Return the device that all tensors are on.

    Args:
        tensors, names: as for `home_of`.

    Raises:
        LayoutMismatch: they are on several; names those that are not where most are.
    """
    devices = list(map(_device_of, tensors))
    if len(set(devices)) > 1:
        _refuse_devices(devices, names, "are on several devices")
    return devices[0] if devices else _CPU


def _refuse_devices(devices: Sequence[torch.device], names: Sequence[str], what: str) -> None:
    most = max(dict.fromkeys(devices), key=devices.count)
    others = [(name, device) for name, device in zip(names, devices, strict=True) if device != most]
    shown = ", ".join(f"{name!r} on {device}" for name, device in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    hint = f"move them to {most}, or leave them out with select="
    got = f"{shown}{more}, the other {devices.count(most)} on {most}"
    raise LayoutMismatch(f"the tensors of this rank {what}", tensor=others[0][0], got=got, hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class StandIns:
    """Copies at home of tensors that are away; names that are tied share one, as they share the tensor.

    Attributes:
        live: the tensors that are away, each memory once.
        copies: of each at home, contiguous, with its bits as they were when this was made.
        places: int64[tensors away], by their order which of `live` each of them is.
        indices: int64[tensors away], what each is among all tensors of the rank.
        writes: int64[live], how often each was written back to.
    """

    live: Sequence[Tensor]
    copies: Sequence[Tensor]
    places: np.ndarray
    indices: np.ndarray
    writes: np.ndarray
    _versions: np.ndarray

    @classmethod
    def of(cls, tensors: Sequence[Tensor], away: Sequence[int], home: torch.device) -> StandIns:
        """Copy the tensors with these indices to their home.

        Example:
            >>> stand_ins = StandIns.of([torch.zeros(2), torch.ones(3)], [1], torch.device("cpu"))
            >>> stand_ins.copies
            [tensor([1., 1., 1.])]
        """
        numbers: dict[object, int] = {}
        live: list[Tensor] = []
        places = []
        for index in away:
            tensor = tensors[index]
            key = (
                (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else index
            )
            if key not in numbers:
                numbers[key] = len(live)
                live.append(tensor)
            places.append(numbers[key])
        # A copy has a version counter, whatever the tensor has.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            copies = [_copied(tensor, home) for tensor in live]
        counted = np.array(versions(copies), np.int64)
        return cls(
            live,
            copies,
            np.array(places),
            np.array(away),
            np.zeros(len(live), np.int64),
            counted,
        )

    def write_back(self) -> None:
        """Write the copies that were written to into the tensors: addresses stay, counters move by one."""
        now = np.array(versions(self.copies), np.int64)
        for number in np.flatnonzero(now != self._versions).tolist():
            live, copy = self.live[number], self.copies[number]
            with torch.inference_mode(live.is_inference()), torch.no_grad():
                _bits(live).copy_(_bits(copy))
            self.writes[number] += 1
            self._versions[number] = now[number]

    def own_writes(self, writes: np.ndarray) -> np.ndarray:
        """Return how often a rank wrote to each of its tensors, where what it wrote to were stand-ins.

        Args:
            writes: int64[tensors of the rank], by what stands for each; those of stand-ins do not count.
        """
        own = writes.copy()
        own[self.indices] = 0
        first = np.unique(self.places, return_index=True)[
            1
        ]  # tied names share a counter, so one of them says it all
        own[self.indices[first]] = self.writes
        return own


def _copied(tensor: Tensor, home: torch.device) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=home)
    _bits(copy).copy_(_bits(tensor))
    return copy


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers where they lie: a copy of floats may change what is no number."""
    return tensor.detach().view(BITS[tensor.element_size()])
