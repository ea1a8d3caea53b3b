"""A decoder in the form of the published ones: rotary tables and a causal mask made once at the top, used by every block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Tables of cosines and sines for positions; a module without parameters, with a buffer that is not saved."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.inv_freq[None, :, None].expand(positions.shape[0], -1, 1)
        angles = (frequencies.float() @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class RotaryBlock(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (_rotated(y, *tables) for y in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


class RotaryDecoder(nn.Module):
    """Token ids with padding (zeros) to logits."""

    def __init__(self, vocab: int = 40, dim: int = 16, depth: int = 8, heads: int = 2, context: int = 16) -> None:
        super().__init__()
        self.register_buffer("later", torch.ones(context, context).triu(diagonal=1).bool())
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim // heads)
        self.blocks = nn.ModuleList(RotaryBlock(dim, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        tables = self.rotary(h, positions)
        mask = self._mask(ids, h.dtype)
        for block in self.blocks:
            h = block(h, tables, mask)
        return self.head(self.norm(h))

    def _mask(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to attention scores: the lowest number for later positions, a low one for padding."""
        b, t = ids.shape
        mask = torch.zeros((t, t), dtype=dtype, device=ids.device)
        mask = mask.masked_fill(self.later[:t, :t], torch.finfo(dtype).min)[None, None].expand(b, 1, t, t).clone()
        return mask.masked_fill_((ids == 0)[:, None, None, :] & (mask == 0), -1e4)
