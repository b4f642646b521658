from __future__ import annotations

import csv
import json
import math
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsrepro.bench import BenchResult, bench_key, run_bench
from rmsrepro.bench import runner as runner_module
from rmsrepro.bench.cells import Arm, Cell
from rmsrepro.bench.gate import Gate
from rmsrepro.bench.layer import COPY, LayerLevel, LayerStep, LayerWorkbench
from rmsrepro.bench.levels import get_level
from rmsrepro.config.bench import BenchConfig
from rmsrepro.config.schema import (
    LMConfig,
    PydocConfig,
    TextFilesConfig,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
)
from rmsrepro.norms import list_norms
from rmsrepro.norms.card.subject import Subject

CPU = torch.device("cpu")
NAMES = [norm if isinstance(norm, str) else norm.name for norm in list_norms()]


def asked(*names: str, backends: tuple[str, ...] = ("composite", "torch")) -> list[dict[str, Any]]:
    return [{"name": name, "params": {}, "backend": backend} for backend in backends for name in names]


def base(out_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(
        norm={"name": "layernorm"},
        model=TransformerConfig(),
        task=LMConfig(),
        data=changes.pop("data", PydocConfig()),
        trainer=TrainerConfig(accelerator="cpu"),
        out_dir=str(out_dir),
        **changes,
    )


def arm(norm: str, backend: str = "composite", **params: Any) -> Arm:
    return Arm(f"{norm}/{backend}", norm, params, backend)


def cell(mode: str = "fwd_bwd", dtype: str = "float32", shape: str = "24x48") -> Cell:
    return Cell("layer", shape, mode, dtype)


@pytest.fixture
def workbench(monkeypatch: pytest.MonkeyPatch) -> LayerWorkbench:
    monkeypatch.setattr("rmsrepro.bench.layer.last_level_cache_bytes", lambda: 2**16)
    return LayerWorkbench(CPU)


# --------------------------------------------------------------------------- cells and arms


def test_there_is_a_cell_for_each_dtype_shape_and_mode(tmp_path: Path) -> None:
    config = BenchConfig(
        name="layer", shapes=["8x4", "2x3x5"], modes=["fwd", "fwd_bwd"], dtypes=["float32", "bfloat16"]
    )
    cells = LayerLevel().cells(config, base(tmp_path), None)
    assert len({one.name for one in cells}) == 8
    assert cells[0] == Cell("layer", "8x4", "fwd", "float32")
    assert cells[0].name == "8x4/fwd/float32"
    assert cells[-1].name == "2x3x5/fwd_bwd/bfloat16"


def test_every_norm_is_an_arm_or_says_why_it_is_no_layer(tmp_path: Path) -> None:
    arms, _ = LayerLevel().arrange(CONFIG, base(tmp_path), asked(*NAMES))
    composite = {one.norm: one.unavailable for one in arms if one.backend == "composite"}
    assert {name for name, reason in composite.items() if reason} == {"none", "weightnorm"}
    assert "normalises the weights of a linear map" in (composite["weightnorm"] or "")
    assert "computes nothing" in (composite["none"] or "")
    native = {one.norm for one in arms if one.backend == "torch" and one.unavailable is None}
    assert native == {"layernorm", "layernorm_nobias", "rmsnorm"}
    assert arms[-1] == COPY
    assert [one.label for one in arms if one.is_baseline] == ["layernorm/composite", "layernorm/torch"]


def test_a_layer_needs_no_data(tmp_path: Path) -> None:
    config = base(tmp_path, data=TextFilesConfig(train=str(tmp_path / "absent")))
    level = get_level("layer")
    settings = BenchConfig(name="layer", shapes=["8x4"], modes=["fwd"], dtypes=["float32"])
    level.check(settings, config, [])
    assert level.prepare(settings, config) is None
    assert len(bench_key(settings, config, asked("rmsnorm"))) == 16


def test_the_key_knows_shapes_and_not_the_model(tmp_path: Path) -> None:
    settings = BenchConfig(name="layer", shapes=["8x4"], modes=["fwd"], dtypes=["float32"])
    key = bench_key(settings, base(tmp_path), asked("rmsnorm"))
    assert bench_key(settings, base(tmp_path, seed=7, precision="bf16-mixed"), asked("rmsnorm")) == key
    other = BenchConfig(name="layer", shapes=["8x8"], modes=["fwd"], dtypes=["float32"])
    assert bench_key(other, base(tmp_path), asked("rmsnorm")) != key


# -------------------------------------------------------------------------------- the steps


def parts(workbench: LayerWorkbench, one: Arm, where: Cell) -> Iterator[LayerStep]:
    for _ in one.twins:
        step = workbench.builder(one, where)()
        assert isinstance(step, LayerStep)
        yield step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize(
    "backends",
    [("composite", "torch", "fused"), pytest.param(("compiled",), marks=pytest.mark.slow)],
    ids=str,
)
def test_every_norm_passes_the_gate_on_every_backend(
    workbench: LayerWorkbench, tmp_path: Path, mode: str, dtype: str, backends: tuple[str, ...]
) -> None:
    arms, _ = LayerLevel().arrange(CONFIG, base(tmp_path), asked(*NAMES, backends=backends))
    where = cell(mode, dtype)
    for one in arms:
        if one.unavailable is None and one.role == "norm":
            for step in parts(workbench, one, where):
                step()
                assert step.check() is None, one.label
                assert step.remarks == ()
    workbench.leave(where)


def test_twins_have_parameters_of_their_own_and_share_the_inputs(workbench: LayerWorkbench) -> None:
    twins = Arm("layernorm/torch", "layernorm", {}, "torch", is_baseline=True)
    first, second = parts(workbench, twins, cell())
    modules = first._module, second._module
    places = [{one.data_ptr() for one in module.parameters()} for module in modules]
    assert len(places[0]) == 2
    assert not places[0] & places[1]
    assert first._take.__self__ is second._take.__self__  # type: ignore[attr-defined]


def test_no_two_steps_in_a_row_see_the_same_input(workbench: LayerWorkbench) -> None:
    seen: list[int] = []
    steps = [next(parts(workbench, arm(name), cell())) for name in ("layernorm", "rmsnorm")]
    for step in steps:
        step._module.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    found = workbench.facts(cell())
    assert found["cache_bytes"] == 2**16
    count = math.ceil(2 * 2**16 / (24 * 48 * 4))
    assert found["rotating_bytes"] == 2 * count * 24 * 48 * 4
    for _ in range(count):
        for step in steps:
            step()
    # Whichever arm asks, it gets the input that was used longest ago.
    assert seen[:count] == list(dict.fromkeys(seen))
    assert set(Counter(seen).values()) == {2}


def test_forward_keeps_no_graph_and_backward_gives_all_gradients(
    workbench: LayerWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    step = next(parts(workbench, arm("layernorm"), cell("fwd")))
    step._module.register_forward_hook(lambda module, args, y: made.append(y.requires_grad))
    step.repeat(3)  # type: ignore[attr-defined]
    assert made == [False] * 3
    workbench.leave(cell("fwd"))

    step = next(parts(workbench, arm("layernorm"), cell()))
    asked_for: list[list[torch.Size]] = []
    grad = torch.autograd.grad

    def spy(y: torch.Tensor, inputs: list[torch.Tensor], upstream: torch.Tensor) -> Any:
        found = grad(y, inputs, upstream)
        asked_for.append([one.shape for one in found])
        return found

    monkeypatch.setattr(torch.autograd, "grad", spy)
    step()
    assert asked_for == [[(24, 48), (48,), (48,)]]
    assert all(one.grad is None for one in step._module.parameters())


def test_a_wrong_layer_is_caught(workbench: LayerWorkbench) -> None:
    x, upstream = torch.randn(24, 48), torch.randn(24, 48)
    subject = Subject("rmsnorm", {}, "torch", 48)
    right = subject.build()
    gate = Gate(x, upstream)
    assert gate.wrong(subject, right) is None

    class Wrong(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.inner, self._function = right, function
            self.weight = right.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._function(self.inner, x)

    # Off by 1e-4; the mean subtracted; the right values and no gradient through the statistic.
    def detached(inner: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (inner(x) / x).detach()

    for function, part in (
        (lambda inner, x: inner(x) * (1 + 1e-4), "output"),
        (lambda inner, x: inner(x - x.mean(-1, keepdim=True)), "output"),
        (detached, "gradient"),
    ):
        wrong = Wrong(function)
        told = gate.wrong(subject, wrong) or ""
        assert told.startswith("it computes something else than its equation in float64: ")
        assert f"{part} off by" in told
        forward = Gate(x, None).wrong(subject, wrong)
        assert (forward is None) is (part == "gradient")


# ------------------------------------------------------------------------- a whole small bench

OWN = '''
import time
import torch


class Sleepy(torch.nn.Module):
    """Its first call sleeps."""

    asleep = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Sleepy.asleep and x.dtype == torch.float32:
            Sleepy.asleep = False
            time.sleep(1)
        return x * self.weight


class Wrong(torch.nn.Module):
    """In fp32 it is something else than in fp64."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * (1.001 if x.dtype == torch.float32 else 1.0)


class Narrow(torch.nn.Module):
    """It refuses float64, so there is nothing to compare it with."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise TypeError("fp32 only")
        return x * 2
'''
CONFIG = BenchConfig(
    name="layer",
    shapes=["16x32", "4x8x16"],
    modes=["fwd", "fwd_bwd"],
    dtypes=["float32"],
    processes=2,
    rounds=3,
    warmup_s=0.001,
    block_s=0.0005,
    num_threads=1,
)
CELLS = ["16x32/fwd/float32", "16x32/fwd_bwd/float32", "4x8x16/fwd/float32", "4x8x16/fwd_bwd/float32"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    folder = tmp_path_factory.mktemp("layer")
    (folder / "own_layers.py").write_text(textwrap.dedent(OWN))
    own = [f"own_layers:{name}" for name in ("Sleepy", "Wrong", "Narrow")]
    norms = [*asked("layernorm", "rmsnorm", "prmsnorm"), *asked(*own, "weightnorm", backends=("composite",))]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setattr(runner_module, "machine_lock_path", lambda: folder / "bench.lock")
        return run_bench(CONFIG, base=base(folder / "outputs"), norms=norms)


def rows_of(bench: BenchResult, table: str, where: str) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in bench.result[table] if row["cell"] == where}


def test_a_process_measures_all_cells(bench: BenchResult) -> None:
    with (bench.path / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["cell"] for row in rows} == set(CELLS)
    by_round = Counter((row["process"], row["cell"], row["round"]) for row in rows)
    assert len(by_round) == 2 * 4 * 3
    # Two baselines twice, rmsnorm twice, prmsnorm, Sleepy and Narrow once, the copy.
    assert set(by_round.values()) == {4 + 2 + 1 + 2 + 1}
    plan = bench.result["plan"]["cells"]
    assert list(plan) == CELLS
    for row in rows:
        assert int(row["steps_in_block"]) == plan[row["cell"]]["steps_in_block"][row["arm"]]
    assert [one["name"] for one in bench.result["cells"]] == CELLS


def test_rows_say_what_was_timed(bench: BenchResult) -> None:
    for table in ("arms", "comparisons", "aa"):
        for row in bench.result[table]:
            assert row["level"] == "layer"
            assert row["cell"] == f"{row['shape']}/{row['mode']}/{row['dtype']}"
            assert (row["device"], row["threads"]) == ("cpu", 1)
            assert row["model"] is row["task"] is row["data"] is row["placement"] is None
            assert row["rotating_bytes"] > row["cache_bytes"] if row["cache_bytes"] else True
    assert bench.result["level"] == "layer"
    assert bench.result["dtype"] == "float32"
    assert bench.result["shape"] is None
    assert bench.path.name.split("-")[2] == "layer"
    assert bench.result["settings"]["keep_blocks_asked"] is True


def test_each_cell_has_its_comparisons_and_controls(bench: BenchResult) -> None:
    for where in CELLS:
        assert set(rows_of(bench, "comparisons", where)) == {
            "rmsnorm/composite", "prmsnorm/composite", "own_layers:Sleepy/composite",
            "own_layers:Narrow/composite", "rmsnorm/torch",
        }  # fmt: skip
        for row in rows_of(bench, "comparisons", where).values():
            assert row["baseline"] == f"layernorm/{row['backend']}"
            assert (row["n_rounds"], row["n_processes"]) == (6, 2)
            assert row["time_reduction_pct"] == pytest.approx(100 * (1 - row["ratio"]))
            assert row["norm"] in row["arm"]
            assert row["norm_params"] == {}
        assert set(rows_of(bench, "aa", where)) == {"layernorm/composite", "layernorm/torch"}
    # Eight controls in the bench: each is tested at .05 / 8.
    flags = [flag for row in bench.result["aa"] for flag in row["flags"] if "excludes 1" in flag]
    assert all("over 8 cells" in flag for flag in flags)


def test_a_sleeping_first_call_is_not_counted(bench: BenchResult) -> None:
    sleepers = [row for row in bench.result["arms"] if row["norm"] == "own_layers:Sleepy"]
    assert max(row["first_call_s"] for row in sleepers) >= 1
    assert max(row["median_s"] for row in sleepers) < 0.1


def test_a_failing_arm_is_shown_and_never_ranked(bench: BenchResult) -> None:
    for where in CELLS:
        row = rows_of(bench, "arms", where)["own_layers:Wrong/composite"]
        assert row["status"] == "failed"
        assert row["reason"].startswith(
            "pilot: it computes something else than its own copy in float64: output off by"
        )
        assert row["median_s"] is None
        missing = rows_of(bench, "arms", where)
        assert missing["weightnorm/composite"]["status"] == "unavailable"
        assert missing["prmsnorm/torch"]["status"] == "unavailable"


def test_a_norm_that_cannot_be_checked_says_so(bench: BenchResult) -> None:
    for row in bench.result["comparisons"]:
        told = [flag for flag in row["flags"] if flag.startswith("not checked: it does not run in float64")]
        assert (len(told) == 1) is (row["norm"] == "own_layers:Narrow")


def paired_ratio(path: Path, where: str, one: str, other: str) -> float:
    """The geometric mean over processes of the median ratio of two arms, from samples.csv alone."""
    seconds: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (path / "samples.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["cell"] == where:
                seconds[row["process"]][row["round"]][row["arm"]] = float(row["seconds_per_step"])
    medians = [
        statistics.median(math.log(times[one] / times[other]) for times in rounds.values())
        for rounds in seconds.values()
    ]
    return math.exp(statistics.fmean(medians))


def test_bandwidth_and_the_distance_to_a_copy_stand_beside(bench: BenchResult) -> None:
    for where in CELLS:
        arms = rows_of(bench, "arms", where)
        copy = arms["copy/memory"]
        assert copy["role"] == "copy"
        assert copy["bytes"] == 2 * 512 * 4
        assert copy["copy_share"] == pytest.approx(1)
        rms = arms["rmsnorm/composite"]
        width = 32 if where.startswith("16x32") else 16
        backward = "fwd_bwd" in where
        assert rms["bytes"] == 4 * ((5 if backward else 2) * 512 + (3 if backward else 1) * width)
        assert rms["gb_per_s"] == pytest.approx(rms["bytes"] / rms["median_s"] / 1e9)
        bytes_a_copied_byte = rms["bytes"] / copy["bytes"]
        ratio = paired_ratio(bench.path, where, "rmsnorm/composite", "copy/memory")
        assert rms["copy_share"] == pytest.approx(bytes_a_copied_byte / ratio)
        assert rms["peak_bytes"] >= 512 * 4
        assert arms["own_layers:Sleepy/composite"]["bytes"] is None
        assert arms["own_layers:Sleepy/composite"]["copy_share"] is None
    assert "copy/memory" not in {row["arm"] for row in bench.result["comparisons"]}


def test_the_record_is_what_was_returned(bench: BenchResult) -> None:
    assert json.loads((bench.path / "result.json").read_text()) == bench.result
