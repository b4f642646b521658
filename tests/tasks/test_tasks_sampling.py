from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.tasks.sampling import sample
from tests.tasks.fakes import Bigram, Words


class Counting(nn.Module):
    """Has `position_limit` positions; answers that the next word follows the number of tokens it holds."""

    def __init__(self, position_limit: int) -> None:
        super().__init__()
        self.position_limit = position_limit
        self.weight = nn.Parameter(torch.zeros(1))
        self.steps = 0

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        held = [*(state or []), int(tokens)]
        assert len(held) <= self.position_limit, "read past the position table"
        self.steps += 1
        logits = torch.zeros(1, 4 + 26)
        logits[0, 4 + len(held)] = 1.0
        # Never written, however likely.
        logits[0, :4] = 9.0
        return logits, held


def test_temperature_zero_takes_the_likeliest() -> None:
    model = Bigram()
    table = model.table.detach()
    text, token = "a", 4
    for _ in range(6):
        token = max(range(4, 7), key=lambda word: float(table[token, word]))
        text += Words().decode([token])
    assert sample(model, Words(), "a", 6, temperature=0) == text
    # So does drawing from the likeliest one alone, at any temperature.
    assert sample(model, Words(), "a", 6, temperature=5.0, top_k=1, seed=3) == text
    assert sample(model, Words(), "a", 6, temperature=1e-6) == text


def test_the_same_seed_writes_the_same_text_and_the_global_generator_stands_still() -> None:
    model = Bigram()
    before = torch.get_rng_state()
    first = sample(model, Words(), "ab", 40, seed=1)
    assert sample(model, Words(), "ab", 40, seed=1) == first
    assert sample(model, Words(), "ab", 40, seed=2) != first
    assert torch.equal(torch.get_rng_state(), before)
    assert first.startswith("ab")
    assert len(first) == 42


def test_draws_follow_the_model() -> None:
    model = Bigram()
    with torch.no_grad():
        model.table.copy_(torch.log(torch.tensor([0.7, 0.1, 0.1, 0.1, 0.5, 0.25, 0.25])).expand(7, 7))
    drawn = sample(model, Words(), "a", 4000, seed=5)[1:]
    # Three standard deviations of a share of 4000 draws are 0.024.
    assert drawn.count("a") / 4000 == pytest.approx(0.5, abs=0.024)
    assert drawn.count("b") / 4000 == pytest.approx(0.25, abs=0.024)
    # Temperature 1/2 squares the probabilities: 4 : 1 : 1.
    cold = sample(model, Words(), "a", 4000, temperature=0.5, seed=5)[1:]
    assert cold.count("a") / 4000 == pytest.approx(2 / 3, abs=0.024)


def test_a_full_position_table_is_read_again_from_its_younger_half() -> None:
    model = Counting(position_limit=4)
    text = sample(model, Words(30), "a", 8, temperature=0)
    # 1, 2, 3, 4 tokens held; then the last two are read again and a third: 3, 4, 3, 4.
    assert text == "a" + "bcdedede"
    # The prompt and 7 tokens are read, and 2 once more each of the two times the table is full.
    assert model.steps == 8 + 2 * 2


def test_a_long_prompt_is_seen_from_its_end_and_a_context_narrows_the_table() -> None:
    model = Counting(position_limit=6)
    assert sample(model, Words(30), "abcabcabc", 1, temperature=0)[-1] == "g"
    assert model.steps == 6
    assert sample(model, Words(30), "abcabcabc", 1, temperature=0, context=3)[-1] == "d"


def test_an_empty_prompt_is_a_new_line() -> None:
    class Lines(Words):
        def encode(self, text: str) -> list[int]:
            return [6 if letter == "\n" else 4 for letter in text]

    model = Bigram()
    assert sample(model, Lines(), "", 5, temperature=0) == sample(model, Words(), "c", 5, temperature=0)[1:]


def test_asking_for_nothing_gives_the_prompt() -> None:
    assert sample(Bigram(), Words(), "abc", 0) == "abc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"num_tokens": -1}, "num_tokens=-1"),
        ({"top_k": 0}, "top_k=0"),
        ({"context": 0}, "context=0"),
        ({"prompt": "ZZ"}, "prompt='ZZ'"),
        ({"prompt": ""}, "prompt=''"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sample(Bigram(), Words(), **{"prompt": "a", "num_tokens": 3, **arguments})


def test_the_mode_of_the_model_is_left_as_it_was() -> None:
    model = Bigram().train()
    sample(model, Words(), "a", 2)
    assert model.training
