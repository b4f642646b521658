from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rmsrepro.config.schema import OptimConfig, Schedule
from rmsrepro.tasks.optim import build_optimizer, decayed_parameter_names, learning_rate_factor


def _rates(config: OptimConfig, max_steps: int, steps: int) -> list[float]:
    """The learning rate that each update used, as the optimiser saw it."""
    optimizer, schedule = build_optimizer(nn.Linear(2, 2), config, max_steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_inverse_sqrt_rises_to_the_peak_and_falls_with_the_root() -> None:
    config = OptimConfig(lr=0.8, warmup_steps=4, schedule=Schedule.inverse_sqrt)
    rates = _rates(config, 100, 16)
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8], rel=1e-12)
    assert rates[3] == 0.8
    assert rates[4] == pytest.approx(0.8 * math.sqrt(4 / 5))
    assert rates[15] == pytest.approx(0.4)


def test_cosine_ends_at_its_fraction_and_stays_there() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule=Schedule.cosine, final_lr_fraction=0.2)
    rates = _rates(config, 10, 12)
    assert rates[:2] == [0.5, 1.0]
    assert rates[5] == pytest.approx(0.6)
    assert rates[9:] == pytest.approx([0.2, 0.2, 0.2])
    assert rates[2:10] == sorted(rates[2:10], reverse=True)


def test_constant_stays_at_the_peak() -> None:
    config = OptimConfig(lr=0.3, warmup_steps=3, schedule=Schedule.constant)
    assert _rates(config, 5, 6) == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3, 0.3])


@pytest.mark.parametrize("schedule", list(Schedule))
def test_without_warm_up_the_first_update_has_the_peak(schedule: Schedule) -> None:
    factor = learning_rate_factor(OptimConfig(warmup_steps=0, schedule=schedule), 1)
    assert factor(1) == pytest.approx(0.1 if schedule is Schedule.cosine else 1.0)
    assert learning_rate_factor(OptimConfig(warmup_steps=0, schedule=Schedule.cosine), 1000)(1) > 0.9999


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    factor = learning_rate_factor(OptimConfig(warmup_steps=10, schedule=Schedule.cosine), 5)
    assert [factor(step) for step in (1, 5)] == [0.1, 0.5]


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.embedding = nn.Embedding(5, 3)
        self.gates_bias = nn.Parameter(torch.zeros(2, 3))
        self.bias_hh = nn.Parameter(torch.zeros(2, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.vector = nn.Parameter(torch.ones(3))


def test_only_matrices_that_are_no_bias_decay() -> None:
    assert decayed_parameter_names(Biased()) == {"linear.weight", "embedding.weight"}


def test_decay_shrinks_what_it_may_and_nothing_else() -> None:
    model = Biased()
    before = {name: parameter.detach().clone() + 0 for name, parameter in model.named_parameters()}
    config = OptimConfig(lr=0.1, weight_decay=0.5, warmup_steps=0, schedule=Schedule.constant)
    optimizer, _ = build_optimizer(model, config, 10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = decayed_parameter_names(model)
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if name in decayed else 1.0)
        torch.testing.assert_close(parameter.detach(), expected)


def test_the_fused_kernel_follows_the_equations() -> None:
    """Three updates against Loshchilov & Hutter 2019, algorithm 2, in float64."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    config = OptimConfig(lr=0.01, weight_decay=0.1, warmup_steps=2, betas=[0.8, 0.95], eps=1e-6)
    optimizer, schedule = build_optimizer(model, config, 10)
    weight = model.weight.detach().double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.randn(3, 4)
        model.weight.grad = gradient.clone()
        optimizer.step()
        schedule.step()
        rate = 0.01 * (step / 2 if step <= 2 else math.sqrt(2 / step))
        first = 0.8 * first + 0.2 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-6)
        weight = weight - rate * 0.1 * weight - rate * update
    torch.testing.assert_close(model.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_optimiser_and_schedule_continue_from_their_state() -> None:
    def advance(model: nn.Module, parts: tuple[torch.optim.AdamW, object], steps: range) -> None:
        optimizer, schedule = parts
        for step in steps:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.sin(step + 1))
            optimizer.step()
            schedule.step()  # type: ignore[attr-defined]

    torch.manual_seed(1)
    config = OptimConfig(warmup_steps=3)
    straight = nn.Linear(4, 4)
    broken = copy.deepcopy(straight)
    advance(straight, build_optimizer(straight, config, 20), range(8))

    parts = build_optimizer(broken, config, 20)
    advance(broken, parts, range(4))
    saved = copy.deepcopy([part.state_dict() for part in parts])
    resumed = copy.deepcopy(broken)
    again = build_optimizer(resumed, config, 20)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    advance(resumed, again, range(4, 8))
    assert torch.equal(resumed.weight, straight.weight)
    assert torch.equal(resumed.bias, straight.bias)
