from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsrepro.data.sampler import (
    EpochSequence,
    pack,
    plan_epoch,
    random_words,
    shuffled,
    update_of,
    window_starts,
)


def test_random_words_stay_what_they_are() -> None:
    """Batches of finished runs depend on these: Philox of the key blake2b(b"lm:1")."""
    words = random_words(1, "lm", 0, 3)
    assert words.tolist() == [16000737331193746839, 7375897110513591437, 673914198306622183]
    assert random_words(1, "lm", 0, 2).tolist() == words[:2].tolist()
    assert random_words(1, "lm", 1, 3).tolist() != words.tolist()
    assert random_words(2, "lm", 0, 3).tolist() != words.tolist()
    assert random_words(1, "other", 0, 3).tolist() != words.tolist()


def test_global_random_state_is_left_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    window_starts(1, 5, 8, 100)
    shuffled(1, "s", 0, 50)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]


def test_window_starts_cover_the_text() -> None:
    starts = np.concatenate([window_starts(1, batch, 16, 7) for batch in range(50)])
    assert set(starts.tolist()) == set(range(7))
    assert window_starts(1, 0, 4, 1).tolist() == [0, 0, 0, 0]


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 200))
def test_shuffle_is_a_permutation(seed: int, counter: int, count: int) -> None:
    order = shuffled(seed, "rows", counter, count)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == shuffled(seed, "rows", counter, count).tolist()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=200),
    st.integers(40, 400),
    st.none() | st.integers(1, 9),
)
def test_packing_keeps_the_budget_and_every_row(widths: list[int], budget: int, max_rows: int | None) -> None:
    ordered = np.array(sorted(widths), dtype=np.int64)
    cuts = pack(ordered, budget, max_rows)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == len(widths)
    for number, (start, end) in enumerate(cuts):
        assert end > start
        assert (end - start) * ordered[end - 1] <= budget
        assert max_rows is None or end - start <= max_rows
        if number + 1 < len(cuts) and end - start != max_rows:  # greedy: one row more would not fit
            assert (end - start + 1) * ordered[end] > budget


def test_packing_by_hand() -> None:
    widths = np.array([1, 2, 2, 3, 5], dtype=np.int64)
    assert pack(widths, 6, None) == [(0, 3), (3, 4), (4, 5)]
    assert pack(widths, 6, 2) == [(0, 2), (2, 4), (4, 5)]
    assert pack(widths, 4, None) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_an_epoch_has_every_pair_once_and_little_padding() -> None:
    generator = np.random.default_rng(0)
    source = generator.integers(2, 40, 3000)
    target = np.clip(source + generator.integers(-3, 4, 3000), 2, 42)
    plans = [
        plan_epoch(source, target, seed=1, epoch=epoch, budget=400, max_rows=None) for epoch in (0, 1, 0)
    ]
    for plan in plans:
        rows = np.concatenate(plan.batches)
        assert sorted(rows.tolist()) == list(range(3000))
        assert plan.target_tokens == [int(target[batch].sum()) for batch in plan.batches]
        width = [int(np.maximum(source, target)[batch].max()) for batch in plan.batches]
        cells = [len(batch) * w for batch, w in zip(plan.batches, width, strict=True)]
        assert max(cells) <= 400
        assert np.maximum(source, target).sum() / sum(cells) > 0.9
        assert width != sorted(width)  # short and long batches are mixed
    first, second, again = (np.concatenate(plan.batches).tolist() for plan in plans)
    assert first != second
    assert first == again


def test_batches_are_found_over_epochs_in_any_order() -> None:
    lengths = np.arange(1, 21)

    def sequence() -> EpochSequence:
        return EpochSequence(
            lambda epoch: plan_epoch(lengths, lengths, seed=4, epoch=epoch, budget=30, max_rows=None)
        )

    straight = sequence()
    rows = [straight.rows(batch).tolist() for batch in range(60)]
    tokens = [straight.target_tokens(batch) for batch in range(60)]
    for batch in (59, 0, 30, 29):
        jumped = sequence()
        assert jumped.rows(batch).tolist() == rows[batch]
        assert jumped.target_tokens(batch) == tokens[batch] == lengths[rows[batch]].sum()
    first = straight.locate(0)
    assert first == (0, 0)
    size = sum(straight.locate(batch)[0] == 0 for batch in range(60))
    assert straight.locate(size) == (1, 0)
    assert straight.epochs(size) == 1.0
    assert 0 < straight.epochs(size - 1) < 1


@pytest.mark.parametrize(
    ("batch", "accumulate", "batches"), [(0, 1, [0]), (5, 1, [5]), (0, 3, [0, 1, 2]), (5, 3, [3, 4, 5])]
)
def test_update(batch: int, accumulate: int, batches: list[int]) -> None:
    assert list(update_of(batch, accumulate)) == batches
