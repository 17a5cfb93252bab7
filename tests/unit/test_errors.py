"""Unit tier, no ranks: errors that travel to other ranks come out as the same class with the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dte_dist import errors
from dte_dist.errors import (
    DeltaError,
    FrameError,
    LayoutMismatch,
    PeerLost,
    SyncFailed,
    VersionGap,
    from_wire,
    to_wire,
)

FAMILY = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]
any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=()))


def told(error: BaseException, size: int = 256) -> Exception:
    back = from_wire(to_wire(error, size))
    assert back is not None
    return back


@pytest.mark.parametrize("kind", [*FAMILY, ValueError])
def test_every_class_of_the_family_comes_back_as_itself(kind: type[Exception]) -> None:
    back = told(kind("what is wrong\nand how"))
    assert type(back) is kind and str(back) == "what is wrong\nand how"


@pytest.mark.parametrize("kind", FAMILY)
def test_one_except_clause_catches_the_family(kind: type[Exception]) -> None:
    assert issubclass(kind, DeltaError) and issubclass(kind, RuntimeError)


@pytest.mark.parametrize(
    "error",
    [KeyError("w"), ZeroDivisionError("division by zero"), UnicodeDecodeError("utf-8", b"", 0, 1, "bad")],
)
def test_an_error_from_outside_becomes_sync_failed_and_keeps_its_name(error: Exception) -> None:
    back = told(error)
    assert type(back) is SyncFailed and str(back) == f"{type(error).__name__}: {error}"


def test_a_subclass_travels_as_the_class_of_the_family_that_it_is_one_of() -> None:
    class Special(VersionGap):
        pass

    assert type(told(Special("lost one"))) is VersionGap and str(told(Special("lost one"))) == "lost one"
    namesake = type("FrameError", (DeltaError,), {})
    assert type(told(namesake("another"))) is DeltaError, "it goes by the class, not by its name"


def test_every_text_can_be_told() -> None:
    """Half of a character, which JSON can spell and so a name of another rank may have, cannot be
    encoded.
    """
    error = LayoutMismatch("shapes differ", tensor="w\ud800é", got="\udfff")
    assert str(error) == "shapes differ [tensor 'w\\ud800é'; got \\udfff]"


def test_zeros_are_no_error() -> None:
    assert from_wire(bytes(64)) is None and from_wire(b"") is None


def test_an_error_without_text_is_still_an_error() -> None:
    assert type(told(PeerLost(""))) is PeerLost
    assert str(told(RuntimeError())) == "RuntimeError: "


def test_a_name_that_nobody_knows_becomes_sync_failed() -> None:
    assert type(from_wire(b"FromALaterVersion\ntext\0\0")) is SyncFailed


@pytest.mark.parametrize("text", ["\u00e9\u00e9", "\u4f60\u597d", "\U0001f525\U0001f525"])
def test_a_cut_in_the_middle_of_a_character_drops_that_character_only(text: str) -> None:
    whole = len("FrameError\n") + len(text.encode())
    for size in range(len("FrameError\n"), whole):
        data = to_wire(FrameError(text), size)
        assert len(data) == size
        assert str(from_wire(data)) == text[: (size - len("FrameError\n")) // len(text[0].encode())]
    assert str(told(FrameError(text), whole)) == text


def test_a_text_that_utf8_cannot_say_is_told_all_the_same() -> None:
    assert str(told(OSError("no such file: caf\udce9"))) == r"OSError: no such file: caf\udce9"


@given(st.sampled_from([*FAMILY, ValueError, OSError]), any_text, st.integers(0, 300))
def test_any_text_becomes_exactly_the_size_asked_for_and_never_raises(
    kind: type[Exception], text: str, size: int
) -> None:
    data = to_wire(kind(text), size)
    assert len(data) == size
    from_wire(data)


@given(st.sampled_from(FAMILY), st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_text_that_fits_comes_back_letter_for_letter(kind: type[Exception], text: str) -> None:
    size = len(kind.__name__) + 1 + len(text.encode())
    for room in (size, size + 9):
        back = told(kind(text), room)
        assert type(back) is kind and str(back) == text


@given(st.binary(max_size=100))
def test_any_bytes_are_read_as_some_error_or_none(data: bytes) -> None:
    assert isinstance(from_wire(data), Exception | None)


def test_a_lost_peer_is_told_with_its_ranks() -> None:
    for lost, late in (((), False), ((3, 1), True), ((2,), False)):
        back = told(PeerLost("gone", lost=lost, late=late))
        assert type(back) is PeerLost and (str(back), back.lost, back.late) == ("gone", lost, late)


def test_the_text_names_slot_ranks_both_sides_and_the_way_out() -> None:
    error = LayoutMismatch(
        "shapes differ", tensor="a.b", ranks=(2, 5), expected=(4, 4), got=(4, 5), hint="build the same model"
    )
    assert (
        str(error) == "shapes differ [tensor 'a.b'; ranks 2, 5; expected (4, 4); got (4, 5)]. "
        "Hint: build the same model."
    )
    assert str(VersionGap("a gap")) == "a gap"
    assert str(DeltaError("zero counts", expected=0, got="")) == "zero counts [expected 0; got ]"
