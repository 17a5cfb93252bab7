"""Pairs of an index codec and a value codec as a caller names them, made from those that there are."""

from __future__ import annotations

from itertools import cycle, product

from dte_dist.codec.index_codecs import INDEX_CODECS
from dte_dist.codec.value_codecs import VALUE_CODECS

__all__ = ["EACH", "PAIRS"]

PAIRS = [
    f"{index.name}+{value.name}" for index, value in product(INDEX_CODECS.values(), VALUE_CODECS.values())
]
"""Every pair."""

EACH = [
    f"{index.name}+{value.name}"
    for index, value in zip(INDEX_CODECS.values(), cycle(VALUE_CODECS.values()), strict=False)
]
"""A few pairs in which every codec is, as long as there are more index codecs than value codecs."""
