"""What a tuning may be told: the keys, their defaults, and what is refused."""

from __future__ import annotations

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override
from rmsrepro.config.tuning import Range, TuningConfig, ranges_of, read_tuning


def read(*texts: str) -> TuningConfig:
    return read_tuning([Override(*text.split("=", 1)) for text in texts])


def test_the_keys_are_read_by_type() -> None:
    assert read() == TuningConfig()
    found = read("points=4", "lr=[1e-4,1]", "warmup=[0,10]", "decay=[1e-3,2e-3]", "seed=9", "margin=null")
    assert (found.points, found.lr, found.warmup, found.decay) == (4, [1e-4, 1.0], [0, 10], [1e-3, 2e-3])
    assert (found.seed, found.final_seeds, found.margin) == (9, [1, 2, 3], None)
    assert isinstance(found.lr[1], float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=[1e-2,1e-3]", "tuning.lr=[0.01,0.001]: the second number must be the larger one"),
        ("lr=[1e-2,1e-2]", "optim.lr=0.01"),
        ("lr=[0,1e-2]", "tuning.lr=[0,0.01]: values are drawn log-uniformly, so the range must begin above"),
        ("lr=[1e-2]", "tuning.lr=[0.01]: expected two numbers, from and to, as in tuning.lr=[1e-3,1e-2]"),
        ("lr=[1e-3,inf]", "expected two numbers"),
        ("lr=[nan,1]", "expected two numbers"),
        ("lr=null", "tuning.lr=null: it cannot be null"),
        ("lr=3e-3", "tuning.lr"),
        ("lr=1e-3,1e-2", "a range or a list stands in brackets"),
        ("lr=[a,b]", "tuning.lr"),
        ("lr=[1,[2]]", "tuning.lr"),
        ("lr=[", "cannot read the value"),
        ("decay=[-1,1]", "tuning.decay=[-1,1]: values are drawn log-uniformly"),
        ("warmup=[-1,5]", "tuning.warmup=[-1,5]: expected 0 or more"),
        ("warmup=[5,5]", "optim.warmup_steps=5"),
        ("warmup=[1.5,5]", "tuning.warmup"),
        ("points=1", "tuning.points=1: expected a whole number from 2 to 1000"),
        ("points=100000", "expected a whole number from 2 to 1000"),
        ("points=many", "tuning.points=many: expected a whole number"),
        ("seed=-1", "tuning.seed: -1: expected a whole number from 0"),
        ("final_seeds=[]", "expected at least one seed"),
        ("final_seeds=[1,1]", "a seed is named more than once"),
        ("final_seeds=[0,1]", "0 is tuning.seed"),
        ("margin=0", "tuning.margin=0.0: expected a number above zero, or null"),
        ("margin=nan", "expected a number above zero"),
        ("point=8", "there is no key tuning.point; did you mean points? (keys there: points, lr, warmup,"),
        ("lr.low=1", "there is no key tuning.lr.low"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_fixed_parameter_has_no_range() -> None:
    tuning = read("warmup=[2,6]")
    assert list(ranges_of(tuning, [], 10)) == ["lr", "warmup_steps", "weight_decay"]
    assert list(ranges_of(tuning, ["lr"], 10)) == ["warmup_steps", "weight_decay"]


def test_a_warm_up_fits_into_the_run() -> None:
    with pytest.raises(
        UserError, match=r"tuning.warmup=\[2,6\]: longer than the run \(trainer.max_steps=5\)"
    ):
        ranges_of(read("warmup=[2,6]"), [], 5)
    assert "warmup_steps" not in ranges_of(read("warmup=[2,6]"), ["warmup_steps"], 5)
    for max_steps in (1, 2, 6, 300, 10_000):
        found = ranges_of(read(), [], max_steps)["warmup_steps"]
        assert 0 <= found.low < found.high <= max_steps, max_steps
    assert ranges_of(read(), [], 300)["warmup_steps"] == Range(15, 150, whole=True)


def test_values_stay_in_their_range_and_can_be_typed() -> None:
    odd = Range(0.00123456789, 0.0123456789)
    assert Range(0.00123466, 1.0).at(0.0) == 0.001235
    assert Range(0.00123444, 1.0).at(0.0) == 0.00123444  # rounded, it would lie outside
    assert odd.low <= odd.at(0.9999999) <= odd.high
    assert repr(odd.at(0.37)) == "0.002894"
    steps = Range(3, 5, whole=True)
    assert [steps.at(share) for share in (0.0, 0.33, 0.34, 0.66, 0.67, 0.999999)] == [3, 3, 4, 4, 5, 5]
