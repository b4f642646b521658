from __future__ import annotations

import textwrap
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rmsrepro.bench import bench_key, run_bench
from rmsrepro.bench import measuring as measuring_module
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.arms import arrange_arms
from rmsrepro.bench.cells import Cell
from rmsrepro.bench.levels import get_level
from rmsrepro.bench.user_model import check_arms, make
from rmsrepro.bench.user_step import NothingToTake, PreparedModel, UserStep, prepare_model, scalar
from rmsrepro.bench.worker import measure
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.errors import UserError
from rmsrepro.config.plain import from_plain, plain
from rmsrepro.config.schema import ImportedModelConfig, TrainConfig, TrainerConfig
from rmsrepro.norms import BackendUnavailable, NormSpec, list_norms, norm_info
from rmsrepro.verbs.own_models import with_target

CPU = torch.device("cpu")
NAME = "users_own_models"
MODELS = """
    import torch
    from torch import nn

    from rmsrepro.norms import build_norm, normed_linear

    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.linear, self.drop = norm, nn.Linear(8, 8), nn.Dropout(0.2)

        def forward(self, x, scale=1.0):
            return x + scale * self.drop(self.linear(self.norm(x)))

    def good(norm):
        return nn.Sequential(*(Block(norm.build(8)) for _ in range(2))), torch.randn(3, 5, 8)

    def called(norm):
        return Block(norm(8)).eval(), ((torch.randn(3, 8, requires_grad=True),), {"scale": 2.0})

    def linear(norm):
        return nn.Sequential(normed_linear(nn.Linear(8, 8), norm)), torch.randn(3, 8)

    def by_name(norm):
        return Block(build_norm(norm.name, 8, backend=norm.backend, **norm.params)), torch.randn(3, 8)

    def alone(norm):
        return good(norm)[0]

    def number(norm):
        return 3

    def failing(norm):
        raise KeyError("no")

    def foreign(norm):
        return Block(nn.LayerNorm(8)), torch.randn(3, 8)

    def other_eps(norm):
        return Block(build_norm(norm.name, 8, eps=0.5)), torch.randn(3, 8)

    def other_backend(norm):
        return Block(build_norm(norm.name, 8, backend="composite")), torch.randn(3, 8)

    def wrong_inputs(norm):
        return good(norm)[0], torch.randn(3, 4)

    def frozen(norm):
        return good(norm)[0].requires_grad_(False), torch.randn(3, 8)

    def half(norm):
        return good(norm)[0].to(torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)

    class Single(Block):
        def forward(self, x):
            return super().forward(x.float())

    def single(norm):
        return Single(norm.build(8)), torch.randn(3, 8)
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(textwrap.dedent(MODELS), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(__import__("sys").modules, NAME, raising=False)


def base(factory: str, out_dir: Path, **given: Any) -> TrainConfig:
    config = TrainConfig(
        norm={"name": "layernorm"}, trainer=TrainerConfig(accelerator="cpu"), out_dir=str(out_dir), **given
    )
    return with_target(config, f"{NAME}:{factory}")


def norms(*names: str, backend: str = "composite") -> list[dict[str, Any]]:
    return [{"name": name, "backend": backend} for name in names]


def step(factory: str, spec: NormSpec, *, backward: bool = True, **given: Any) -> UserStep:
    config = base(factory, Path("outputs"), **given)
    module, inputs = make(config.model.name, spec, config.seed)
    return UserStep(module, inputs, spec, config, CPU, backward=backward)


# ------------------------------------------------------------------------------------- the factory


@pytest.mark.parametrize("factory", ["good", "called", "by_name"])
def test_norms_built_with_the_argument_are_recognised(factory: str) -> None:
    for name in list_norms():
        if norm_info(name).scope == "activation":
            make(f"{NAME}:{factory}", NormSpec(name, {}, "composite"), 1)
    for name in ("layernorm", "rmsnorm"):
        make(f"{NAME}:{factory}", NormSpec(name, {"eps": 1e-3}, "torch"), 1)


def test_norms_of_weights_are_recognised() -> None:
    make(f"{NAME}:linear", NormSpec("weightnorm", {}, "composite"), 1)
    with pytest.raises(UserError, match="ValueError: weightnorm normalises the weights"):
        make(f"{NAME}:good", NormSpec("weightnorm", {}, "composite"), 1)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("alone", "returns a pair, the module and its inputs"),
        ("number", "expected a torch.nn.Module, a pair"),
        ("failing", "called with the norm, it raised KeyError: 'no'"),
        ("foreign", r"has no layer of that norm; layers of the norm are made by its argument: norm\.build\("),
        ("other_eps", r"called with norm=rmsnorm and eps=1e-05 .*, it built one with eps=0\.5 "),
        ("missing", f"{NAME} has no 'missing'"),
    ],
)
def test_factories_that_cannot_be_timed_are_refused(factory: str, told: str, tmp_path: Path) -> None:
    arms, _ = arrange_arms(norms("rmsnorm"))
    with pytest.raises(UserError, match=f"{NAME}:{factory}: .*{told}|{told}"):
        check_arms(base(factory, tmp_path), arms[1:])


def test_the_backend_must_be_the_arms(tmp_path: Path) -> None:
    spec = NormSpec("layernorm", {}, "torch")
    with pytest.raises(UserError, match="norm=layernorm on backend=torch, it built one on composite"):
        make(f"{NAME}:other_backend", spec, 1)
    with pytest.raises(BackendUnavailable, match="backend=torch cannot run prmsnorm"):
        make(f"{NAME}:good", NormSpec("prmsnorm", {}, "torch"), 1)
    arms, _ = arrange_arms(norms("prmsnorm", backend="torch"))
    check_arms(base("good", tmp_path), [arms[0], replace(arms[1], unavailable=None)])


def test_modules_that_do_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wrong_inputs: the module does not run on its inputs: ValueError: "):
        prepare_model(base("wrong_inputs", tmp_path), CPU, backward=True)
    with pytest.raises(UserError, match=r"frozen: .* wants a gradient; .*bench\.modes=\[fwd\]"):
        prepare_model(base("frozen", tmp_path), CPU, backward=True)
    prepare_model(base("frozen", tmp_path), CPU, backward=False)


def test_what_it_computes_on_is_found(tmp_path: Path) -> None:
    assert prepare_model(base("good", tmp_path), CPU, backward=True) == PreparedModel("3x5x8", "float32")
    assert prepare_model(base("called", tmp_path), CPU, backward=True) == PreparedModel("3x8", "float32")
    assert prepare_model(base("half", tmp_path), CPU, backward=True) == PreparedModel("3x8", "bfloat16")


# ----------------------------------------------------------------------------------------- the step


def test_twins_are_apart_and_compute_the_same() -> None:
    spec = NormSpec("rmsnorm", {}, "composite")
    twins = [step("good", spec) for _ in range(2)]
    losses = []
    for twin in twins:
        twin.seed()
        twin()
        losses.append(twin.loss())
    assert losses[0] == losses[1]
    one, other = (next(twin._module.parameters()) for twin in twins)
    assert one.data_ptr() != other.data_ptr()
    assert twins[0]._module.training
    assert not step("called", spec)._module.training


def test_a_pass_takes_gradients_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step("called", NormSpec("layernorm", {}, "composite"))
    seen: list[list[bool]] = []
    backward = torch.Tensor.backward

    def watched(self: Tensor, *rest: Any, **named: Any) -> None:
        backward(self, *rest, **named)
        seen.append([leaf.grad is not None for leaf in one._leaves])

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    one.seed()
    one()
    assert len(seen[0]) == 5  # gain, bias, the map's weight and bias, and the input that wants one
    assert all(seen[0])
    assert [leaf.grad for leaf in one._leaves] == [None] * 5
    x = one._positions[0]
    expected = float(one._module(x, scale=2.0).square().mean().detach())
    assert one.loss() == pytest.approx(expected)
    without = step("called", NormSpec("layernorm", {}, "composite"), backward=False)
    without()
    assert not without._output.requires_grad
    assert without.loss() == pytest.approx(expected)


def test_mixed_precision_runs(tmp_path: Path) -> None:
    losses = []
    for precision in ("32", "bf16-mixed"):
        one = step("called", NormSpec("rmsnorm", {}, "composite"), precision=precision)
        one()
        losses.append(one.loss())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_what_is_differentiated() -> None:
    @dataclass
    class Output:
        logits: Tensor
        ids: Tensor

    two, ids = torch.tensor([1.0, 3.0]), torch.tensor([5])
    assert float(scalar(two)) == 5
    assert float(scalar(torch.tensor(-2.0))) == -2
    assert float(scalar((two, {"more": [2 * two]}, ids, None))) == 25
    assert float(scalar({"loss": torch.tensor(7.0), "logits": two})) == 7
    assert float(scalar(OrderedDict(loss=None, logits=two))) == 5
    assert float(scalar(Output(two, ids))) == 5
    assert scalar(two.double()).dtype == torch.float64
    assert scalar(two.bfloat16()).dtype == torch.float32
    for nothing, kind in ((None, "None"), (ids, "a Tensor"), ("text", "a str"), ({}, "a dict")):
        with pytest.raises(NothingToTake, match=f"its output, {kind}, holds no floating-point tensor"):
            scalar(nothing)


# ---------------------------------------------------------------------------------------- the bench


def test_the_config_of_such_a_bench_names_no_task_and_no_data(tmp_path: Path) -> None:
    config = base("good", tmp_path)
    content = plain(config)
    assert (content["model"]["name"], content["task"]["name"], content["data"]["name"]) == (
        f"{NAME}:good", "none", "none",
    )  # fmt: skip
    again = from_plain(content)
    assert isinstance(again.model, ImportedModelConfig)
    assert plain(again) == content


def test_the_key_follows_the_source(tmp_path: Path) -> None:
    config, bench = base("good", tmp_path), BenchConfig(name="model")
    key = bench_key(bench, config, norms("rmsnorm"))
    assert bench_key(bench, config, norms("rmsnorm")) == key
    assert bench_key(bench, base("called", tmp_path), norms("rmsnorm")) != key
    file = tmp_path / "code" / f"{NAME}.py"
    file.write_text(file.read_text() + "\n# changed\n")
    assert bench_key(bench, config, norms("rmsnorm")) != key


def test_a_bench_of_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "machine_lock_path", lambda: tmp_path / "bench.lock")
    monkeypatch.setattr(
        measuring_module, "run_worker", lambda spec, folder, **others: measure({**spec, "spawned_at": 0.0})
    )
    config = BenchConfig(
        name="model", modes=["fwd", "fwd_bwd"], processes=2, rounds=2, warmup_s=0.01, block_s=0.001
    )
    arms = [*norms("rmsnorm", "none"), *norms("rmsnorm", "prmsnorm", backend="torch")]
    found = run_bench(config, base=base("good", tmp_path / "outputs"), norms=arms)
    result = found.result
    assert result["status"] == "completed"
    assert f"model-{NAME}_good" in found.path.name
    assert [(row["arm"], row["mode"]) for row in result["comparisons"]] == [
        (arm, mode)
        for mode in ("fwd", "fwd_bwd")
        for arm in ("rmsnorm/composite", "none/composite", "rmsnorm/torch")
    ]
    for row in result["comparisons"]:
        told = {name: row[name] for name in ("level", "model", "task", "data", "size", "shape", "dtype")}
        assert told == {
            "level": "model", "model": f"{NAME}:good", "task": None, "data": None, "size": None,
            "shape": "3x5x8", "dtype": "float32",
        }  # fmt: skip
    status = {row["arm"]: row["status"] for row in result["arms"]}
    assert status["prmsnorm/torch"] == "unavailable"
    for process in result["processes"]:
        assert [cell["failed"] for cell in process["cells"].values()] == [{}, {}]


def test_it_is_held_against_float64(tmp_path: Path) -> None:
    level = get_level("model")
    cell = Cell("model", "3x5x8", "fwd_bwd", "float32")
    arms, _ = arrange_arms(norms("layernorm", "rmsnorm", backend="torch"))
    for factory in ("good", "half", "called"):
        config = base(factory, tmp_path)
        prepared = level.prepare(BenchConfig(name="model"), config)
        workbench = level.workbench(BenchConfig(name="model"), config, prepared, CPU)
        for arm in arms:
            one = workbench.builder(arm, cell)()
            one.seed()
            one()
            assert (one.check(), list(one.remarks)) == (None, [])
        workbench.leave(cell)
    assert isinstance(one, UserStep)
    norm = one._module.get_submodule("norm")
    norm.register_forward_hook(lambda module, given, output: 1.01 * output)
    assert "it computes something else than in float64" in str(one.check())
    config = base("single", tmp_path)
    prepared = level.prepare(BenchConfig(name="model"), config)
    single = level.workbench(BenchConfig(name="model"), config, prepared, CPU).builder(arms[0], cell)()
    single()
    assert single.check() is None
    assert "not checked: it does not run in float64 (RuntimeError: " in next(iter(single.remarks))
