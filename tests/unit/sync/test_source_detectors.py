"""Unit tier, no ranks: a source asks a detector of the caller, and what that may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dte_dist.detect.detector import Detector
from dte_dist.plan.model_map import WireTypes
from tests.unit.sync.pair import Pair, bits, same_bits, weights


def differing(live: Tensor, known: Tensor) -> Tensor:
    return (live != known).nonzero().flatten()


def test_a_detector_of_the_caller_sees_integer_bits_and_its_answer_is_sent() -> None:
    seen = []

    def detector(live: Tensor, known: Tensor) -> Tensor:
        seen.append((live.dtype, known.dtype, len(live), len(known)))
        return differing(live, known)

    pair = Pair(weights(100, dtype=torch.bfloat16), detector=detector)
    pair.trained["w0"][[1, 50]] = 9.0
    assert pair.sync() == 2 and same_bits(pair.trained, pair.copy)
    assert seen == [(torch.int16, torch.int16, 100, 100)]


def test_a_detector_may_name_too_many() -> None:
    pair = Pair(weights(100), detector=lambda live, known: torch.arange(len(live)))
    pair.trained["w0"][7] = 9.0
    assert pair.sync() == 100 and same_bits(pair.trained, pair.copy)


RUBBISH: dict[str, tuple[Any, type[Exception]]] = {
    "descending": (lambda live, known: torch.tensor([3, 2]), ValueError),
    "twice": (lambda live, known: torch.tensor([2, 2]), ValueError),
    "negative": (lambda live, known: torch.tensor([-1, 2]), ValueError),
    "past the end": (lambda live, known: torch.tensor([1, len(live)]), ValueError),
    "beyond 32 bits": (lambda live, known: torch.tensor([1, 1 << 32]), ValueError),
    "a mask": (lambda live, known: live != known, ValueError),
    "floats": (lambda live, known: torch.tensor([1.0]), ValueError),
    "two dimensions": (lambda live, known: torch.tensor([[1], [2]]), ValueError),
    "a list": (lambda live, known: [1, 2], AttributeError),
    "nothing": (lambda live, known: None, AttributeError),
    "raising": (lambda live, known: 1 // 0, ZeroDivisionError),
}


@pytest.mark.parametrize(("detector", "kind"), RUBBISH.values(), ids=RUBBISH)
def test_a_detector_that_returns_rubbish_fails_in_prepare_and_nothing_moves(
    detector: Detector, kind: type[Exception]
) -> None:
    pair = Pair(weights(100), detector=detector)
    before = bits(pair.source.snapshot.bits[4])
    pair.trained["w0"][:5] += 1
    with pytest.raises(kind) as caught:
        pair.prepare()
    assert type(caught.value) is kind
    pair.rollback()
    assert (
        pair.source.changed == 0
        and pair.source.state.version == 1
        and bits(pair.source.snapshot.bits[4]) == before
    )
    pair.detector = None
    assert pair.sync() == 5 and same_bits(pair.trained, pair.copy)


def test_every_sync_may_have_another_detector() -> None:
    pair = Pair(weights(100))
    asked = []

    def named(name: str) -> Detector:
        return lambda live, known: (asked.append(name), differing(live, known))[1]

    for detector in (named("one"), None, named("two"), named("two"), None):
        pair.detector = detector
        pair.trained["w0"][len(asked)] += 1
        assert pair.sync() == 1 and same_bits(pair.trained, pair.copy)
    assert asked == ["one", "two", "two"]


@pytest.mark.parametrize("wire", [None, {"w": "bfloat16"}], ids=["as held", "cast"])
def test_a_detector_gets_copies_and_what_it_does_to_them_is_nobodys_loss(wire: WireTypes) -> None:
    def spoiling(live: Tensor, known: Tensor) -> Tensor:
        found = differing(live, known)
        live.fill_(7)
        known.fill_(7)
        return found

    copy = {"w": torch.zeros(100, dtype=torch.bfloat16 if wire else torch.float32)}
    pair = Pair({"w": torch.randn(100)}, copy, wire=wire, detector=spoiling)
    for step in range(3):
        pair.trained["w"][step::10] += 1
        trained = bits(pair.trained["w"])
        assert pair.sync() == 10
        assert bits(pair.trained["w"]) == trained
        assert (
            bits(pair.copy["w"])
            == bits(pair.trained["w"].to(copy["w"].dtype))
            == bits(pair.source.snapshot.bits[copy["w"].itemsize])
        )
