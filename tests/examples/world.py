"""What examples find prepared: the names that a reader knows from the text around them.

An example runs in one process with the names of `local`, or on `WORLD` real ranks with those of `on_ranks`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dte_dist

WORLD = 4
"""Ranks of an example: the first half train, the other half hold a copy."""


def local() -> dict[str, Any]:
    """Return the names of examples in one process: what is imported, and all public names."""
    public = {name: getattr(dte_dist, name) for name in dte_dist.__all__ if not name.startswith("__")}
    return {**public, "dte_dist": dte_dist, "torch": torch, "dist": dist, "nn": nn, "np": np, "json": json}


def on_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the names of examples on ranks, new ones for every example.

    * `group` is the world; `mesh` has the trainers in one row and the others in the other.
    * `model` is trained by the trainers with FSDP2, and a copy in fp32 on each of the other ranks.
    * `train()` makes a step of `optimizer` on trainers and does nothing on the others; `trains` tells them
      apart.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank)
    trains = rank < WORLD // 2
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    names = {"rank": rank, "group": dist.group.WORLD, "mesh": mesh, "trains": trains, "model": model}
    if not trains:
        return {**local(), **names, "train": lambda: None}
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {**local(), **names, "train": train, "optimizer": optimizer}


def make_mesh() -> DeviceMesh:
    """Return the mesh of examples: a row of trainers, and one of the others."""
    return init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("role", "shard"))
