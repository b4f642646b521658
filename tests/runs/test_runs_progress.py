"""What a run tells while it trains."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from rmsrepro.config.schema import TrainConfig
from rmsrepro.runs import progress
from rmsrepro.runs.records import read_metrics
from rmsrepro.runs.train import train


@pytest.mark.parametrize("validations", [[3, 6], [4, 6]])
def test_one_line_a_step_with_its_own_losses(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, validations: list[int]
) -> None:
    # Every step follows a quiet time, as in a run whose updates take long.
    monkeypatch.setattr(progress, "_QUIET_S", -1.0)
    told = io.StringIO()
    config = make_config("gru", "lm", f"trainer.val_every={validations[0]}")
    result = train(config, console=Console(file=told, width=200))
    rows = {row["step"]: row for row in read_metrics(result.path / "metrics.jsonl")}
    assert [step for step, row in rows.items() if "val_loss" in row] == validations
    lines = re.findall(
        r"^step (\d+)/6  train_loss (\S+)(?:  val_loss (\S+))?$", told.getvalue(), re.MULTILINE
    )
    newest, expected = "", []
    for step, row in rows.items():
        newest = f"{row['val_loss']:.4f}" if "val_loss" in row else newest
        expected.append((str(step), f"{row['train_loss']:.4f}", newest))
    assert lines == expected


def test_a_validation_is_told_and_quick_steps_are_not(make_config: Callable[..., TrainConfig]) -> None:
    told = io.StringIO()
    train(make_config("gru", "lm"), console=Console(file=told, width=200))
    assert re.findall(r"^step (\d+)/6", told.getvalue(), re.MULTILINE) == ["3", "6"]


def test_the_bar_leaves_room_for_its_numbers() -> None:
    told = io.StringIO()
    screen = Console(file=told, width=80, force_terminal=True)
    run_id = "lm-pydoc-transformer-layernorm_nobias-pre-s1-0123456789"
    with progress.progress_view(screen, run_id, 100000, enabled=True) as view:
        view.update(99999, {"train_loss": 12.34567, "val_loss": 11.2345})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told.getvalue())
    assert "99999/100000" in shown
    assert "train 12.3457  val 11.2345" in shown
    assert "lm-p" in shown
    assert "s1-0123456789" in shown
    assert run_id not in shown
