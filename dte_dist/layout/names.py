"""Names of slots: the same model has the same names however it is wrapped.

`torch.compile`, activation checkpointing and FSDP put a segment of their own into the names of what they
wrap. Those segments mean nothing to the other side, which may wrap differently or not at all, so they are
taken out. `module` is
a common name of real submodules: it goes only where the module walk met a `DistributedDataParallel`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Final, NoReturn

from dte_dist._torch_compat import WRAPPERS
from dte_dist.errors import LayoutMismatch

__all__ = [
    "WRAPPERS",
    "NameRule",
    "Rename",
    "Select",
    "canonical_name",
    "numbered_name",
    "refuse_duplicates",
    "refuse_unencodable",
]

Select = Callable[[str], bool] | str | Sequence[str] | None
"""Which slots take part: a predicate on the canonical name, or fnmatch patterns, of which one must match."""

Rename = Callable[[str], str] | None
"""From the canonical name to the name that both sides agree on."""

_SHOWN: Final = 4
"""Names that an error lists."""

_SURROGATE: Final = "it has a lone surrogate, which UTF-8 cannot write"


def canonical_name(name: str) -> str:
    """Return `name` without the path segments that wrappers insert.

    Example:
        >>> canonical_name("layers.0._orig_mod.mlp._checkpoint_wrapped_module.weight")
        'layers.0.mlp.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class NameRule:
    """Decide which names take part and what they are called.

    Attributes:
        select: says whether a canonical name takes part.
        rename: from a canonical name to that of the slot.
        patterns: those that `select` matches; None for a function.

    Example:
        >>> rule = NameRule.of(["layers.*"], lambda name: "model." + name)
        >>> rule("layers.0.weight"), rule("head.weight")
        ('model.layers.0.weight', None)
    """

    select: Callable[[str], bool]
    rename: Callable[[str], str]
    patterns: tuple[str, ...] | None = None

    @classmethod
    def of(cls, select: Select = None, rename: Rename = None) -> NameRule:
        """Build a rule from what a user gave.

        Raises:
            ValueError: `select` is neither a predicate nor patterns, or `rename` cannot be called.
        """
        if rename is not None and not callable(rename):
            raise ValueError(f"rename must be a callable from name to name, not {type(rename).__name__}")
        if select is None or callable(select):
            return cls(select or _always, rename or _same)
        patterns = _patterns(select)
        matches = re.compile("|".join(map(translate, patterns)) or r"(?!)").match
        return cls(lambda name: matches(name) is not None, rename or _same, patterns)

    def __call__(self, name: str) -> str | None:
        """Return the slot name for a canonical name; None where it does not take part.

        Raises:
            ValueError: `rename` returned something else than a string, or a string that UTF-8 cannot write.
        """
        if not self.select(name):
            return None
        renamed = self.rename(name)
        if not isinstance(renamed, str):
            raise ValueError(f"rename must return a string, but returned {renamed!r} for {name!r}")
        if renamed != name and not _is_encodable(renamed):
            raise ValueError(f"rename returned {renamed!a} for {name!a}: {_SURROGATE}")
        return renamed

    def refuse_no_match(self, names: Sequence[str]) -> None:
        """Refuse a `select` that leaves out every tensor: nothing would be synchronised, without a word. Warn
        of a pattern that matches none: it is mistyped, or its tensors are on other ranks.

        Args:
            names: the canonical names of all tensors; where there are none, nothing can be chosen.

        Raises:
            ValueError: names the patterns, and some of the tensors.
        """
        if not names:
            return
        if not any(map(self.select, names)):
            self._refuse(names)
        for pattern in self.patterns or ():
            if not any(map(re.compile(translate(pattern)).match, names)):
                what = f"the pattern {pattern!r} of select= matches no tensor: the names are {_shown(names)}"
                hint = "choose from these names, unless the tensors are on other ranks"
                warnings.warn(f"{what}. Hint: {hint}.", stacklevel=2)

    def _refuse(self, names: Sequence[str]) -> NoReturn:
        """Raise because nothing is chosen."""
        said = "a function" if self.patterns is None else ", ".join(map(repr, self.patterns)) or "no patterns"
        hint = (
            "choose from these names; a rank that has none of the tensors passes an empty torch.nn.Module()"
        )
        raise ValueError(
            f"select= chooses no tensor: it is {said}, and the names are {_shown(names)}. Hint: {hint}."
        )


def numbered_name(name: str, number: int, taken: Collection[str]) -> str:
    """Return a name for one of several regions of a slot, which no slot has and no other region gets.

    Args:
        name: of the slot.
        number: of the region.
        taken: the names of all slots.

    Example:
        >>> numbered_name("w", 1, ["w"]), numbered_name("w", 1, ["w", "w[1]"])
        ('w[1]', "w[1]'")
    """
    numbered = f"{name}[{number}]"
    while numbered in taken:
        numbered += "'"
    return numbered


def refuse_duplicates(names: Iterable[str]) -> None:
    """Check that every name occurs once.

    Raises:
        LayoutMismatch: some do not; names them.
    """
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        shown = ", ".join(map(repr, repeated[:8])) + (
            f" and {len(repeated) - 8} more" if len(repeated) > 8 else ""
        )
        raise LayoutMismatch(
            f"several tensors have the same name: {shown}", hint="tell them apart with rename, or use select"
        )


def refuse_unencodable(names: Iterable[str]) -> None:
    """Check that every name can be sent to other ranks.

    Raises:
        ValueError: one cannot; names it.
    """
    for name in names:
        if not _is_encodable(name):
            raise ValueError(f"the name {name!a} of a tensor cannot be sent to other ranks: {_SURROGATE}")


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name!a}" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _patterns(select: Any) -> tuple[str, ...]:
    patterns = (select,) if isinstance(select, str) or not isinstance(select, Iterable) else tuple(select)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"select must be a callable, a pattern such as 'layers.*' or a list of patterns, not {select!r}"
        )
    return patterns


def _always(_: str) -> bool:
    return True


def _same(name: str) -> str:
    return name
