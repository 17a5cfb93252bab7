"""Text that comes with Python, and a small tokenizer made from it: nothing to download, and the same on every
rank.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stdout
from pydoc_data.topics import topics

import torch
from torch import Tensor

__all__ = ["Tokenizer", "crops", "manual", "zen"]

_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s")


def zen() -> str:
    """The Zen of Python in one line: short enough for a model to learn by heart in seconds."""
    with redirect_stdout(io.StringIO()) as printed:
        import this  # noqa: F401  (it prints the text, once)
    return " ".join(printed.getvalue().split())


def manual() -> str:
    """The Python language reference, as `help()` shows it, in one line."""
    return " ".join(" ".join(topics[name] for name in sorted(topics)).split())


class Tokenizer:
    """The most frequent words of some texts, those of an earlier text first, and the 256 bytes for everything
    else.

    Example:
        >>> tokenizer = Tokenizer(["to be or not to be"], vocab=260)
        >>> tokenizer.decode(tokenizer.encode("not to be, or"))
        'not to be, or'
    """

    def __init__(self, texts: Iterable[str], vocab: int) -> None:
        words = [piece.encode() for text in texts for piece, _ in Counter(_PIECE.findall(text)).most_common()]
        pieces = [bytes([byte]) for byte in range(256)] + [word for word in words if len(word) > 1]
        self.pieces = list(dict.fromkeys(pieces))[:vocab]
        self._ids = {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text`."""
        ids: list[int] = []
        for piece in map(str.encode, _PIECE.findall(text)):
            known = self._ids.get(piece)
            ids.extend(piece if known is None else [known])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text that the tokens stand for."""
        return b"".join(self.pieces[number] for number in ids if number < len(self.pieces)).decode(
            "utf-8", "replace"
        )


def crops(tokens: Tensor, batch: int, length: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and the targets that follow them, [batch, length] each, cut from `tokens` at random."""
    length = min(length, len(tokens) - 1)
    starts = torch.randint(len(tokens) - length, (batch,), generator=chance).tolist()
    cut = torch.stack([tokens[start : start + length + 1] for start in starts])
    return cut[:, :-1], cut[:, 1:]
