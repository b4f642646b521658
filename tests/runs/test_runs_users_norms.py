"""Norms of the user's own, of every kind that is legal, in both models and tasks, with their checkpoints."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.data import build_data
from rmsrepro.norms import registry, unregister_norm
from rmsrepro.runs.checkpoints import load_checkpoint, restore
from rmsrepro.runs.execution import tokenizer_cache
from rmsrepro.runs.result import RunResult
from rmsrepro.runs.seeding import stream_seed
from rmsrepro.runs.train import train
from rmsrepro.tasks import build_task, decayed_parameter_names, evaluate

Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)

MODULE = '''
import torch
from torch import nn


def rms(x):
    return (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Needs(nn.Module):
    """A parameter without a default, and positional ones."""

    def __init__(self, dim, strength: float, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.strength, self.eps = strength, eps

    def forward(self, x):
        return self.strength * x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class Buffered(nn.Module):
    """A state that is no parameter."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x):
        y = x / self.size  # of the batches before this one
        if self.training:
            self.size = self.size.lerp(x.detach().square().mean().sqrt(), 0.5)
        return y


class Mixing(nn.Module):
    """A matrix of its own."""

    def __init__(self, dim, rank: int = 2):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank), nn.Linear(rank, dim)

    def forward(self, x):
        y = x / rms(x)
        return y * torch.sigmoid(self.up(self.down(y)))


class Bare(nn.Module):
    """Nothing to learn."""

    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return x / rms(x)


class Drawn(nn.Module):
    """A random start."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x):
        return x / rms(x) * self.weight


class Keyword(nn.Module):
    """The width by keyword only."""

    def __init__(self, *, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.inner = nn.RMSNorm(normalized_shape, eps=eps)

    def forward(self, x):
        return self.inner(x)


class Masked(nn.Module):
    """Statistics over positions."""

    seen = []

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, mask=None):
        if self.training:
            self.seen.append(None if mask is None else (mask.shape == x.shape[:-1], bool(mask.all())))
        kept = x if mask is None else x * mask.unsqueeze(-1)
        count = x[..., 0].numel() if mask is None else mask.sum().clamp_min(1)
        return x / (kept.square().flatten(0, -2).sum(0) / count + 1e-5).sqrt() * self.weight
'''
FAULTY = """
from torch import nn


class OverRows(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.inner(x.flatten(0, -2)).reshape(x.shape)


class Shorter(nn.Module):
    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return x.mean(-1, keepdim=True)
"""
WEIGHTS = '''
import torch
from torch import nn

from rmsrepro.norms import register_norm


@register_norm("by_largest", scope="weight")
class ByLargest(nn.Module):
    """Rows of a linear map over their largest entry."""

    def __init__(self, rows, *, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(rows)), eps

    def forward(self, v):
        return v / (v.abs().amax(-1, keepdim=True) + self.eps) * self.weight.unsqueeze(-1)

    def match(self, v):
        self.weight.data.copy_(v.abs().amax(-1) + self.eps)
'''
NORMS = {
    "Needs": ["norm.strength=0.5"],
    "Buffered": [],
    "Mixing": ["norm.rank=3"],
    "Bare": [],
    "Drawn": [],
    "Keyword": [],
}


@pytest.fixture
def users() -> Iterator[str]:
    """A package with a module of norms in the current directory."""
    before, strings = list(sys.path), dict(registry._import_strings)
    Path("users_package/inner").mkdir(parents=True)
    Path("users_package/__init__.py").touch()
    Path("users_package/inner/norms.py").write_text(MODULE)
    yield "users_package.inner.norms"
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "users_package"]:
        del sys.modules[name]
    registry._import_strings.clear()
    registry._import_strings.update(strings)


def val_loss(result: RunResult) -> float:
    found: float = json.loads((result.path / "result.json").read_text())["metrics"]["val_loss"]
    return found


def check(make_config: Make, norm: str, overrides: list[str], model: str, task: str) -> None:
    config = make_config(model, task, f"norm={norm}", *overrides)
    result = train(config, console=QUIET)
    assert result.status == "completed", result.error
    assert math.isfinite(val_loss(result))
    # What the checkpoint gives back is the model that was trained, its buffers included.
    trained = restore(load_checkpoint(result.path))
    data = build_data(
        config.data,
        task,
        seed=stream_seed(config.seed, "data"),
        accumulate=1,
        cache_dir=tokenizer_cache(config),
        tokenizers=(trained.src_tokenizer, trained.tgt_tokenizer),
    )
    data.setup("fit")
    assert evaluate(trained.module, data, "val")["val_loss"] == pytest.approx(val_loss(result), rel=1e-5)
    # No parameter of a norm decays, whatever it is.
    usual = build_task(make_config(model, task, "norm=rmsnorm"), data)
    assert decayed_parameter_names(trained.module) == decayed_parameter_names(usual)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_in_both_models(make_config: Make, users: str, norm: str) -> None:
    check(make_config, f"{users}:{norm}", NORMS[norm], "gru", "lm")
    check(make_config, f"{users}:{norm}", NORMS[norm], "transformer", "translation")


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_in_the_other_cells(make_config: Make, users: str, norm: str) -> None:
    for model, task in (("gru", "translation"), ("transformer", "lm")):
        config = make_config(model, task, f"norm={users}:{norm}", *NORMS[norm], "trainer.max_steps=1")
        assert train(config, console=QUIET).status == "completed"


def test_a_random_start_comes_from_the_seed(make_config: Make, users: str) -> None:
    losses = []
    for state in (1, 2):
        torch.manual_seed(state)
        config = make_config("gru", "lm", f"norm={users}:Drawn", f"out_dir=outputs-{state}")
        losses.append(val_loss(train(config, console=QUIET)))
    other = train(make_config("gru", "lm", f"norm={users}:Drawn", "seed=2"), console=QUIET)
    assert losses[0] == losses[1] != val_loss(other)


@pytest.mark.parametrize("norm", ["torch.nn:RMSNorm", "torch.nn:LayerNorm"])
def test_layers_of_torch(make_config: Make, norm: str) -> None:
    check(make_config, norm, ["norm.eps=1e-4", "norm.elementwise_affine=false"], "transformer", "lm")


def test_layers_of_torch_give_what_ours_give(make_config: Make) -> None:
    for theirs, ours in (("torch.nn:RMSNorm", "rmsnorm"), ("torch.nn:LayerNorm", "layernorm")):
        losses = [
            val_loss(train(make_config("gru", "lm", f"norm={name}", "norm.eps=1e-5", *rest), console=QUIET))
            for name, rest in ((theirs, []), (ours, ["backend=composite"]))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("model", ["gru", "transformer"])
def test_a_norm_over_positions_is_given_the_mask(make_config: Make, users: str, model: str) -> None:
    result = train(make_config(model, "translation", f"norm={users}:Masked"), console=QUIET)
    assert result.status == "completed", result.error
    seen = sys.modules[users].Masked.seen
    assert len(seen) > 10
    assert None not in seen
    assert {fits for fits, _ in seen} == {True}
    assert {full for _, full in seen} == {True, False}


@pytest.mark.parametrize("model", ["gru", "transformer"])
def test_a_norm_over_positions_is_refused_where_it_would_see_what_is_to_come(
    make_config: Make, users: str, model: str
) -> None:
    with pytest.raises(UserError, match="its statistics would see the tokens to come"):
        train(make_config(model, "lm", f"norm={users}:Masked"), console=QUIET)
    assert not Path("outputs").exists()


def test_a_norm_of_weights(make_config: Make, users: str) -> None:
    Path("users_package/weights.py").write_text(WEIGHTS)
    try:
        for model, task in (("gru", "translation"), ("transformer", "lm")):
            plugins = "plugins=[users_package.weights]"
            first = ["trainer.max_steps=1", "optim.lr=0"]
            losses = [
                val_loss(train(make_config(model, task, plugins, f"norm={norm}", *first), console=QUIET))
                for norm in ("by_largest", "none")
            ]
            # Its gains start where the maps are those of the model without a norm.
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
            check(make_config, "by_largest", [plugins], model, task)
    finally:
        unregister_norm("by_largest")


def test_a_norm_that_is_no_longer_there(make_config: Make, users: str) -> None:
    result = train(make_config("gru", "lm", f"norm={users}:Bare"), console=QUIET)
    registry._import_strings.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "users_package"]:
        del sys.modules[name]
    Path("users_package/inner/norms.py").unlink()
    with pytest.raises(UserError, match=r"norm=users_package\.inner\.norms:Bare: .* cannot be imported"):
        restore(load_checkpoint(result.path))


class TestAChangedFile:
    NOTE = "has changed since"

    def said(self, capsys: pytest.CaptureFixture[str]) -> str:
        return " ".join(capsys.readouterr().err.split())

    def test_its_use_is_noted(
        self, make_config: Make, users: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = train(make_config("gru", "lm", f"norm={users}:Bare"), console=QUIET)
        restore(load_checkpoint(result.path))
        assert self.said(capsys) == ""
        file = Path("users_package/inner/norms.py")
        file.write_text(MODULE + "# more\n")
        restore(load_checkpoint(result.path))
        expected = (
            f"norms.py has changed since {result.run_id} was trained; if the norm computes something else"
        )
        assert expected in self.said(capsys)
        more = make_config("gru", "lm", f"norm={users}:Bare", f"ckpt={result.path}", "trainer.max_steps=7")
        assert train(more, console=QUIET).status == "completed"
        assert expected in self.said(capsys)

    def test_a_checkpoint_without_the_entry_and_norms_of_the_package(
        self, make_config: Make, users: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for norm in (f"{users}:Bare", "rmsnorm"):
            checkpoint = load_checkpoint(train(make_config("gru", "lm", f"norm={norm}"), console=QUIET).path)
            assert (checkpoint.state.pop("norm_source") is None) == (norm == "rmsnorm")
            restore(checkpoint)
        assert self.said(capsys) == ""


def test_a_norm_that_leaks_or_fails_starts_nothing(make_config: Make, users: str) -> None:
    Path("users_package/faulty.py").write_text(FAULTY)
    cases = (
        ("torch.nn:BatchNorm1d", "its forward fails on an input of shape"),
        ("users_package.faulty:OverRows", "its rows influence each other"),
        ("users_package.faulty:Shorter", r"its forward returns the shape \(2, 3, 1\)"),
    )
    for norm, message in cases:
        for model in ("transformer", "gru"):
            with pytest.raises(UserError, match=f"norm={norm}: {message}"):
                train(make_config(model, "lm", f"norm={norm}"), console=QUIET)
    assert not Path("outputs").exists()


def test_flags_are_told_at_the_start(make_config: Make) -> None:
    console = Console(record=True, width=500, quiet=False, file=io.StringIO())
    config = make_config("transformer", "lm", "norm=prmsnorm", "model.qk_norm=true", "trainer.max_steps=1")
    result = train(config, console=console)
    flags = json.loads((result.path / "result.json").read_text())["flags"]
    assert any(flag.startswith("model.qk_norm: ") for flag in flags)
    told = console.export_text()
    assert [line for line in told.splitlines() if line.startswith("note: ")] == [
        f"note: {one}" for one in flags
    ]
    assert told.index("note: ") < told.index(": training")
