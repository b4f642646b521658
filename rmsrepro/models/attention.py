"""Multi-head attention (Vaswani et al. 2017, section 3.2) through `scaled_dot_product_attention`.

H is the number of heads, E = dim / H the width of one. There is no dropout on attention weights: it
would take the fast kernels away; the branch's output is dropped instead, in the residual block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.models.normed import norm_module
from rmsrepro.norms import NormSpec, apply_norm, takes_mask, weight_normed


@dataclass
class KeysValues:
    """Keys (normalised, turned) and values of the positions that may be attended to, each (B, H, S, E)."""

    keys: Tensor
    values: Tensor

    def select(self, index: Tensor) -> KeysValues:
        """Return the rows `index` (N,) of the batch."""
        return KeysValues(self.keys.index_select(0, index), self.values.index_select(0, index))

    def append(self, later: KeysValues) -> KeysValues:
        """Return these positions followed by those of `later`."""
        return KeysValues(torch.cat((self.keys, later.keys), 2), torch.cat((self.values, later.values), 2))


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles of some positions, each (T, E / 2), fp32."""

    cos: Tensor
    sin: Tensor


def rotation(start: int, length: int, head_dim: int, device: torch.device) -> Rotation:
    """Return the angles t * 10000^(-2 i / E) of positions start..start+length-1 (Su et al. 2021, eq. 15)."""
    frequency = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device).div_(-head_dim)
    frequency = torch.pow(10000.0, frequency)
    position = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn each pair (x_i, x_{i + E/2}) of `x` (..., T, E) by its angle; computed in fp32 or wider."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * by.cos - second * by.sin, second * by.cos + first * by.sin), -1)
    return turned.to(x.dtype)


def padding_mask(mask: Tensor) -> Tensor:
    """Turn a token mask (B, S) into an attention mask (B, 1, 1, S), True where attention may look.

    A row without any token may look everywhere: a softmax over nothing is NaN in some kernels, and one
    such row would poison the gradients of the whole batch. Its keys and values are those of zero
    vectors (the caller clears the padding), so what it reads does not depend on the padding's length.
    """
    return (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]


def head_dim(dim: int, num_heads: int) -> int:
    """Return the width of a head; UserError where the heads do not divide the model's width."""
    if num_heads < 1 or dim % num_heads:
        raise UserError(
            f"model.d_model={dim} cannot be split into model.num_heads={num_heads} equal heads; "
            "choose a number of heads that divides it"
        )
    return dim // num_heads


def normed_heads(norm: nn.Module | None, x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Normalise the heads of x (B, H, T, E); `token_mask` (B, T) is for norms over positions."""
    if norm is None:
        return x
    if token_mask is not None and takes_mask(norm):
        token_mask = token_mask.unsqueeze(1).expand(x.shape[:-1])
    return apply_norm(norm, x, token_mask)


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(E)) v with q, k, v from one product; x: (B, T, dim) -> (B, T, dim)."""

    def __init__(
        self, dim: int, num_heads: int, norm: NormSpec, *, qk_norm: bool, bias: bool, causal: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim(dim, num_heads)
        self.causal = causal
        self.query_key_value = weight_normed(nn.Linear(dim, 3 * dim, bias=bias), norm)
        self.norm_query = norm_module(norm, self.head_dim) if qk_norm else None
        self.norm_key = norm_module(norm, self.head_dim) if qk_norm else None
        self.output = weight_normed(nn.Linear(dim, dim, bias=bias), norm)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        token_mask: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> Tensor:
        """Attend within x.

        Args:
            x: (B, T, dim).
            mask: broadcastable to (B, H, T, T), True where attention may look (not with `causal`).
            token_mask: (B, T), True for the tokens that a norm over positions may count.
            rotary: the angles of the T positions.
        """
        query, own = self._project(x, rotary, token_mask)
        return self._attend(query, own, mask, causal=self.causal)

    def step(self, x: Tensor, past: KeysValues | None, rotary: Rotation | None) -> tuple[Tensor, KeysValues]:
        """Attend from one new position x (B, 1, dim) to `past` and itself; return also the longer past."""
        query, own = self._project(x, rotary, None)
        if past is not None:
            own = past.append(own)
        # Nothing lies after the newest position, so there is nothing to mask.
        return self._attend(query, own, None, causal=False), own

    def _project(
        self, x: Tensor, rotary: Rotation | None, token_mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        batch, length, _ = x.shape
        joint = self.query_key_value(x).view(batch, length, 3, self.num_heads, self.head_dim)
        joint = joint.permute(2, 0, 3, 1, 4)
        query, key, value = joint.unbind(0)
        if self.norm_query is not None:
            query = normed_heads(self.norm_query, query, token_mask)
            key = normed_heads(self.norm_key, key, token_mask)
            if rotary is not None:
                query, key = rotate(query, rotary), rotate(key, rotary)
        elif rotary is not None:
            query, key = rotate(joint[:2], rotary).unbind(0)
        return query, KeysValues(key, value)

    def _attend(self, query: Tensor, to: KeysValues, mask: Tensor | None, *, causal: bool) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, to.keys, to.values, attn_mask=mask, is_causal=causal)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined


class CrossAttention(nn.Module):
    """Attention from a decoder's positions to an encoder's: (B, T, dim) to (B, S, dim)."""

    def __init__(self, dim: int, num_heads: int, norm: NormSpec, *, qk_norm: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim(dim, num_heads)
        self.query = weight_normed(nn.Linear(dim, dim, bias=bias), norm)
        self.key_value = weight_normed(nn.Linear(dim, 2 * dim, bias=bias), norm)
        self.norm_query = norm_module(norm, self.head_dim) if qk_norm else None
        self.norm_key = norm_module(norm, self.head_dim) if qk_norm else None
        self.output = weight_normed(nn.Linear(dim, dim, bias=bias), norm)

    def read(self, memory: Tensor, token_mask: Tensor | None = None) -> KeysValues:
        """Return the keys and values of the encoder's output (B, S, dim): once a sentence."""
        batch, length, _ = memory.shape
        joint = self.key_value(memory).view(batch, length, 2, self.num_heads, self.head_dim)
        key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)
        return KeysValues(normed_heads(self.norm_key, key, token_mask), value)

    def forward(
        self, x: Tensor, memory: KeysValues, mask: Tensor | None, token_mask: Tensor | None = None
    ) -> Tensor:
        """Attend from x (B, T, dim).

        Args:
            x: (B, T, dim).
            memory: of the S positions of the source.
            mask: (B, 1, 1, S), True where attention may look.
            token_mask: (B, T), True for the tokens of x that a norm over positions may count.
        """
        query = self.query(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        query = normed_heads(self.norm_query, query, token_mask)
        mixed = F.scaled_dot_product_attention(query, memory.keys, memory.values, attn_mask=mask)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined
