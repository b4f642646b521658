"""Token-weighted sums of a split, and the figures that are made from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from rmsrepro.data.batches import IGNORE


def perplexity(nats: float) -> float:
    """exp(nats); infinity where that does not fit a float, NaN for NaN."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Nats a token as bits a byte, which no longer depends on the tokenizer."""
    return nats_per_token / (bytes_per_token * math.log(2))


class TokenMeter(Metric):
    """Negative log-likelihood and accuracy over all tokens of a split.

    Batches of different sizes weigh by their tokens. Sums are kept batch by batch and added up in
    float64 on the CPU at the end, so a split's length costs no precision and no device needs float64.
    """

    full_state_update = False
    nll: list[Tensor]
    correct: list[Tensor]
    tokens: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("nll", "correct", "tokens"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Take in `logits` (..., V) of any floating dtype and `targets` (...), IGNORE where no token."""
        flat, wanted = logits.flatten(0, -2).float(), targets.flatten()
        nll = torch.nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE, reduction="sum")
        self.nll.append(nll.detach())
        self.correct.append((flat.argmax(-1) == wanted).sum())
        self.tokens.append((wanted != IGNORE).sum())

    def compute(self) -> dict[str, float]:
        """`loss` in nats a token and `accuracy`, a fraction; both NaN when there was no token."""
        if len(self.tokens) == 0:  # of several processes it is a tensor by now
            return {"loss": math.nan, "accuracy": math.nan, "tokens": 0.0}
        nll, correct, tokens = (
            float(dim_zero_cat(state).cpu().double().sum()) for state in (self.nll, self.correct, self.tokens)
        )
        if tokens == 0:
            return {"loss": math.nan, "accuracy": math.nan, "tokens": 0.0}
        return {"loss": nll / tokens, "accuracy": correct / tokens, "tokens": tokens}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as update: the value of one batch is of no use here."""
        self.update(*args, **kwargs)
