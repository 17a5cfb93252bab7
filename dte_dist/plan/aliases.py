"""Names that share one tensor: sources tie them, and then they are one slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dte_dist.layout import Manifest, Placement

__all__ = ["Aliases", "aliased_entries"]


class Aliases:
    """Names that are tied in some manifest; the first in order stands for all.

    Example:
        >>> ties = Aliases([Manifest((), (), (("embed", "head"),))])
        >>> ties.canonical("head"), ties.canonical("norm")
        ('embed', 'norm')
    """

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self._parent: dict[str, str] = {}
        for manifest in {id(manifest): manifest for manifest in manifests}.values():
            for group in manifest.ties:
                for name in group[1:]:
                    self._join(group[0], name)

    def _join(self, a: str, b: str) -> None:
        a, b = sorted((self.canonical(a), self.canonical(b)))
        if a != b:
            self._parent[b] = a

    def canonical(self, name: str) -> str:
        """Return the name that stands for all names tied to `name`."""
        while name in self._parent:
            name = self._parent[name]
        return name


def aliased_entries(manifest: Manifest) -> list[int]:
    """Return for each entry of a manifest the first entry that surely has the same tensor: often itself.

    Names that are tied share all of their memory (`Layout` refuses others), so names with several regions are
    tied region by region.
    """
    regions: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(manifest.entries):
        regions[entry.name].append(index)
    same = list(range(len(manifest.entries)))
    for group in manifest.ties:
        first, *others = (regions[name] for name in group)
        for other in others:
            if [_region(manifest, index) for index in other] == [_region(manifest, index) for index in first]:
                for one, index in zip(first, other, strict=True):
                    same[index] = same[one]
    return same


def _region(manifest: Manifest, index: int) -> tuple[tuple[int, ...], str, Placement]:
    entry = manifest.entries[index]
    return entry.shape, entry.dtype, entry.placement
