from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmsrepro.config.overrides import split_override
from rmsrepro.config.schema import ImportedModelConfig
from rmsrepro.norms import registry
from rmsrepro.verbs import timing
from rmsrepro.verbs.own_models import take_target
from tests.cli.running import Ran

MODELS = """
import torch
from torch import nn

from own_model_norms import MaxNorm  # a module beside this one


def blocks(norm):
    return nn.Sequential(nn.Linear(8, 8), norm.build(8)), torch.randn(3, 8)


def plain(norm):
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(3, 8)
"""
NORMS = """
import torch
from torch import nn

from rmsrepro.norms import register_norm


@register_norm("my_maxnorm")
class MaxNorm(nn.Module):
    def __init__(self, dim, *, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight
"""
TINY = ["bench.processes=2", "bench.rounds=2", "bench.warmup_s=0.01", "bench.block_s=0.001"]


@pytest.fixture
def modules() -> Iterator[None]:
    """The user's modules in the current directory, and this process as it was before."""
    Path("my_models.py").write_text(MODELS, encoding="utf-8")
    Path("own_model_norms.py").write_text(NORMS, encoding="utf-8")
    known, path = dict(registry._registered), list(sys.path)
    yield
    registry._registered.clear()
    registry._registered.update(known)
    registry._import_strings.clear()
    sys.path[:] = path
    for name in ("my_models", "own_model_norms"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
def test_ones_own_model_and_norm_from_the_current_directory(program: Callable[..., Ran]) -> None:
    norms = "norm=layernorm,my_maxnorm,own_model_norms:MaxNorm"
    ran = program("bench", "model=my_models:blocks", "plugins=[own_model_norms]", norms, *TINY)
    assert ran.code == 0, ran.err
    (record,) = (json.loads(file.read_text()) for file in Path("outputs/bench").glob("*/result.json"))
    assert [row["arm"] for row in record["comparisons"]] == [
        "my_maxnorm/composite", "own_model_norms:MaxNorm/composite",
    ]  # fmt: skip
    assert record["model"] == "my_models:blocks"
    assert (record["level"], record["mode"], record["task"]) == ("model", "fwd_bwd", None)
    assert "model my_models:blocks 3x8 fwd_bwd float32" in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines() if not line.startswith("records:"))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=my_models:plain"], "my_models:plain: the module it returned with norm=layernorm has no"),
        (["model=my_models:nope"], "my_models:nope: my_models has no 'nope'"),
        (["model=nowhere:blocks"], "nowhere:blocks: there is no module 'nowhere'"),
        (["model=my_models:"], "'my_models:' is no import string"),
        (["model=my_models:blocks", "bench=step"], "bench=step: model=my_models:blocks has no task"),
        (["model=my_models:blocks", "task=lm"], "task=lm: model=my_models:blocks brings its own layers"),
        (["model=my_models:blocks", "data.max_len=8"], "data.max_len=8: model=my_models:blocks brings"),
        (["model=my_models:blocks,gru"], "model=my_models:blocks,gru: bench times one model at a time"),
    ],
)
def test_what_cannot_be_timed_ends_with_one_message(
    cli: Callable[..., Ran], words: list[str], told: str
) -> None:
    ran = cli("bench", *words)
    assert ran.error.startswith(told)
    assert not Path("outputs").exists()


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_it_cannot_be_trained(cli: Callable[..., Ran], verb: str) -> None:
    error = cli(verb, "model=my_models:blocks", "norm=rmsnorm").error
    assert "there is no such model" in error
    assert error.endswith("can be timed: rmsrepro bench bench=model model=my_models:blocks")


def test_bench_model_follows_from_such_a_model() -> None:
    given = [split_override(word) for word in ("model=a.b:c", "norm=rmsnorm")]
    target, rest = take_target(given)
    assert target == "a.b:c"
    assert [item.text for item in rest] == ["norm=rmsnorm", "bench=model"]
    built_in = [split_override(word) for word in ("model=gru", "model.d_model=8")]
    assert take_target(built_in) == (None, built_in)


@pytest.mark.usefixtures("modules")
def test_what_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = timing.prepare_bench(
        [
            split_override(word)
            for word in ("model=my_models:blocks", "norm=rmsnorm", "norm.eps=1e-3", "seed=3")
        ]
    )
    assert (prepared.settings.name, prepared.settings.modes) == ("model", ["fwd_bwd"])
    assert prepared.base.model == ImportedModelConfig(name="my_models:blocks")
    assert (prepared.base.task.name, prepared.base.data.name, prepared.base.seed) == ("none", "none", 3)
    assert [norm["params"] for norm in prepared.norms] == [{"eps": 1e-3}]


def test_the_frameworks_share_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def row(arm: str, baseline: str, seconds: float) -> dict[str, Any]:
        return {
            "arm": arm, "baseline": baseline, "role": "framework", "ratio": 1.1, "difference_s": seconds,
            "difference_ci": [seconds - 1e-4, seconds + 1e-4], "cell": "c",
        }  # fmt: skip

    bare, trainer, records = (f"layernorm{kind}/composite" for kind in ("", "+trainer", "+records"))
    result = {
        "status": "completed",
        "arms": [{"arm": bare, "status": "measured", "median_s": 0.005, "cell": "c"}],
        "comparisons": [],
        "extras": [row(trainer, bare, 5e-4), row(records, bare, 5.5e-4), row(records, trainer, 5e-5)],
    }
    prepared = SimpleNamespace(settings=SimpleNamespace(name="step"), norms=[])
    monkeypatch.setattr(timing, "prepare_bench", lambda overrides: prepared)
    monkeypatch.setattr(
        timing, "run_prepared_bench", lambda prepared: SimpleNamespace(path=Path("there"), result=result)
    )
    assert timing.bench([]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "the framework's share against added to a step (95 %) ratio" in lines
    assert "Trainer alone bare loop +0.500 ms [0.400, 0.600] 1.100" in lines
    assert "with records and clocks bare loop +0.550 ms [0.450, 0.650] 1.100" in lines
    assert "with records and clocks Trainer alone +0.050 ms [-0.050, 0.150] 1.100" in lines
