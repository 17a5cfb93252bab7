"""What a caller can do about descriptions that do not fit together: options of a collective, or what
`Plan.between` is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["OF_COLLECTIVES", "OF_PLANS", "Hints"]


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints in the words of one kind of caller.

    Attributes:
        names: names or shapes differ.
        dtypes: a receiver holds another dtype than is sent.
        owners: parts of a tensor have no owner.
    """

    names: str
    dtypes: str
    owners: str


OF_COLLECTIVES: Final = Hints(
    names="build the same model on both sides, or pass rename= or select= (for a Layout: where it is built; "
    "from_views takes partial=True)",
    dtypes='pass wire_dtype= (a dtype, a mapping by name, or "receiver") to cast, or src= if this rank is a '
    "source too",
    owners="let src= name every rank that owns a part",
)
OF_PLANS: Final = Hints(
    names="build the same model on both sides, or pass rename= or select= where a Layout is built; a "
    "receiver that asks for some tensors only is a RankLayout with partial=True",
    dtypes='give a source as a RankLayout with wire= (a mapping from names to dtypes, or "receiver") to cast',
    owners="let sources name every rank that owns a part",
)
