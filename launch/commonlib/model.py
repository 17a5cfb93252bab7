"""A small real language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head.

Heads are counted from the tensors at hand and not from the settings, so the same code runs on whole
weights, on FSDP2 shards and on the heads that one tensor-parallel rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ModelSettings", "Transformer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model, a Llama-like transformer.

    Attributes:
        vocab: number of tokens.
        dim: channels of the residual path.
        layers: number of blocks.
        heads: query heads of a block.
        kv_heads: key and value heads of a block; rollout ranks split attention where they divide this.
        ffn: channels within the MLP.
    """

    vocab: int = 4096
    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1536


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_dim = settings.dim // settings.heads
        self.q = nn.Linear(settings.dim, settings.heads * self.head_dim, bias=False)
        self.k = nn.Linear(settings.dim, settings.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(settings.dim, settings.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(settings.heads * self.head_dim, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, dim]
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))  # [batch, heads here, length, head_dim] before


class MLP(nn.Module):
    """SwiGLU: one projection opens and closes the gate for the other."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.dim, settings.ffn, bias=False)
        self.up = nn.Linear(settings.dim, settings.ffn, bias=False)
        self.down = nn.Linear(settings.ffn, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual path."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=1e-6)
        self.attention = Attention(settings)
        self.mlp_norm = nn.RMSNorm(settings.dim, eps=1e-6)
        self.mlp = MLP(settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed = nn.Embedding(settings.vocab, settings.dim)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim, eps=1e-6)
        self.head = nn.Linear(settings.dim, settings.vocab, bias=False)
        self._draw_weights()

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length]
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))

    def _draw_weights(self) -> None:
        """Random weights that begin as little more than word pairs (quiet blocks, a loud embedding) and so
        learn fast.
        """
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                quiet = name.endswith(("attention.o.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=0.1 if weight is self.embed.weight else 0.002 if quiet else 0.02)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: turns pairs of channels by an angle that grows with the position.

    Args:
        x: [batch, heads, length, head_dim]
    """
    length, half = x.shape[2], x.shape[3] // 2
    speed = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * speed  # [length, half]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
