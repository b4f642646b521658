"""The Triton kernels: their values in triton's interpreter, on the CPU, and that they compile for a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rmsrepro.norms.backends.fused import checking
from rmsrepro.norms.backends.fused.checking import Case, cases
from rmsrepro.norms.backends.fused.rule import Rule
from tests.scripts import load_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra: dev, on Linux x86-64)"
)

ROOT = Path(__file__).resolve().parents[2]
RMSNORM = Rule(k=2, centred=False, inverse_count=0.5, eps=0.0, outside=False, rounded=False)
LAYERNORM = Rule(k=4, centred=True, inverse_count=0.25, eps=1e-5, outside=False, rounded=False)
GROUPS = tuple(cases())
EVERY = 5
"""No divisor of the number of widths, dtypes or layouts, so that all come up."""

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Call a launcher, or `errors` of cases, in the interpreter."""
    command = [sys.executable, "-m", "tests.norms.triton_worker"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def call(name: str, *args: Any) -> Any:
            pickle.dump((name, args), worker.stdin)
            worker.stdin.flush()
            failure, result = pickle.load(worker.stdout)
            if isinstance(failure, ValueError):
                raise failure
            assert failure is None, failure
            return result

        yield call
        worker.stdin.close()


def wrong(members: Sequence[Case], found: Sequence[dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    return [
        (str(case), errors)
        for case, errors in zip(members, found, strict=True)
        if not all(error <= 1 for error in errors.values())
    ]


# ----------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("group", GROUPS)
def test_agrees_with_float64(ask: Ask, group: str) -> None:
    members = cases()[group][::EVERY]
    assert not wrong(members, ask("errors", *members))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_case_agrees_with_float64(ask: Ask, group: str) -> None:
    members = [case for index, case in enumerate(cases()[group]) if index % EVERY]
    assert not wrong(members, ask("errors", *members))


@pytest.mark.parametrize(
    "case", [Case("layernorm", 100, rows=40), Case("rmsnorm", 3, residual=True)], ids=str
)
def test_tuned_kernels_agree_with_float64(ask: Ask, case: Case) -> None:
    errors, tried = ask("tuned", case)
    assert not wrong([case], [errors])
    assert tried >= 2


def test_a_wrong_result_is_seen() -> None:
    class Planted:
        """The equations, with a gradient, a sum or a value that is a little wrong."""

        def __init__(self, name: str) -> None:
            self.wrong = name

        def forward(self, x: Tensor, gain: Tensor, bias: Tensor, rule: Rule) -> Tensor:
            return self.results(x, gain, bias, torch.ones_like(x))["y"].float()

        def backward(self, dy: Tensor, x: Tensor, gain: Tensor, *_: Any) -> tuple[Tensor, ...]:
            found = self.results(x, gain, torch.zeros_like(gain), dy)
            return tuple(found[name].float() for name in ("dx", "dgain", "dbias"))

        add_forward = add_backward = None

        def results(self, x: Tensor, gain: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
            found, _ = checking.reference(Case("layernorm", 64), x, gain, bias, dy)
            if self.wrong in found:
                found[self.wrong] *= 1 + 1e-5
            return found

    case = Case("layernorm", 64)
    assert max(checking.errors(case, Planted("nothing"), "cpu").values()) < 0.2
    for name in ("y", "dx", "dgain", "dbias"):
        found = checking.errors(case, Planted(name), "cpu")
        assert {key for key, error in found.items() if error > 1} == {name}


def test_published_values(ask: Ask) -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    y = ask("forward", x, None, None, RMSNORM)
    torch.testing.assert_close(y.tolist(), [[0.848528137423857, 1.131370849898476]], rtol=1e-15, atol=0)
    y = ask("forward", x, None, None, replace(RMSNORM, inverse_count=1.0))
    torch.testing.assert_close(y.tolist(), [[0.6, 0.8]], rtol=1e-15, atol=0)
    first = replace(RMSNORM, k=1, inverse_count=1.0)
    assert ask("forward", x, None, None, first).tolist() == [[1.0, 4 / 3]]
    # d(4/3)/d(3, 4), of 4/3 = a_2/a_1.
    dx, dgain, dbias = ask("backward", torch.tensor([[0.0, 1.0]]).double(), x, None, False, first)
    torch.testing.assert_close(dx.tolist(), [[-4 / 9, 1 / 3]], rtol=1e-15, atol=0)
    assert (dgain, dbias) == (None, None)


def test_rounding_before_the_gain(ask: Ask) -> None:
    # In fp16, whose rounding the interpreter does properly.
    x, gain, bias = (torch.randn(1, 64).half(), torch.randn(64), torch.randn(64))
    x[0, 0] = 3.0
    t = x.float() * (torch.tensor(1.0) / 3.0)
    for rounded, expected in (
        (False, (t * gain + bias).half()),
        (True, ((t.half().float() * gain).half().float() + bias).half()),
    ):
        rule = replace(RMSNORM, k=1, inverse_count=1.0, rounded=rounded)
        assert torch.equal(ask("forward", x, gain, bias, rule), expected)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", checking.ALLOWED, ids=str)
def test_zero_denominator(ask: Ask, dtype: torch.dtype, centred: bool, outside: bool) -> None:
    rule = replace(LAYERNORM, centred=centred, eps=0.0, outside=outside)
    x = torch.tensor([[0.0] * 4, [1.0, -1.0, 1.0, -1.0]]).to(dtype)
    gain, bias = torch.full((4,), 2.0), torch.full((4,), 0.5)
    y = ask("forward", x, gain, bias, rule)
    assert y.tolist() == [[0.5] * 4, [2.5, -1.5, 2.5, -1.5]]
    dx, dgain, dbias = ask("backward", torch.ones_like(x), x, gain, True, rule)
    assert dx.tolist() == [[0.0] * 4, [0.0 if centred else 2.0] * 4]
    assert (dgain.tolist(), dbias.tolist()) == ([1.0, -1.0, 1.0, -1.0], [2.0] * 4)


def test_zero_head_of_a_row(ask: Ask) -> None:
    # The rest, with the scale of the head, must not become infinity times 0.
    x = torch.tensor([[0.0, 0.0, 1e30, 1.0], [1e-30, 0.0, 1e30, 1.0]])
    assert ask("forward", x, None, None, RMSNORM).tolist() == [[0.0] * 4] * 2
    assert ask("backward", torch.ones_like(x), x, None, False, RMSNORM)[0].tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("n", [8, 257, 16400])
def test_beyond_the_range_results_are_finite(ask: Ask, n: int) -> None:
    signs = torch.ones(3, n)
    signs[1, ::2] = -1
    signs[2, 1:] = 0
    scales = (1e-45, 1e-38, 1e-30, 1e-22, 1e19, 1e30, 3.3e38) if n < 1000 else (3.3e38,)
    for centred in (False, True):
        for eps, outside in ((0.0, False), (1e-5, False), (1e-5, True), (1e-30, True)):
            rule = Rule(k=n, centred=centred, inverse_count=1 / n, eps=eps, outside=outside, rounded=False)
            for scale in scales:
                x = signs * scale
                y = ask("forward", x, None, None, rule)
                dx, *_ = ask("backward", torch.ones_like(x), x, None, False, rule)
                assert y.isfinite().all(), (centred, eps, outside, scale)
                assert dx.isfinite().all(), (centred, eps, outside, scale)


def test_nan_and_infinity_stay_in_their_row(ask: Ask) -> None:
    for value in (math.nan, math.inf):
        x = torch.ones(3, 4)
        x[1, 2] = value
        for rule in (RMSNORM, LAYERNORM):
            reads = Rule(
                k=4, centred=rule.centred, inverse_count=0.25, eps=1e-5, outside=False, rounded=False
            )
            y = ask("forward", x, None, None, reads)
            dx, *_ = ask("backward", torch.ones_like(x), x, None, False, reads)
            assert not y[1].isfinite().all()
            assert value == math.inf or y[1].isnan().all()
            assert y[[0, 2]].isfinite().all()
            assert dx[[0, 2]].isfinite().all()


# -------------------------------------------------------------------------------- what goes in and out


def test_dtypes_of_results(ask: Ask) -> None:
    x, gain = torch.randn(3, 4).bfloat16(), torch.ones(4).double()
    assert ask("forward", x, gain, gain.half(), LAYERNORM).dtype == torch.bfloat16
    dx, dgain, dbias = ask("backward", x, x, gain, True, LAYERNORM, torch.float16)
    assert (dx.dtype, dgain.dtype, dbias.dtype) == (torch.bfloat16, torch.float64, torch.float16)
    assert ask("backward", x, x, gain, True, LAYERNORM)[2].dtype == torch.float64
    assert ask("backward", x, x, None, True, LAYERNORM)[2].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (1, 1, 2, 4)])
def test_shapes(ask: Ask, shape: tuple[int, ...]) -> None:
    x, gain = torch.randn(shape), torch.ones(4)
    assert ask("forward", x, gain, gain, LAYERNORM).shape == shape
    total, y = ask("add_forward", x, x, gain, gain, LAYERNORM)
    assert (total.shape, y.shape) == (shape, shape)
    torch.testing.assert_close(total, 2 * x)
    dx, dgain, dbias = ask("add_backward", None, torch.ones_like(x), total, gain, True, LAYERNORM)
    assert (dx.shape, dgain.shape) == (shape, (4,))
    assert dbias.tolist() == [x.numel() / 4] * 4


def test_gradient_of_the_sum_may_be_missing(ask: Ask) -> None:
    x, dy = torch.randn(3, 4), torch.randn(3, 4)
    alone = ask("backward", dy, x, None, False, LAYERNORM)[0]
    assert torch.equal(ask("add_backward", None, dy, x, None, False, LAYERNORM)[0], alone)
    both = ask("add_backward", torch.ones(3, 4), dy, x, None, False, LAYERNORM)[0]
    torch.testing.assert_close(both, alone + 1)


def test_inputs_are_left_alone_and_results_repeat(ask: Ask) -> None:
    x, dy, gain = torch.randn(40, 4), torch.randn(40, 4), torch.randn(4)
    first = ask("backward", dy, x, gain, True, LAYERNORM)
    again = ask("backward", dy, x, gain, True, LAYERNORM)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_what_would_be_read_out_of_bounds_is_refused(ask: Ask) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=re.escape("gain is (3,), rows have 4 entries")):
        ask("forward", x, torch.ones(3), None, LAYERNORM)
    with pytest.raises(ValueError, match="reads 4 entries, rows have 2"):
        ask("forward", x[:, :2], None, None, LAYERNORM)
    with pytest.raises(ValueError, match="residual"):
        ask("add_forward", x, x[:2], None, None, LAYERNORM)
    with pytest.raises(ValueError, match=re.escape("dy is (2, 4), x (3, 4)")):
        ask("backward", x[:2], x, None, False, LAYERNORM)


# --------------------------------------------------------------------------------------------- on a GPU


def test_nothing_imports_triton_before_it_is_needed() -> None:
    program = "import sys, rmsrepro.norms.layers, rmsrepro.norms.factory; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_tilings_fit_every_width(name: str) -> None:
    from rmsrepro.norms.backends.fused import triton_norms

    fewest, most = triton_norms.ENTRIES[name]
    widest = {"forward": triton_norms.FORWARD_BYTES, "backward": triton_norms.BACKWARD_BYTES}[name] // 4
    block = 1
    while block <= widest:
        fixed = triton_norms._fixed(block, (fewest, most))
        assert fixed["ROWS"] * block / (32 * fixed["num_warps"]) <= most
        tried = triton_norms._fitting((fewest, most))(triton_norms.CONFIGS, None, BLOCK=block, N=block)
        assert 1 <= len(tried) <= 12
        assert all(one.kwargs["ROWS"] * block / (32 * one.num_warps) <= most for one in tried)
        block *= 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="triton brings NVIDIA's assembler on x86-64")
@pytest.mark.parametrize(
    ("dtype", "capability"), [("fp32", 80), ("fp32", 90), ("bf16", 75), ("bf16", 90), ("fp64", 90)]
)
def test_kernels_compile_for_a_gpu(dtype: str, capability: int, monkeypatch: Any, tmp_path: Path) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rmsrepro.norms.backends.fused import triton_kernels, triton_wide

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    common = {"N": 1024, "K": 1024, "INVERSE": 2**-10, "ACC": tl.float64 if dtype == "fp64" else tl.float32}
    rules = [
        # A constant below fp32's range must not draw the rest into fp64.
        {"CENTRED": True, "OUTSIDE": False, "ROUNDED": False, "ADDED": 1e-50},
        {"CENTRED": False, "OUTSIDE": True, "ROUNDED": True, "ADDED": 1e-50, "K": 64},
    ]
    for kernel, tiling in (
        (triton_kernels.forward, {"BLOCK": 1024, "ROWS": 2}),
        (triton_kernels.backward, {"BLOCK": 1024, "ROWS": 1}),
        (triton_wide.forward_wide, {"BLOCK": 512}),
        (triton_wide.backward_wide, {"BLOCK": 512}),
    ):
        for rule in rules:
            constants: dict[str, Any] = {**common, **rule, **tiling}
            types = {}
            for name in kernel.arg_names:
                if name in constants:
                    types[name] = "constexpr"
                elif name == "rows" or name.endswith("stride"):
                    types[name] = "i32"
                else:
                    types[name] = f"*{'fp32' if name in ('gain', 'bias') else dtype}"
                    types[name] = (
                        f"*{'fp64' if dtype == 'fp64' else 'fp32'}" if "partial" in name else types[name]
                    )
            source = ASTSource(kernel, types, constants)
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}
            )
            ptx = compiled.asm["ptx"]
            assert "cubin" in compiled.asm
            assert not re.search(r"\b(ld|st)\.local", ptx)
            assert dtype == "fp64" or ".f64" not in ptx
            assert not re.search(r"\batom|\bred\.", ptx)


# ----------------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu_check")


def test_script_checks_values_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [str(ROOT / "scripts" / "gpu_check"), "--interpret", "--every", "59", "--out", str(out)]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {row["group"] for row in found["values"]} == set(GROUPS)
    assert all(row["ok"] for row in found["values"])
    assert found["times"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_script_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "no CUDA device" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_script_says_that_fsdp_needs_a_gpu(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--fsdp"]) == 2
    assert "trainer=fsdp needs one" in capsys.readouterr().err


@pytest.mark.slow
def test_script_compares_two_ways_to_train(script: ModuleType) -> None:
    cpu = "trainer.accelerator=cpu"
    same = script.check_training([cpu], [cpu, "trainer=ddp"], seconds=100)
    assert same["ok"], same
    assert (same["steps"], same["compared"]) == (2, 6)
    assert 0 <= same["largest"] < 1e-5
    other = script.check_training([cpu], [cpu, "seed=2"], seconds=100)
    assert not other["ok"]
    assert other["largest"] > 1e-3
    refused = script.check_training([cpu], [cpu, "trainer=fsdp"], seconds=100)
    assert not refused["ok"]
    assert "exit status 2: error: trainer=fsdp: it needs a GPU" in refused["raised"]


def test_script_counts_wrong_values(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = script.check_values(None, "cpu", every=97)
    assert not any(row["ok"] for row in found)
    assert "AttributeError" in found[0]["raised"]
    assert "AttributeError" in capsys.readouterr().out


def test_arms_take_turns_and_ratios_are_of_the_same_round(script: ModuleType) -> None:
    order: list[str] = []

    def clock(call: Callable[[], float]) -> float:
        # The machine slows down from call to call, by the same factor in each round.
        return call() * 2.0 ** (len(order) // 3)

    def arm(name: str, takes: float) -> Callable[[], float]:
        return lambda: (order.append(name), takes)[1]

    arms = {"a": arm("a", 1.0), "b": arm("b", 0.5), "c": arm("c", 3.0)}
    times = script.measure(arms, 6, lambda call: 2.0 ** (len(order) // 3) * call())
    assert "".join(order) == "abcbcacab" * 2
    assert times["a"] == [1, 2, 4, 8, 16, 32]
    assert script.ratios(times, "a") == {"a": (1, 1, 1), "b": (0.5,) * 3, "c": (3, 3, 3)}
    assert script.ratios({"a": [1, 1, 1, 1, 1], "b": [1, 2, 3, 4, 5]}, "a")["b"] == (3, 2, 4)


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_arms_compute_what_they_are_named_for(script: ModuleType, mode: str) -> None:
    class Equations:
        """The launchers' place taken, so that the arms run on the CPU."""

        def forward(self, x: Tensor, gain: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
            return self.results(x, gain, bias, x, rule)["y"].float()

        def backward(
            self, dy: Tensor, x: Tensor, gain: Tensor, has_bias: bool, rule: Rule, dtype: Any
        ) -> tuple[Tensor | None, ...]:
            assert (dtype is not None) == has_bias
            found = self.results(x, gain, torch.zeros_like(gain) if has_bias else None, dy, rule)
            return tuple(found[name].float() if name in found else None for name in ("dx", "dgain", "dbias"))

        def results(
            self, x: Tensor, gain: Tensor, bias: Tensor | None, dy: Tensor, rule: Rule
        ) -> dict[str, Tensor]:
            norm = "layernorm" if rule.centred else "rmsnorm" if rule.k == x.shape[-1] else "prmsnorm"
            with torch.enable_grad():
                return checking.reference(Case(norm, x.shape[-1]), x, gain, bias, dy)[0]

    arms = script.make_arms(Equations(), 3, 40, "float32", mode, "cpu")
    found = {name: call() for name, call in arms.items()}
    assert set(found) >= {script.BASE, "F.rms_norm", "fused layernorm", "fused prmsnorm", "copy"}
    torch.testing.assert_close(found["fused layernorm"], found[script.BASE])
    torch.testing.assert_close(found["fused rmsnorm"], found["F.rms_norm"])
    assert len(found["fused prmsnorm"]) == (3 if mode == "fwd" else 2)


def test_table_is_narrow(script: ModuleType) -> None:
    rows = [
        {"rows": rows, "n": n, "dtype": dtype, "mode": mode, "arm": arm, "ms": 1.5, "ratio": 0.5,
         "quartiles": (0.25, 12.5)}
        for rows, n in script.SHAPES for dtype in script.DTYPES for mode in script.MODES
        for arm in (script.BASE, "F.layer_norm again", "compiled layernorm")
        if (arm, n) != ("compiled layernorm", 512)
    ]  # fmt: skip
    text = script.table(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("0.25-12.50") == 4 * (3 * 5 - 1)
    assert text.count("1.5000") == 4 * 5
