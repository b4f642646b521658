from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.tasks.search import EOS, beam_search, greedy_search
from tests.tasks.fakes import VOCAB, RandomTranslator, Rows

WORDS = range(4, VOCAB)


def _sources(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, VOCAB, (rows, 5), generator=generator)
    lengths = torch.randint(1, 6, (rows, 1), generator=generator)
    return src, torch.arange(5) < lengths


def _log_prob(model: RandomTranslator, src: torch.Tensor, mask: torch.Tensor, tokens: list[int]) -> float:
    logits = model(src, mask, torch.tensor([[1, *tokens[:-1]]]))[0].float()
    picked = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float(picked.sum())


def _exhaustive(
    model: RandomTranslator, src: torch.Tensor, mask: torch.Tensor, max_len: int, penalty: float
) -> list[int]:
    """The best of all sequences that end within max_len tokens, the end mark included."""
    scored = []
    for length in range(1, max_len):
        for words in itertools.product(WORDS, repeat=length):
            tokens = [*words, EOS]
            scored.append((_log_prob(model, src, mask, tokens) / len(tokens) ** penalty, list(words)))
    return max(scored)[1]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_a_wide_beam_finds_what_exhaustive_search_finds(seed: int, penalty: float) -> None:
    model = RandomTranslator(seed=seed)
    src, mask = _sources(3, seed)
    # 3 words: at most 3**4 beginnings are alive, so nothing is ever dropped from a beam of 100.
    found = beam_search(model, src, mask, max_len=4, beam_size=100, length_penalty=penalty)
    for row in range(3):
        assert found[row] == _exhaustive(model, src[row : row + 1], mask[row : row + 1], 4, penalty)


@torch.no_grad()
def test_penalties_choose_different_lengths() -> None:
    model = RandomTranslator(seed=3, scale=0.5)
    src, mask = _sources(16)
    lengths = [
        sum(map(len, beam_search(model, src, mask, max_len=6, beam_size=20, length_penalty=penalty)))
        for penalty in (0.0, 1.0)
    ]
    # Undivided log-probabilities only fall with length.
    assert lengths[0] < lengths[1]


@torch.no_grad()
def test_a_beam_of_one_is_greedy() -> None:
    lengths = set()
    for seed in range(8):
        model = RandomTranslator(seed=seed)
        src, mask = _sources(20, seed)
        greedy = greedy_search(model, src, mask, max_len=9)
        assert beam_search(model, src, mask, max_len=9, beam_size=1) == greedy
        lengths |= {len(tokens) for tokens in greedy}
    # Both ways to stop occurred: by an end mark, and at the limit.
    assert 1 in lengths
    assert 9 in lengths


@torch.no_grad()
def test_greedy_takes_the_likeliest_token_of_the_allowed_ones() -> None:
    model = RandomTranslator(seed=4)
    src, mask = _sources(8, 4)
    for row, tokens in enumerate(greedy_search(model, src, mask, max_len=6)):
        whole = [*tokens, EOS] if len(tokens) < 6 else tokens
        logits = model(src[row : row + 1], mask[row : row + 1], torch.tensor([[1, *whole[:-1]]]))[0]
        for position, token in enumerate(whole):
            allowed = list(WORDS) if position == 0 else [EOS, *WORDS]
            assert token == max(allowed, key=lambda word: float(logits[position, word]))


@pytest.mark.parametrize("beam_size", [1, 2, 4])
@torch.no_grad()
def test_marks_are_never_written_and_no_hypothesis_is_empty(beam_size: int) -> None:
    model = RandomTranslator(seed=5)
    with torch.no_grad():
        # Make every mark by far the likeliest everywhere.
        model.out[:, :4] = 0
        model.out[:, 4:] -= 3
    src, mask = _sources(12, 5)
    for tokens in beam_search(model, src, mask, max_len=5, beam_size=beam_size) + greedy_search(
        model, src, mask, max_len=5
    ):
        assert tokens
        assert set(tokens) <= set(WORDS)


@pytest.mark.parametrize("beam_size", [1, 3])
@torch.no_grad()
def test_a_row_alone_gets_what_it_gets_in_a_batch(beam_size: int) -> None:
    model = RandomTranslator(seed=6, scale=1.0)
    src, mask = _sources(24, 6)
    options: dict[str, Any] = {"max_len": 10, "beam_size": beam_size, "length_penalty": 0.5}
    together = beam_search(model, src, mask, **options)
    alone = [beam_search(model, src[[row]], mask[[row]], **options)[0] for row in range(24)]
    assert together == alone
    # Rows were done at different times.
    assert len({len(tokens) for tokens in alone}) > 2


class SureOfEight(nn.Module):
    """Word 4 eight times, then the end, each almost certain; an end is always the second choice."""

    def start(self, src: Tensor, src_mask: Tensor) -> Rows:
        return Rows(torch.zeros(len(src)))

    def step(self, tokens: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        logits = torch.tensor([0.0, 0.0, 2.0, 0.0, 8.0, 1.0, 1.0]).repeat(len(tokens), 1)
        logits[state.hidden == 8, EOS] = 14.0
        return logits, Rows(state.hidden + 1)


@pytest.mark.parametrize("beam_size", [1, 2, 3])
def test_early_ends_of_hardly_any_probability_do_not_stop_a_search(beam_size: int) -> None:
    src, mask = _sources(2)
    found = beam_search(SureOfEight(), src, mask, max_len=20, beam_size=beam_size)
    assert found == [[4] * 8, [4] * 8]


@torch.no_grad()
def test_a_source_without_tokens_still_gets_a_hypothesis() -> None:
    model = RandomTranslator(seed=7)
    src, mask = _sources(3, 7)
    mask[1] = False
    together = beam_search(model, src, mask, max_len=5, beam_size=2)
    assert together[1]
    assert together[0] == beam_search(model, src[:1], mask[:1], max_len=5, beam_size=2)[0]


@torch.no_grad()
def test_no_rows_and_one_step() -> None:
    model = RandomTranslator()
    src, mask = _sources(2)
    assert greedy_search(model, src[:0], mask[:0], max_len=5) == []
    assert beam_search(model, src[:0], mask[:0], max_len=5, beam_size=2) == []
    # One step is too short for a token and an end: the likeliest beginning is returned.
    assert beam_search(model, src, mask, max_len=1, beam_size=3) == greedy_search(model, src, mask, max_len=1)
