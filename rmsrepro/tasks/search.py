"""Greedy and beam search over a translation model's step function.

Both take a batch of sources and decode all rows together. What one row gets does not depend on its
neighbours: a row that is done takes no further part. The padding, begin and unknown marks are never
written, and a hypothesis has at least one token before its end mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsrepro.data.tokenizers import BOS, EOS, PAD, UNK
from rmsrepro.models.interface import TranslationModel

NEVER = (PAD, BOS, UNK)
"""Tokens that no hypothesis may contain."""
CHECK_EVERY = 8
"""Steps between two questions to an accelerator whether all rows are done; each one waits for it."""


def greedy_search(
    model: TranslationModel[Any], src: Tensor, src_mask: Tensor, *, max_len: int
) -> list[list[int]]:
    """Take the most probable token at each step.

    `src` (B, S) and `src_mask` (B, S), True = token, are the sources. `max_len` counts the steps, so the
    end mark too. Returns one token list a row, without marks; a row that does not end within `max_len`
    is returned as it is.
    """
    rows = src.shape[0]
    if rows == 0:
        return []
    state = model.start(src, src_mask)
    tokens = torch.full((rows,), BOS, dtype=torch.long, device=src.device)
    done = torch.zeros(rows, dtype=torch.bool, device=src.device)
    banned = _banned(src.device)
    written = []
    for step in range(max_len):
        logits, state = model.step(tokens, state)
        # argmax of a copy: the model may still own its logits.
        logits = logits.index_fill(1, banned[: len(NEVER) if step else None], -torch.inf)
        tokens = logits.argmax(-1).masked_fill_(done, EOS)
        written.append(tokens)
        done |= tokens == EOS
        if _all_done(done, step):
            break
    return [_until_end(row) for row in torch.stack(written, 1).tolist()]


def beam_search(
    model: TranslationModel[Any],
    src: Tensor,
    src_mask: Tensor,
    *,
    max_len: int,
    beam_size: int,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Keep the `beam_size` best beginnings of each row; return its best finished hypothesis.

    A finished hypothesis is ranked by log-probability / length**length_penalty, where the end mark
    counts in both. A row is done when no beginning can overtake its best hypothesis any more, or when
    `beam_size` hypotheses have finished and the best beginning, divided by its own length, ranks below
    the best of them. (To stop at the count alone would return a stump: an early end mark of hardly any
    probability finishes too, when the beam has no better second choice.) A row in which nothing finishes
    within `max_len` steps gives its most probable beginning. `beam_size=1` is greedy search.

    The most probable continuations are counted against the whole vocabulary: forbidding a token does
    not make the others likelier.
    """
    rows, width = src.shape[0], beam_size
    if rows == 0:
        return []
    device = src.device
    state = model.start(src, src_mask)
    first_row = (torch.arange(rows, device=device) * width)[:, None]
    if width > 1:
        state = state.select(torch.arange(rows, device=device).repeat_interleave(width))
    tokens = torch.full((rows * width,), BOS, dtype=torch.long, device=device)
    # All beams of a row start equal, so only the first may be continued in the first step.
    alive = torch.full((rows, width), -torch.inf, device=device)
    alive[:, 0] = 0.0
    best = torch.full((rows,), -torch.inf, device=device)
    best_step = torch.zeros(rows, dtype=torch.long, device=device)
    best_beam = torch.zeros(rows, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.long, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    banned = _banned(device)
    parents: list[Tensor] = []
    choices: list[Tensor] = []
    # The most that a log-probability can be raised by a later division: by the longest or next length.
    longest = max_len**length_penalty
    for step in range(max_len):
        logits, state = model.step(tokens, state)
        log_probs = torch.log_softmax(logits.float(), -1)
        log_probs.index_fill_(1, banned[: len(NEVER) if step else None], -torch.inf)
        vocab = log_probs.shape[1]
        scores, flat = (alive[:, :, None] + log_probs.view(rows, width, vocab)).view(rows, -1).topk(2 * width)
        beam, token = flat // vocab, flat % vocab
        ends = token == EOS

        # Only an end among the best `width` finishes: the rest would not have been kept either.
        ended = scores[:, :width].masked_fill(~ends[:, :width] | done[:, None], -torch.inf)
        score, place = (ended / (step + 1) ** length_penalty).max(1)
        better = score > best
        best = torch.where(better, score, best)
        best_step = torch.where(better, step, best_step)
        best_beam = torch.where(better, beam.gather(1, place[:, None])[:, 0], best_beam)
        finished += (ended > -torch.inf).sum(1)

        # At most one end a beam, hence at least `width` others among the 2 * width candidates.
        alive, kept = scores.masked_fill(ends, -torch.inf).topk(width)
        parent, choice = beam.gather(1, kept), token.gather(1, kept)
        parents.append(parent)
        choices.append(choice)
        reachable = alive[:, 0] / max(longest, (step + 2) ** length_penalty)
        ranked_now = alive[:, 0] / (step + 1) ** length_penalty
        done |= (best >= reachable) | ((finished >= width) & (best >= ranked_now))
        if _all_done(done, step):
            break
        tokens = choice.view(-1)
        if width > 1:
            state = state.select((first_row + parent).view(-1))
    return _trace(parents, choices, (best > -torch.inf), best_step, best_beam)


def _trace(
    parents: list[Tensor], choices: list[Tensor], ended: Tensor, best_step: Tensor, best_beam: Tensor
) -> list[list[int]]:
    """Follow each row's best hypothesis back to its beginning, once, on the host."""
    back, words = torch.stack(parents, 1).tolist(), torch.stack(choices, 1).tolist()
    hypotheses = []
    for row, (has_end, step, beam) in enumerate(
        zip(ended.tolist(), best_step.tolist(), best_beam.tolist(), strict=True)
    ):
        # A finished one: its end mark was written at `step` after beam `beam`. Otherwise beam 0, whole.
        if not has_end:
            step, beam = len(parents), 0
        hypothesis = []
        for position in range(step - 1, -1, -1):
            hypothesis.append(words[row][position][beam])
            beam = back[row][position][beam]
        hypotheses.append(hypothesis[::-1])
    return hypotheses


def _banned(device: torch.device) -> Tensor:
    """NEVER, and last the end mark, which only the first step forbids."""
    return torch.tensor([*NEVER, EOS], device=device)


def _all_done(done: Tensor, step: int) -> bool:
    """Whether every row is done; on an accelerator asked only now and then, as it costs a wait."""
    if done.device.type != "cpu" and (step + 1) % CHECK_EVERY:
        return False
    return bool(done.all())


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens
