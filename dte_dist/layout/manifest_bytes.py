"""Manifests as bytes: compact JSON, deflated.

Names and geometries are kept apart, because thousands of slots share a few dozen geometries:

    {"format": 1,
     "names": [name, ...], "kinds": [index of its geometry, ...],            one per entry
     "geometries": [[shape, dtype, mesh or null, cuts, runs or null], ...],    in order of first use
     "meshes": [[shape, ranks], ...], "ties": [[name, ...], ...]}

A run is [start, length]; 3 or more that come at a step are [start, length, step, count] together. "format"
is 2 where there is such a step, else 1.

The digest is taken of the text, not of the deflated bytes, which may differ between builds of zlib. Whatever
is read is checked before it is believed: types, ranges, indices and the order of entries.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final

from dte_dist.errors import LayoutMismatch
from dte_dist.layout.blocks import Block, Cut
from dte_dist.layout.placements import WHOLE, Entry, MeshSpec, Placement
from dte_dist.layout.run_steps import MOST_RUNS, pack_runs, unpack_runs
from dte_dist.tensors.dtypes import DTYPES

__all__ = ["canonical_text", "pack", "unpack"]

Entries = tuple[Entry, ...]
Meshes = tuple[MeshSpec, ...]
Ties = tuple[tuple[str, ...], ...]

_FORMAT: Final = 1
_STEPPED_FORMAT: Final = 2
_MAX_TEXT: Final = 1 << 26
_MAX_INT: Final = 1 << 62
_MAX_SPLIT: Final = 1 << 20
_MAX_DIMENSIONS: Final = 64
_MAX_BYTES: Final = 1 << 62


def canonical_text(entries: Entries, meshes: Meshes, ties: Ties) -> bytes:
    """Return the JSON text of a manifest, the same for equal manifests.

    Raises:
        LayoutMismatch: steps stand for more than 2^20 runs.
    """
    numbers: dict[Any, int] = {}
    kinds = [
        numbers.setdefault((entry.shape, entry.dtype, entry.placement), len(numbers)) for entry in entries
    ]
    geometries = [_geometry(*kind) for kind in numbers]
    stepped = _stepped_runs(geometries)
    if stepped > MOST_RUNS:
        what = "the steps of a layout stand for too many runs"
        hint = "give the tensors in longer runs, or fewer of them in one layout"
        raise LayoutMismatch(what, expected=f"at most {MOST_RUNS:,}", got=f"{stepped:,}", hint=hint)
    document = {
        "format": _STEPPED_FORMAT if stepped else _FORMAT,
        "names": [entry.name for entry in entries],
        "kinds": kinds,
        "geometries": geometries,
        "meshes": [[mesh.shape, mesh.ranks] for mesh in meshes],
        "ties": ties,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def pack(entries: Entries, meshes: Meshes, ties: Ties) -> bytes:
    """Write the parts of a manifest as bytes."""
    return zlib.compress(canonical_text(entries, meshes, ties), 1)


def unpack(data: bytes) -> tuple[Entries, Meshes, Ties]:
    """Read the parts of a manifest from bytes.

    Raises:
        LayoutMismatch: they are no manifest, or one of another format.
    """
    try:
        return _parts(json.loads(_inflated(data)))
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
        what = f"the bytes of a manifest are damaged: {str(error)[:400]}"
        raise LayoutMismatch(what, hint="run one version of dte_dist on all ranks") from error


def _geometry(shape: tuple[int, ...], dtype: str, placement: Placement) -> list[Any]:
    cuts = [[cut.dim, cut.mesh_dim, cut.split_factor] for cut in placement.cuts]
    runs = None if placement.block is None else [pack_runs(each) for each in placement.block.runs]
    return [shape, dtype, placement.mesh, cuts, runs]


def _stepped_runs(geometries: Sequence[Sequence[Any]]) -> int:
    """Return how many runs the steps of all geometries stand for."""
    lines = (line for geometry in geometries for line in geometry[4] or ())
    return sum(_ints(list(run))[3] for line in lines for run in line if len(run) == 4)


def _inflated(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    text = inflater.decompress(bytes(data), _MAX_TEXT)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("they are cut short, too long, or followed by others")
    return text


def _parts(document: Any) -> tuple[Entries, Meshes, Ties]:
    if not isinstance(document, dict) or document.get("format") not in (_FORMAT, _STEPPED_FORMAT):
        raise ValueError(f"they are not in format {_FORMAT} or {_STEPPED_FORMAT}")
    described = [_list(item, 5) for item in _list(document["geometries"])]
    stepped = _stepped_runs(described)
    if (document["format"] == _STEPPED_FORMAT) != (stepped > 0) or stepped > MOST_RUNS:
        raise ValueError(f"steps stand for {stepped} runs in format {document['format']}")
    meshes = tuple(_mesh(*_list(item, 2)) for item in _list(document["meshes"]))
    geometries = [_read_geometry(item, meshes) for item in described]
    names, kinds = _list(document["names"]), _list(document["kinds"])
    _check_strings(names)
    if any(type(kind) is not int or not 0 <= kind < len(geometries) for kind in kinds):
        raise ValueError("an entry names a geometry that is not there")
    entries = tuple(Entry(name, *geometries[kind]) for name, kind in zip(names, kinds, strict=True))
    _check_order(entries)
    nbytes = [prod(shape) * DTYPES[dtype].itemsize for shape, dtype, _ in geometries]
    if sum(nbytes[kind] for kind in kinds) > _MAX_BYTES:  # positions count across tensors, too
        raise ValueError("the tensors together are too large")
    return entries, meshes, _ties(document["ties"], set(names))


def _mesh(shape: Any, ranks: Any) -> MeshSpec:
    mesh = MeshSpec(_ints(shape, low=1), _ints(ranks))
    if len(mesh.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a mesh of {len(mesh.shape)} dimensions")
    if prod(mesh.shape) != len(mesh.ranks) or len(set(mesh.ranks)) != len(mesh.ranks):
        raise ValueError(f"a mesh of shape {mesh.shape} cannot have ranks {mesh.ranks[:16]}")
    return mesh


def _read_geometry(item: list[Any], meshes: Meshes) -> tuple[tuple[int, ...], str, Placement]:
    shape, dtype, mesh, cuts, runs = _ints(item[0]), item[1], item[2], _list(item[3]), item[4]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is no element type")
    width = DTYPES[dtype].itemsize
    if len(shape) > _MAX_DIMENSIONS or prod(size or 1 for size in shape) * width > _MAX_BYTES:
        raise ValueError(f"there is no tensor of {len(shape)} dimensions of sizes {shape[:16]}")
    if mesh is not None and (type(mesh) is not int or not 0 <= mesh < len(meshes)):
        raise ValueError(f"there is no mesh {mesh!r}")
    if runs is not None:
        return shape, dtype, _explicit(shape, mesh, cuts, runs)
    if mesh is None:
        if cuts:
            raise ValueError("a tensor on no mesh is cut")
        return shape, dtype, WHOLE
    return shape, dtype, Placement(mesh, _cuts(cuts, len(shape), len(meshes[mesh].shape)))


def _explicit(shape: tuple[int, ...], mesh: int | None, cuts: list[Any], runs: Any) -> Placement:
    lines = ([_ints(run) for run in _list(line)] for line in _list(runs))
    block = Block(tuple(tuple(unpack_runs(line)) for line in lines))
    if cuts or not block.fits(shape):
        raise ValueError(f"{block} is no block of a tensor of shape {shape}")
    return Placement(mesh, block=block)


def _cuts(items: list[Any], dimensions: int, mesh_dimensions: int) -> tuple[Cut, ...]:
    cuts = tuple(Cut(*_ints(_list(item, 3))) for item in items)
    in_range = all(cut.dim < dimensions and cut.mesh_dim < mesh_dimensions for cut in cuts)
    in_range &= 1 <= prod(cut.split_factor for cut in cuts) <= _MAX_SPLIT
    if not in_range or len({cut.mesh_dim for cut in cuts}) != len(cuts):
        raise ValueError(f"{cuts} cannot cut {dimensions} dimensions along a mesh of {mesh_dimensions}")
    return cuts


def _ties(groups: Any, names: set[Any]) -> Ties:
    ties = tuple(tuple(_list(group)) for group in _list(groups))
    known = all(len(group) > 1 and names.issuperset(group) for group in ties)
    if not known or any(sorted(set(group)) != list(group) for group in ties) or sorted(ties) != list(ties):
        raise ValueError("tied names are unsorted or not among the entries")
    return ties


def _check_order(entries: Entries) -> None:
    for before, after in pairwise(entries):
        if before.name < after.name:
            continue
        regions = before.placement.is_explicit and after.placement.is_explicit
        if (
            before.order >= after.order
            or not regions
            or (before.shape, before.dtype) != (after.shape, after.dtype)
        ):
            raise ValueError(f"entry {after.name!r} is out of order or there twice")


def _check_strings(items: list[Any]) -> None:
    if set(map(type, items)) - {str}:
        raise ValueError("a name is no string")
    "".join(items).encode()  # raises at half a character, which JSON can spell


def _list(item: Any, length: int | None = None) -> list[Any]:
    if not isinstance(item, list) or (length is not None and len(item) != length):
        raise ValueError(f"a list{f' of {length}' if length else ''} is missing")
    return item


def _ints(item: Any, low: int = 0) -> tuple[int, ...]:
    numbers = tuple(_list(item))
    if any(type(number) is not int or not low <= number <= _MAX_INT for number in numbers):
        raise ValueError("a number is missing or out of range")
    return numbers
