"""Manifests of several kinds, and the check that one is safe to work with."""

from __future__ import annotations

from functools import cache

from dte_dist.layout import WHOLE, Block, Cut, Entry, Manifest, MeshSpec, Placement

MESHES = (MeshSpec((2, 2), (0, 1, 2, 3)), MeshSpec((2,), (1, 3)))


@cache
def manifests() -> list[Manifest]:
    cut = Placement(0, (Cut(0, 1), Cut(0, 0, 2)))
    left, right = (Placement(block=Block.rectangle((0, column), (4, 2))) for column in (0, 2))
    rows = [Entry(f"layers.{n}.weight", (8, 3), "bfloat16", Placement(0, (Cut(0, 1),))) for n in range(4)]
    rows_of_heads = Block((((1, 2), (7, 2), (13, 2), (30, 1)), ((0, 1), (3, 1), (6, 1))))
    steps = Entry("stepped", (40, 8), "bfloat16", Placement(block=rows_of_heads))
    fused = [Entry("fused", (4, 4), "float32", left), Entry("fused", (4, 4), "float32", right)]
    return [
        Manifest.build(
            [*rows, Entry("scalar", (), "int64", WHOLE), *fused],
            MESHES,
            [["layers.0.weight", "layers.1.weight"]],
        ),
        Manifest.build(
            [Entry("w", (7, 3), "float32", WHOLE), Entry("é模", (0, 4), "bool", Placement(1))], MESHES[:2]
        ),
        Manifest.build([Entry("norm", (7,), "float8_e4m3fn", Placement(1))], MESHES, []),
        Manifest.build([Entry("w", (16, 16), "float16", cut)], MESHES),
        Manifest.build([steps]),
        Manifest.build([]),
    ]


def check_manifest(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest and len(manifest.digest()) == 16
    coordinates = [(0,) * len(mesh.shape) for mesh in manifest.meshes]
    for entry in range(len(manifest.entries)):
        block = manifest.block(entry, coordinates)
        assert block is not None and block.fits(manifest.entries[entry].shape)
