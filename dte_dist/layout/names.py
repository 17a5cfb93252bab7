"""Names of slots: the same model has the same names however it is wrapped.

`torch.compile`, activation checkpointing and FSDP put a segment of their own into the names of what they wrap. Those
segments mean nothing to the other side, which may wrap differently or not at all, so they are taken out. `module` is
a common name of real submodules: it goes only where the module walk met a `DistributedDataParallel`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from dte_dist.errors import LayoutMismatch

__all__ = ["WRAPPERS", "NameRule", "Rename", "Select", "canonical_name", "refuse_duplicates"]

Select = Callable[[str], bool] | str | Sequence[str] | None
"""Which slots take part: a predicate on the canonical name, or fnmatch patterns, of which one must match."""

Rename = Callable[[str], str] | None
"""From the canonical name to the name that both sides agree on."""

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that wrappers insert."""
"""Path segments that wrappers insert."""


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

    Example:
        >>> rule = NameRule.of(["layers.*"], lambda name: "model." + name)
        >>> rule("layers.0.weight"), rule("head.weight")
        ('model.layers.0.weight', None)
    """

    select: Callable[[str], bool]
    rename: Callable[[str], str]

    @classmethod
    def of(cls, select: Select = None, rename: Rename = None) -> NameRule:
        """Build a rule from what a user gave.

        Raises:
            ValueError: `select` is neither a predicate nor patterns, or `rename` cannot be called.
        """
        if rename is not None and not callable(rename):
            raise ValueError(f"rename must be a callable from name to name, not {type(rename).__name__}")
        return cls(_predicate(select), rename or _same)

    def __call__(self, name: str) -> str | None:
        """Return the slot name for a canonical name; None where it does not take part.

        Raises:
            ValueError: `rename` returned something else than a string.
        """
        if not self.select(name):
            return None
        renamed = self.rename(name)
        if not isinstance(renamed, str):
            raise ValueError(f"rename must return a string, but returned {renamed!r} for {name!r}")
        return renamed


def refuse_duplicates(names: Iterable[str]) -> None:
    """Check that every name occurs once.

    Raises:
        LayoutMismatch: some do not; names them.
    """
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        shown = ", ".join(map(repr, repeated[:8])) + (f" and {len(repeated) - 8} more" if len(repeated) > 8 else "")
        raise LayoutMismatch(f"several tensors have the same name: {shown}", fix="tell them apart with rename, or use select")


def _predicate(select: Select) -> Callable[[str], bool]:
    if select is None:
        return _always
    if callable(select):
        return select
    patterns = (
        (select,) if isinstance(select, str) else tuple(select) if isinstance(select, Iterable) else (select,)
    )
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"select must be a callable, a pattern such as 'layers.*' or a list of patterns, not {select!r}"
        )
    matches = re.compile("|".join(map(translate, patterns)) or r"(?!)").match
    return lambda name: matches(name) is not None


def _always(_: str) -> bool:
    return True


def _same(name: str) -> str:
    return name
