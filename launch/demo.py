"""FSDP2 trainers feed tensor-parallel rollout ranks, and one line keeps them bit-identical.

    torchrun --standalone --nproc-per-node 4 launch/demo.py

1. The first half of the ranks train a language model on the Zen of Python; FSDP2 shards its fp32 weights.
2. The other half generate text with the same model, tensor-parallel and in bf16.
3. After each training step every rank calls `dte_dist.delta_broadcast`: only what changed in bf16 travels.
4. A dense broadcast of the same weights is timed beside it, into a spare copy.
5. At the end every rollout rank compares its weights with the trainers', bit for bit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dte_dist
from plot import draw
from reference import DenseBroadcast
from roles import Rollout, Trainer
from settings import Settings, read_settings
from show import Screen, Step, summary
from text import Tokenizer, manual, zen

PROMPTS = ("Beautiful is", "Now is", "In the face", "Errors should", "If the implementation")


def main() -> int:
    settings = read_settings()
    if int(os.environ.get("WORLD_SIZE", "1")) % 2:
        print(
            "start an even number of ranks: torchrun --standalone --nproc-per-node 4 launch/demo.py",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return run(settings)
    finally:
        dist.destroy_process_group()


def run(settings: Settings) -> int:
    """The demo on one rank; returns its exit code."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("role", "shard"))[
        "shard"
    ]  # row 0 trains, row 1 generates
    text = zen()
    tokenizer = Tokenizer([text, manual()], settings.vocab)
    role = (
        Trainer(settings, mesh, torch.tensor(tokenizer.encode(text)))
        if rank < half
        else Rollout(settings, mesh)
    )

    million = sum(parameter.numel() for parameter in role.model.parameters()) / 1e6
    title = (
        f"{million:.1f}M parameters, FSDP2 over {half} to tensor parallel over {half}, gloo "
        f"between {2 * half} processes"
    )
    with Screen(rank == 0, settings.warmup_steps + settings.steps) as screen:
        screen.say(title)
        warm_up(role, settings, screen)
        dense = DenseBroadcast(role.model, trains=rank < half)
        steps = rounds(role, dense, tokenizer, settings, screen)
        wrong = dense.first_difference()

    screen.table(summary(steps))
    if rank == 0:
        print(draw(steps, title, Path(settings.plot)))
        print("bit-exact: yes" if wrong is None else f"bit-exact: no, first in {wrong}", flush=True)
    return 0 if wrong is None else 1


def warm_up(role: Trainer | Rollout, settings: Settings, screen: Screen) -> None:
    """Take the trainers from random weights to ones that have learned a little; no rollout rank knows of them
    yet.
    """
    losses = []
    for _ in range(settings.warmup_steps):
        role.train()
        losses.append(role.loss)
        screen.advance("warm-up")
    if isinstance(role, Trainer):
        role.settle()
    screen.say(f"warm-up: loss {losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "no warm-up")


def rounds(
    role: Trainer | Rollout, dense: DenseBroadcast, tokenizer: Tokenizer, settings: Settings, screen: Screen
) -> list[Step]:
    """Train, synchronise, generate: `settings.steps` times; returns what each time cost."""
    sync = sync_while_training if settings.overlap else sync_then_train
    steps = []
    role.train()
    for number in range(1, settings.steps + 1):
        loss = role.loss
        report, delta_seconds = sync(role.model, role.train if number < settings.steps else nothing)
        screen.say(f"step {number:2}  loss {loss:.2f}  {report}")

        sample = generate(role, tokenizer, PROMPTS[number % len(PROMPTS)], settings.new_tokens)
        if number == 1 or number % settings.show_every == 0:
            screen.say(f"  rollout: {sample!r}")

        start = all_here()
        dense.run()
        dense_seconds = all_here() - start
        steps.append(Step.of(report, delta_seconds, dense.bytes, dense_seconds))
        screen.advance("RL steps")
    return steps


def sync_then_train(model: nn.Module, train: Callable[[], None]) -> tuple[dte_dist.SyncReport, float]:
    """All ranks stand still until the new weights are there; then the next training step begins."""
    start = all_here()
    report = dte_dist.delta_broadcast(model, wire_dtype="receiver")
    seconds = all_here() - start
    train()
    return report, seconds


def sync_while_training(model: nn.Module, train: Callable[[], None]) -> tuple[dte_dist.SyncReport, float]:
    """The next training step runs while the weights travel; what arrives are the weights as they were at the
    call.
    """
    start = all_here()
    work = dte_dist.delta_broadcast(model, wire_dtype="receiver", async_op=True)
    seconds = time.perf_counter() - start
    train()
    start = all_here()
    report = work.wait()
    return report, seconds + all_here() - start


def generate(role: Trainer | Rollout, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """What the rollout ranks make of the prompt, told to all ranks."""
    ids = tokenizer.encode(prompt)
    tokens = (
        role.generate(ids, count)
        if isinstance(role, Rollout)
        else torch.zeros(len(ids) + count, dtype=torch.int64)
    )
    dist.broadcast(tokens, src=dist.get_world_size() // 2)
    return tokenizer.decode(tokens.tolist())


def all_here() -> float:
    """The time at which the last rank arrives: a step's seconds then count its work and not the wait for
    slower ranks.
    """
    dist.barrier()
    return time.perf_counter()


def nothing() -> None:
    """What follows the last sync: the proof needs the weights as they were sent."""


if __name__ == "__main__":
    sys.exit(main())
