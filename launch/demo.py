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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dte_dist
from commonlib.console import Console, complain
from commonlib.text import Tokenizer, manual, zen
from commonlib.training import Trainer
from demolib.plot import draw
from demolib.proof import Proof
from demolib.rollout import Rollout
from demolib.settings import Settings, read_settings
from demolib.steps import Step, summary

PROMPTS = ("Beautiful is", "Now is", "In the face", "Errors should", "If the implementation")


def main() -> int:
    settings = read_settings()
    if int(os.environ.get("WORLD_SIZE", "1")) % 2:
        return complain(
            "start an even number of ranks: torchrun --standalone --nproc-per-node 4 launch/demo.py", code=2
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return run(settings)
    finally:
        dist.destroy_process_group()


def run(settings: Settings) -> int:
    """The demo on one rank; returns its exit code."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    meshes = init_device_mesh("cpu", (2, half), mesh_dim_names=("role", "shard"))
    mesh, text = meshes["shard"], zen()  # row 0 trains, row 1 generates
    tokenizer = Tokenizer([text, manual()], settings.model.vocab)
    role: Trainer | Rollout
    if rank < half:
        role = Trainer(settings.model, settings.training, mesh, torch.tensor(tokenizer.encode(text)))
    else:
        role = Rollout(settings.model, settings.training.seed + 1, mesh)

    million = sum(parameter.numel() for parameter in role.model.parameters()) / 1e6
    title = (
        f"{million:.1f}M parameters, FSDP2 over {half} to tensor parallel over {half}, gloo "
        f"between {2 * half} processes"
    )
    with Console(rank == 0, settings.training.warmup_steps + settings.training.steps) as console:
        console.say(title)
        warm_up(role, settings, console)
        proof = Proof(role.model, trains=rank < half)
        steps = rounds(role, proof, tokenizer, settings, console)
        wrong = proof.first_difference()

    lines = summary(steps)
    console.table(lines, left=lines[0][:1])
    if rank == 0:
        console.say(draw(steps, title, settings.output.plot))
        console.say("bit-exact: yes" if wrong is None else f"bit-exact: no, first in {wrong}")
    return 0 if wrong is None else 1


def warm_up(role: Trainer | Rollout, settings: Settings, console: Console) -> None:
    """Take the trainers from random weights to ones that have learned a little; no rollout rank knows of them
    yet.
    """
    losses = []
    for _ in range(settings.training.warmup_steps):
        role.train()
        losses.append(role.loss)
        console.advance("warm-up")
    if isinstance(role, Trainer):
        role.settle()
    console.say(f"warm-up: loss {losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "no warm-up")


def rounds(
    role: Trainer | Rollout, proof: Proof, tokenizer: Tokenizer, settings: Settings, console: Console
) -> list[Step]:
    """Train, synchronise, generate: `settings.training.steps` times; returns what each time cost."""
    sync = sync_while_training if settings.sync.overlap else sync_then_train
    steps = []
    role.train()
    for number in range(1, settings.training.steps + 1):
        loss = role.loss
        report, delta_seconds = sync(role.model, role.train if number < settings.training.steps else nothing)
        console.say(f"step {number:2}  loss {loss:.2f}  {report}")

        sample = generate(role, tokenizer, PROMPTS[number % len(PROMPTS)], settings.output.new_tokens)
        if number == 1 or number % settings.output.show_every == 0:
            console.say(f"  rollout: {sample!r}")

        start = all_here()
        proof.run()
        dense_seconds = all_here() - start
        steps.append(Step.of(report, delta_seconds, proof.bytes, dense_seconds))
        console.advance("RL steps")
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
