"""The residual block: the one place that knows where a Transformer's norms sit.

f is the branch (attention or feed-forward), n a norm with its own parameters, d dropout::

    pre                  post                 sandwich             res_post             none

    x ----+              x ----+              x ----+              x ----+              x ----+
    |     n              |     |              |     n1             |     |              |     |
    |     f              |     f              |     f              |     f              |     f
    |     d              |     d              |     d              |     d              |     d
    |     |              |     |              |     n2             |     n              |     |
    +-----+              +-----+              +-----+              +-----+              +-----+
    |                    |                    |                    |                    |
    |                    n                    |                    |                    |

    x + d(f(n(x)))       n(x + d(f(x)))       x + n2(d(f(n1(x))))  x + n(d(f(x)))       x + d(f(x))

`pre` and `sandwich` leave the residual stream itself without a norm, so the stack ends in a final one.
Norms of a stack with R residual branches (2 a layer; 3 with attention to an encoder):

    pre R + 1,  post R,  sandwich 2 R + 1,  res_post R,  none 0.

A norm called `none` has no norm modules in any placement, nor has a norm of weights: it reparametrises the
linear maps inside the branches instead.

Where a norm's backend can add and normalise in one pass (`fused`), the plus and the norm after it are one: in
`post` within the block, in `pre` and `sandwich` the plus of a block with the norm at the start of the next
one (or the final norm), which is handed the two summands. The numbers are the same. That is between the parts
of a stack alone: who calls a layer or a block himself, or watches it by hooks, sees tensors.

Sources: `post` Vaswani et al. 2017, the authors' own Transformer (Zhang & Sennrich 2019, section 6.1, with
their code); `pre` Xiong et al. 2020; `sandwich` Ding et al. 2021 and Gemma 2; `res_post` Liu et al. 2022
(Swin v2) and OLMo 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.schema import FeedForward as FeedForwardKind
from rmsrepro.config.schema import Placement
from rmsrepro.models.normed import has_modules
from rmsrepro.norms import NormSpec, apply_norm, weight_normed
from rmsrepro.norms.adding import add_norm, adds


@dataclass(frozen=True)
class Dataflow:
    """Which of the possible places of a norm are taken."""

    branch_input: bool = False
    branch_output: bool = False
    after_sum: bool = False
    final: bool = False
    """At the end of the stack."""


DATAFLOWS: dict[Placement, Dataflow] = {
    Placement.pre: Dataflow(branch_input=True, final=True),
    Placement.post: Dataflow(after_sum=True),
    Placement.sandwich: Dataflow(branch_input=True, branch_output=True, final=True),
    Placement.res_post: Dataflow(branch_output=True),
    Placement.none: Dataflow(),
}


def dataflow(norm: NormSpec, placement: Placement) -> Dataflow:
    """Return where the norms sit; `none` and norms of weights ignore the placement."""
    return DATAFLOWS[placement if has_modules(norm) else Placement.none]


class Summands(NamedTuple):
    """A residual stream x + y, both (..., dim), that the next norm adds up in its own pass."""

    x: Tensor
    y: Tensor


Stream = Tensor | Summands


def whole(stream: Stream) -> Tensor:
    """Return the stream (..., dim) added up."""
    return stream.x + stream.y if isinstance(stream, Summands) else stream


def norm_of(norm: nn.Module | None, stream: Stream, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the stream added up, and its norm; both (..., dim). `mask` as in `apply_norm`."""
    if isinstance(stream, Summands):
        return add_norm(norm, stream.x, stream.y, mask)
    return stream, apply_norm(norm, stream, mask)


class Residual(nn.Module):
    """One residual branch with the norms that its placement asks for; x: (..., dim) -> (..., dim).

    The branch is handed to `forward` instead of being owned, so that it may take what it likes beside
    x and so that its parameters have the same names in every placement.
    """

    def __init__(self, dim: int, norm: NormSpec, placement: Placement, dropout: float) -> None:
        super().__init__()
        flow = dataflow(norm, placement)
        self.norm_input = norm.build(dim) if flow.branch_input else None
        self.norm_output = norm.build(dim) if flow.branch_output else None
        self.norm_sum = norm.build(dim) if flow.after_sum else None
        self.dropout = nn.Dropout(dropout)
        self.can_leave_sum = adds(self.norm_input)
        """Whether the norm that follows can add up: where blocks begin with a norm, one does."""

    def forward(
        self,
        x: Stream,
        branch: Callable[[Tensor], Tensor],
        token_mask: Tensor | None = None,
        *,
        leave_sum: bool = False,
    ) -> Stream:
        """Return x with the branch added, as drawn at the top of this module.

        Args:
            x: the residual stream.
            branch: maps (..., dim) to (..., dim).
            token_mask: (...), True for the positions of x that a norm over positions may count.
            leave_sum: whether the sum may be left to who comes next; a tensor is returned without.
        """
        x, y = norm_of(self.norm_input, x, token_mask)
        y = self.dropout(branch(y))
        y = apply_norm(self.norm_output, y, token_mask)
        if leave_sum and self.can_leave_sum:
            return Summands(x, y)
        return add_norm(self.norm_sum, x, y, token_mask)[1]


def final_norm(dim: int, norm: NormSpec, placement: Placement) -> nn.Module | None:
    """Return the norm at the end of a stack, or None where the placement has none."""
    return norm.build(dim) if dataflow(norm, placement).final else None


class FeedForward(nn.Module):
    """The position-wise part, (..., dim) -> (..., dim) through `inner` units.

    gelu: down(gelu(up(x))).  swiglu: down(silu(gate(x)) * up(x)) (Shazeer 2020) with gate and up as one
    product, in this order; `inner` is the width of each, and is not shrunk to equal parameter counts.
    A norm of weights normalises these maps; no other norm has a place in here.
    """

    def __init__(self, dim: int, inner: int, kind: FeedForwardKind, norm: NormSpec, *, bias: bool) -> None:
        super().__init__()
        self.gated = kind is FeedForwardKind.swiglu
        if self.gated:
            self.gate_up = weight_normed(nn.Linear(dim, 2 * inner, bias=bias), norm)
        else:
            self.up = weight_normed(nn.Linear(dim, inner, bias=bias), norm)
        self.down = weight_normed(nn.Linear(inner, dim, bias=bias), norm)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.gate_up(x).chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(self.up(x))
        y: Tensor = self.down(inner)
        return y
