"""Descriptions come back as they were written; one that is not sound is a LayoutMismatch that names the
rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dte_dist.errors import LayoutMismatch
from dte_dist.layout import Layout
from dte_dist.options import options_of, shared
from dte_dist.sync.agreement import describe
from dte_dist.sync.description import MOST_BYTES, Description, check_counts

SIZE = 4
LARGE = 1 << 60


def layout(name: str = "w") -> Layout:
    return Layout.from_tensors({name: torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)})


def written(into: Layout | None = None, **options: Any) -> bytes:
    return describe(
        nn.Linear(2, 3) if into is None else layout(), into, options_of(**options), "cpu:gloo"
    ).data


def parts(data: bytes) -> list[bytes]:
    sizes = np.frombuffer(data[:24], np.int64).tolist()
    return [data[24 + sum(sizes[:n]) : 24 + sum(sizes[: n + 1])] for n in range(3)]


def joined(head: bytes, manifest: bytes, into: bytes = b"", sizes: list[int] | None = None) -> bytes:
    return (
        np.array(sizes or [len(head), len(manifest), len(into)], np.int64).tobytes() + head + manifest + into
    )


@pytest.mark.parametrize("into", [None, "receiver"])
@pytest.mark.parametrize("sources", [None, (2, 0)])
def test_a_description_comes_back(into: str | None, sources: tuple[int, ...] | None) -> None:
    target = layout() if into else None
    data = written(target, group_src=sources, wire_dtype=into, bucket_bytes=64, anchor_interval=3)
    said = Description.parse(data, rank=1, size=SIZE)
    assert said.options == shared(options_of(group_src=sources, bucket_bytes=64, anchor_interval=3))
    assert (said.wire, said.partial, said.nccl, said.numbers) == (into, False, False, 0)
    assert [entry.name for entry in said.manifest.entries] == (["b", "w"] if into else ["bias", "weight"])
    assert (said.into is None) == (into is None) and (said.into is None or said.into == target.manifest)


def test_wire_dtypes_by_name_come_back() -> None:
    assert Description.parse(written(wire_dtype=torch.bfloat16), rank=0, size=1).wire == {
        "weight": "bfloat16",
        "bias": "bfloat16",
    }


def said(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


HEADS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a key more": said(["more"], 1),
    "a key less": lambda document: document.pop("wire"),
    "partial of no truth value": said(["partial"], 1),
    "nccl of no truth value": said(["nccl"], None),
    "trained of one": said(["trained"], [True]),
    "trained of three": said(["trained"], [True] * 3),
    "trained of a number": said(["trained"], 3),
    "trained of numbers": said(["trained"], [0, 1]),
    "options of a list": said(["options"], []),
    "an option more": said(["options", "codec"], "fast"),
    "an option less": lambda document: document["options"].pop("src"),
    "no sources": said(["options", "src"], []),
    "a source outside": said(["options", "src"], [SIZE]),
    "a negative source": said(["options", "src"], [-1]),
    "a source twice": said(["options", "src"], [1, 1]),
    "a source of a fraction": said(["options", "src"], [1.0]),
    "sources of a text": said(["options", "src"], "01"),
    "no bucket": said(["options", "bucket_bytes"], 0),
    "a bucket of all memory": said(["options", "bucket_bytes"], LARGE),
    "a bucket of a truth value": said(["options", "bucket_bytes"], True),
    "anchors of a text": said(["options", "anchor_interval"], "3"),
    "a negative anchor": said(["options", "anchor_interval"], -3),
    "no timeout": said(["options", "timeout"], 0),
    "an endless timeout": said(["options", "timeout"], float("inf")),
    "a timeout of no number": said(["options", "timeout"], float("nan")),
    "a timeout of a list": said(["options", "timeout"], [1]),
    "a wire dtype that is none": said(["wire"], {"w": "save"}),
    "a wire dtype of a number": said(["wire"], {"w": 16}),
    "wire dtypes of a list": said(["wire"], ["bfloat16"]),
    "a wire of another word": said(["wire"], "sender"),
}


def refused(data: bytes, match: str = "is not sound") -> str:
    with pytest.raises(LayoutMismatch, match=match) as caught:
        Description.parse(data, rank=3, size=SIZE)
    assert "[ranks 3]" in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_a_head_that_cannot_be_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    head, manifest, _ = parts(written())
    document = json.loads(head)
    Description.parse(joined(json.dumps(document).encode(), manifest), rank=3, size=SIZE)
    change(document)
    refused(joined(json.dumps(document).encode(), manifest))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"options": 1e999}',
        b"9" * 5000,
        b"\x00" * 8,
    ],
    ids=[
        "empty",
        "cut short",
        "a list",
        "a number",
        "null",
        "no text",
        "deep",
        "infinite",
        "digits",
        "zeros",
    ],
)
def test_json_that_is_none_is_refused(head: bytes) -> None:
    refused(joined(head, parts(written())[1]))


@pytest.mark.parametrize(
    "sizes",
    [
        [-1, 0, 0],
        [LARGE, 0, 0],
        [0, LARGE, -LARGE],
        [1 << 62, 1 << 62, 0],
        [1 << 63 - 1, 1, 1],
        [0, 0, 0],
        [10, 20, 30],
    ],
    ids=str,
)
def test_sizes_of_parts_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    head, manifest, into = parts(written())
    refused(joined(head, manifest, into, sizes))


def test_a_description_cut_short_or_with_a_damaged_manifest_is_refused() -> None:
    data = written(layout())
    for size in (*range(0, 64), len(data) // 2, len(data) - 1):
        refused(data[:size])
    head, manifest, into = parts(data)
    assert "manifest" in refused(joined(head, manifest[::-1], into)) and "manifest" in refused(
        joined(head, manifest, into[:-1])
    )


@pytest.mark.parametrize("size", [0, 23, -8, MOST_BYTES + 1, LARGE, -(1 << 63)])
def test_the_size_of_a_description_is_looked_at_before_anyone_makes_room(size: int) -> None:
    check_counts([24, MOST_BYTES])
    with pytest.raises(LayoutMismatch, match=rf"\[ranks 1; expected 24 to {MOST_BYTES} bytes; got {size}\]"):
        check_counts([300, size, 300])
