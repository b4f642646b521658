"""Writing text with a trained language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.data.tokenizers import BOS, EOS, PAD, UNK, TextTokenizer
from rmsrepro.models.interface import LanguageModel

NEVER_WRITTEN = (PAD, BOS, EOS, UNK)
START = "\n"
"""What an empty prompt stands for: the beginning of a line."""


class _Reader:
    """Feeds a model one token at a time and returns the logits of the next.

    A model with a position table holds `limit` tokens. When it is full, the younger half of what it
    holds is read again from position 0, so a token sees between half a table and a whole one, and a
    text of any length costs at most twice its tokens. Without a limit the state just goes on.
    """

    def __init__(self, model: LanguageModel[Any], limit: int | None) -> None:
        self.model, self.limit = model, limit
        self.state: Any = None
        self.held: list[Tensor] = []

    def feed(self, token: Tensor) -> Tensor:
        """Read `token` (1,); return logits (1, V)."""
        if self.limit is not None and len(self.held) >= self.limit:
            again = self.held[len(self.held) - self.limit // 2 :]
            self.state, self.held = None, []
            for earlier in again:
                self._step(earlier)
        return self._step(token)

    def _step(self, token: Tensor) -> Tensor:
        logits: Tensor
        logits, self.state = self.model.step(token, self.state)
        if self.limit is not None:
            self.held.append(token)
        return logits


@torch.inference_mode()
def sample(
    model: LanguageModel[Any],
    tokenizer: TextTokenizer,
    prompt: str,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    *,
    context: int | None = None,
) -> str:
    """Continue `prompt` by `num_tokens` tokens and return the prompt with its continuation.

    Tokens are drawn from softmax(logits / temperature), from the `top_k` likeliest alone when given;
    temperature 0 always takes the likeliest. Special tokens are never drawn. The same arguments give
    the same text: the draws come from a generator of their own. An empty prompt is read as the
    beginning of a line.

    `context` bounds how many tokens the model looks back on, besides the model's own position limit:
    a model without one (rotary positions) has still only seen windows of data.max_len in training.

    Raises:
        UserError: a negative or non-finite temperature, num_tokens below 0, top_k or context below 1,
            or a prompt with no character that the vocabulary knows.
    """
    _check(num_tokens, temperature, top_k, context)
    prompt_tokens = tokenizer.encode(prompt or START)
    if all(token in NEVER_WRITTEN for token in prompt_tokens):
        raise UserError(
            f"prompt={prompt!r}: the model's vocabulary has nothing of it; give a prompt in the characters "
            "of the training text"
        )
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    barred = torch.tensor(NEVER_WRITTEN, device=device)
    was_training = model.training
    model.eval()
    try:
        limits = [limit for limit in (context, model.position_limit) if limit is not None]
        limit = min(limits, default=None)
        reader = _Reader(model, limit)
        # Of a prompt that does not fit, the model sees the end.
        for token in torch.tensor(prompt_tokens[-limit if limit else 0 :], device=device).split(1):
            logits = reader.feed(token)
        written = []
        for position in range(num_tokens):
            token = _draw(logits.float().index_fill(1, barred, -torch.inf), temperature, top_k, generator)
            written.append(token)
            if position + 1 < num_tokens:
                logits = reader.feed(token)
    finally:
        model.train(was_training)
    new_tokens = torch.cat(written).tolist() if written else []
    return prompt + _continuation(tokenizer, prompt_tokens, new_tokens)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token (1,) from logits (1, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    # The largest logit becomes 0 first, so that a tiny temperature cannot overflow.
    probabilities = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _continuation(tokenizer: TextTokenizer, prompt_tokens: list[int], new_tokens: list[int]) -> str:
    """The text that the new tokens add.

    Decoded together with the prompt, since a token may depend on its neighbours (a leading space, half
    a character in bytes).
    """
    before, after = tokenizer.decode(prompt_tokens), tokenizer.decode(prompt_tokens + new_tokens)
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(new_tokens)


def _check(num_tokens: int, temperature: float, top_k: int | None, context: int | None) -> None:
    if num_tokens < 0:
        raise UserError(f"num_tokens={num_tokens}: expected 0 or more")
    if not 0 <= temperature < float("inf"):
        raise UserError(
            f"temperature={temperature}: expected 0 (always the likeliest token) or a positive number"
        )
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: expected 1 or more; leave it out to draw from the whole vocabulary")
    if context is not None and context < 1:
        raise UserError(
            f"context={context}: expected 1 or more tokens; leave it out for the model's own limit"
        )
