"""Probing one module: what it does is found from its outputs, whatever it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rmsrepro.norms import build_norm, list_norms, norm_info
from rmsrepro.norms.backends import missing
from rmsrepro.norms.probing import EpsPosition, Finding, Gain, Kind, NotANorm, Over, probe

WIDTH = 48
NORMS = [name for name in list_norms() if norm_info(name).scope == "activation" and name != "none"]
DIVISORS = {
    "layernorm": "std",
    "layernorm_nobias": "std",
    "prmsnorm": "rms of first 3",
    "l2norm": "l2",
    "scalenorm": "l2",
    "batchnorm": "std over positions",
    "crmsnorm": "crms",
    "dyt": "nothing: bounded",
}


def found(module: nn.Module, width: int | tuple[int, ...] = WIDTH, **options: bool) -> Finding:
    result = probe(module, width, **options)
    assert isinstance(result, Finding), result
    return result


def has(norm: str, parameter: str) -> bool:
    return parameter in {one.name for one in fields(norm_info(norm).params_class)}


# -------------------------------------------------------------------------------- the package's norms


@pytest.mark.parametrize("norm", NORMS)
def test_what_the_packages_norms_do(norm: str) -> None:
    for backend in norm_info(norm).backends:
        if backend == "compiled" or missing(backend) is not None:
            continue  # compiled gives float64 what composite gives it, after half a minute a norm
        one = found(build_norm(norm, WIDTH, backend=backend))
        assert one.kind is (Kind.bounded if norm == "dyt" else Kind.norm)
        assert one.subtracts_mean == (norm in ("layernorm", "layernorm_nobias", "batchnorm"))
        assert one.bias_names == (("bias",) if norm in ("layernorm", "batchnorm", "dyt") else ())
        assert one.gain is (Gain.scalar if norm == "scalenorm" else Gain.entries)
        assert one.gain_names == ("weight",)
        assert one.gain_offset == (1.0 if norm == "gemma_rmsnorm" else 0.0)
        assert one.divisor == DIVISORS.get(norm, "rms")
        assert one.over is (Over.positions if norm == "batchnorm" else Over.row)
        assert (one.width, one.dtype, one.in_place, one.zero_row) == (WIDTH, "float64", False, "finite")
        assert not one.half_statistics
        assert not one.fixed_gain
        assert not one.adds_constant
        assert not one.differs_in_training


@pytest.mark.parametrize("position", ["inside", "outside"])
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if has(norm, "eps")])
def test_eps_is_fitted_within_one_per_cent(norm: str, eps: float, position: str) -> None:
    if not has(norm, "eps_position"):
        if position == "outside":
            return
        params = {"eps": eps}
    else:
        params = {"eps": eps, "eps_position": position}
    for width in (WIDTH, 320):
        one = found(build_norm(norm, width, **params), width).eps
        assert one.position.value == position
        assert one.value == pytest.approx(eps, rel=0.01)
        assert one.residual < 1e-3
        assert one.float64_value is None


@pytest.mark.parametrize("norm", [norm for norm in NORMS if has(norm, "eps")])
def test_no_eps(norm: str) -> None:
    one = found(build_norm(norm, WIDTH, backend="composite", eps=0.0)).eps
    assert (one.position, one.value) == (EpsPosition.none, 0.0)
    assert one.residual < 1e-3


def test_none_is_no_norm() -> None:
    result = probe(build_norm("none", WIDTH), WIDTH)
    assert isinstance(result, NotANorm)
    assert result.reason == "its output changes with the scale of its input"


@pytest.mark.parametrize(
    ("p", "width", "entries"), [(0.25, 64, 16), (0.5, 700, 350), (0.01, 900, 9), (1.0, 64, 64)]
)
def test_the_entries_of_a_partial_statistic_are_counted(p: float, width: int, entries: int) -> None:
    """Rows wider than what is searched at each entry, too."""
    one = found(build_norm("prmsnorm", width, p=p), width)
    assert (one.entries, one.leading, one.statistic) == (entries, True, "rms")


@settings(max_examples=25, deadline=None)
@given(
    norm=st.sampled_from(["layernorm", "rmsnorm", "prmsnorm", "l2norm"]),
    width=st.integers(4, 90),
    exponent=st.floats(-9, -2),
    outside=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_setting_is_found_and_nothing_is_touched(
    norm: str, width: int, exponent: float, outside: bool, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    position = "outside" if outside else "inside"
    module = build_norm(norm, width, backend="composite", eps=10**exponent, eps_position=position, bias=bias)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(width))
            parameter.grad = torch.randn(width)
    before, state = copied(module), torch.get_rng_state()
    one = found(module, width)
    assert one.eps.position.value == position
    assert one.eps.value == pytest.approx(10**exponent, rel=0.01)
    assert one.has_bias == bias
    assert one.subtracts_mean == (norm == "layernorm")
    assert_untouched(module, before)
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------- torch's modules


def copied(module: nn.Module) -> nn.Module:
    """A copy with its gradients, which deepcopy leaves out."""
    copy_ = copy.deepcopy(module)
    for one, other in zip(copy_.parameters(), module.parameters(), strict=True):
        one.grad = None if other.grad is None else other.grad.clone()
    return copy_


def assert_untouched(module: nn.Module, before: nn.Module) -> None:
    assert module.training == before.training
    for (name, one), (other_name, other) in zip(
        (*module.named_parameters(), *module.named_buffers()),
        (*before.named_parameters(), *before.named_buffers()),
        strict=True,
    ):
        assert name == other_name
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
        assert one.dtype == other.dtype
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("training", [True, False])
def test_the_module_stays_as_it_is(training: bool) -> None:
    module = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).train(training)
    calls = []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    before = copied(module)
    assert found(module).over is Over.positions
    assert_untouched(module, before)
    assert module[1].p == 0.5
    assert not calls, "hooks of the user are not called"


def test_torchs_layernorm() -> None:
    one = found(nn.LayerNorm(WIDTH, eps=1e-6))
    assert (one.mean_share, one.bias_names, one.gain_names) == (pytest.approx(1), ("bias",), ("weight",))
    assert (str(one.eps), one.divisor, one.output_length) == (
        "1e-06 inside",
        "std",
        pytest.approx(1, rel=1e-6),
    )
    assert found(nn.LayerNorm(WIDTH, bias=False)).bias_names == ()
    bare = found(nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert (bare.gain, bare.has_bias, bare.subtracts_mean) == (Gain.none, False, True)
    assert found(nn.LayerNorm((4, 12)), (4, 12)).divisor == "std over dimensions 2 and 3"


def test_torchs_rmsnorm_without_eps_has_one_a_dtype() -> None:
    eps = found(nn.RMSNorm(WIDTH)).eps
    assert eps.value == pytest.approx(torch.finfo(torch.float32).eps, rel=0.01)
    assert eps.float64_value == pytest.approx(torch.finfo(torch.float64).eps, rel=0.01)
    assert found(nn.RMSNorm(WIDTH, eps=1e-7)).eps.float64_value is None


@pytest.mark.parametrize("module", [nn.BatchNorm1d(WIDTH), nn.BatchNorm2d(WIDTH), nn.BatchNorm3d(3)])
def test_torchs_batchnorm(module: nn.Module) -> None:
    one = found(module, module.num_features)  # type: ignore[arg-type]
    assert (one.over, one.divisor, one.mean_share) == (Over.positions, "std over positions", pytest.approx(1))
    assert (one.gain_names, one.bias_names, str(one.eps)) == (("weight",), ("bias",), "1e-05 inside")


def test_groups_and_positions() -> None:
    for channels_first in (False, True):
        one = found(nn.GroupNorm(4, WIDTH), channels_first=channels_first)
        assert (one.over, one.groups, one.entries, one.and_positions) == (Over.groups, 4, 12, True)
        assert one.divisor == "std, 4 groups and positions"
        assert found(nn.GroupNorm(1, WIDTH), channels_first=channels_first).divisor == "std and positions"
    for module in (nn.InstanceNorm1d(WIDTH, affine=True), nn.InstanceNorm2d(WIDTH), nn.InstanceNorm3d(WIDTH)):
        assert found(module, channels_first=True).divisor == "std over positions"
    assert not found(nn.LayerNorm(WIDTH), channels_first=True).and_positions


class RMSOver(nn.Module):
    """An RMSNorm over any dimensions."""

    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        dimensions = [one for one in self.dimensions if one < x.ndim]
        return x / (x.square().mean(dimensions, keepdim=True) + 1e-5).sqrt() * self.weight


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("module", "shapes", "dimensions", "words"),
    [
        (RMSOver(1), [(2, 9, WIDTH)], (1,), "dimension 1 of 3"),
        (RMSOver(1), [], (1,), "dimension 1 of 3"),
        (RMSOver(1), [(4, WIDTH)], (), "the last dimension"),
        (RMSOver(1), [(4, WIDTH), (2, 9, WIDTH)], (1,), "dimension 1 of 3"),
        (RMSOver(1), [(3, WIDTH, 6, 7)], (1,), "dimension 1 of 4"),
        (RMSOver(1, 2), [(1, 1, WIDTH)], (1, 2), "dimensions 1 and 2 of 3"),
        (RMSOver(1, 2), [], (1, 2), "dimensions 1 and 2 of 3"),
        (nn.LayerNorm(WIDTH), [(1, 1, WIDTH)], (), "the last dimension"),
        (build_norm("prmsnorm", WIDTH), [(2, 9, WIDTH)], (), "the last dimension"),
        (ChannelsFirst(WIDTH), [(2, WIDTH, 6, 7)], (1,), "dimension 1 of 4"),
        (ChannelsFirst(WIDTH), [], (1,), "dimension 1 of 4"),
    ],
)
def test_the_dimensions_that_share_a_statistic(
    module: nn.Module, shapes: list[tuple[int, ...]], dimensions: tuple[int, ...], words: str
) -> None:
    for channels_first in (False, True):
        one = probe(module, WIDTH, channels_first=channels_first, shapes=shapes)
        assert isinstance(one, Finding), one
        assert (one.dimensions, one.over_dimensions) == (dimensions, words)


def test_a_bounded_map_needs_a_parameter() -> None:
    assert found(build_norm("dyt", WIDTH, gain=False)).kind is Kind.bounded
    for plain in (nn.Tanh(), nn.Hardtanh(), nn.Softsign()):
        assert probe(plain, WIDTH) == NotANorm("it is bounded, not scale-invariant")


def test_an_exit_in_a_forward_is_no_exit() -> None:
    class Leaves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(0)

    assert probe(Leaves(), WIDTH) == NotANorm("SystemExit: 0", ran=False)


# ------------------------------------------------------------------------------- hand-written norms


class Written(nn.Module):
    """An RMSNorm to start from."""

    def __init__(self, dim: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.g


class RMSNorm(Written):
    """A LayerNorm under a false name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class LayerNorm(Written):
    """An RMSNorm under a false name."""


class HalfCentred(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * x.mean(-1, keepdim=True))


class CentredInTraining(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True) if self.training else x)


class FirstSubtracted(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x[..., :1])


class Outside(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.g


class BothEps(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / ((x.square().mean(-1, keepdim=True) + self.eps).sqrt() + 0.03) * self.g


class Floor(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(self.eps) * self.g


class SampleStd(Written):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) * self.g


class Llama(Written):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.g * wide.to(x.dtype)


class T5(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        return self.g * (y.to(self.g.dtype) if self.g.dtype in (torch.float16, torch.bfloat16) else y)


class Gemma(Written):
    def __init__(self) -> None:
        super().__init__(eps=1e-6)
        nn.init.zeros_(self.g)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.g.float())).type_as(x)


class Partial(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x[..., 8:20].square().mean(-1, keepdim=True) + self.eps).sqrt() * self.g


class InPlace(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x.div_(x.square().mean(-1, keepdim=True).add(self.eps).sqrt()).mul_(self.g)


class MaxNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.g


class L1Norm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.g


class Normalise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(WIDTH**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x / (x.norm(dim=-1, keepdim=True) + 1e-6)


class DyT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.shift


class HiddenGain(nn.Module):
    """A gain and a shift that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.linspace(0.5, 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain.to(x) + 0.25


@pytest.mark.parametrize(
    ("make", "share", "divisor", "eps"),
    [
        (Written, 0.0, "rms", "1e-05 inside"),
        (RMSNorm, 1.0, "std", "1e-05 inside"),
        (LayerNorm, 0.0, "rms", "1e-05 inside"),
        (HalfCentred, 0.5, "rms", "1e-05 inside"),
        (FirstSubtracted, None, "rms", "1e-05 inside"),
        (Outside, 0.0, "rms", "1e-05 outside"),
        (BothEps, 0.0, "rms", "unclear"),
        (Floor, 0.0, "l2", "1e-05 floor"),
        (SampleStd, 1.0, "std (n - 1)", "1e-05 outside"),
        (Llama, 0.0, "rms", "1e-05 inside"),
        (T5, 0.0, "rms", "1e-05 inside"),
        (Gemma, 0.0, "rms", "1e-06 inside"),
        (Partial, 0.0, "rms of 12", "1e-05 inside"),
        (InPlace, 0.0, "rms", "1e-05 inside"),
        (MaxNorm, 0.0, "max |a|", "1e-05 outside"),
        (L1Norm, 0.0, "mean |a|", "1e-05 outside"),
        (Normalise, 0.0, "l2", "1e-12 floor"),
        (ScaleNorm, 0.0, "l2", "1e-06 outside"),
        (HiddenGain, 0.0, "rms", "1e-05 inside"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hand_written_norms(
    make: Callable[[], nn.Module], share: float | None, divisor: str, eps: str
) -> None:
    one = found(make())
    assert one.mean_share == (None if share is None else pytest.approx(share, abs=1e-6))
    assert one.divisor == divisor
    assert str(one.eps) == eps
    assert one.in_place == (make is InPlace)
    assert one.half_statistics == (
        make not in (Llama, T5, Gemma, SampleStd, MaxNorm, L1Norm, Normalise, ScaleNorm, Floor)
    )
    assert one.zero_row == ("nan gradient" if make in (Outside,) else "finite")
    assert (one.fixed_gain, one.adds_constant) == ((make is HiddenGain,) * 2)


def test_gains_and_biases_by_whatever_name() -> None:
    gemma, scale, dyt = found(Gemma()), found(ScaleNorm()), found(DyT())
    assert (gemma.gain, gemma.gain_names, gemma.gain_offset) == (Gain.entries, ("g",), 1.0)
    assert (scale.gain, scale.gain_names, scale.gain_offset) == (Gain.scalar, ("scale",), 0.0)
    assert scale.output_length == pytest.approx(WIDTH**-0.5, rel=1e-3)
    assert (dyt.kind, dyt.gain_names, dyt.bias_names) == (Kind.bounded, ("weight",), ("shift",))


class Exponential(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.g.exp() / self.g


class InOneTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.stack([torch.ones(WIDTH), torch.zeros(WIDTH)]))
        self.number = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.both[0], self.both[1])


def test_gains_in_another_form() -> None:
    one, other = found(Exponential()), found(InOneTensor())
    assert (one.gain, one.gain_names, one.has_bias) == (Gain.other, ("g",), False)
    assert (one.divisor, str(one.eps)) == ("rms", "1e-05 inside")
    assert (other.gain, other.gain_names, other.bias_names) == (Gain.other, ("both",), ("both",))
    assert (other.subtracts_mean, other.divisor, other.adds_constant) == (True, "std", False)


def test_a_norm_in_a_wrapper() -> None:
    one = found(nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.3)))
    assert (one.subtracts_mean, one.bias_names, one.differs_in_training) == (True, ("0.bias",), False)


def test_a_norm_that_is_another_in_training() -> None:
    one = found(CentredInTraining())
    assert (one.subtracts_mean, one.differs_in_training) == (False, True)
    assert one.in_training is not None
    assert one.in_training.subtracts_mean


def test_dtypes() -> None:
    llama, package = found(Llama()), found(build_norm("rmsnorm", WIDTH))
    assert llama.output_dtypes["bf16/fp32"] == "fp32"
    assert package.output_dtypes["bf16/fp32"] == "bf16"
    assert {llama.output_dtypes[f"{one}/{one}"] for one in ("bf16", "fp16")} == {"bf16", "fp16"}


class RowByRow(torch.autograd.Function):
    """y * gain, the gain's gradient added row by row in its own dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gain: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y, gain)
        return y * gain

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, gain = ctx.saved_tensors
        total = torch.zeros_like(gain)
        for row in upstream * y:
            total = total + row
        return upstream * gain, total


class BadGradient(Written):
    def forward(self, x: Tensor) -> Tensor:
        return RowByRow.apply(
            x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x), self.g
        )


def test_gains_whose_gradient_is_added_in_half_precision() -> None:
    """1024 ones, added one by one in bf16, stop at 256."""
    assert found(BadGradient()).gain_gradient == pytest.approx(0.25, rel=0.01)
    assert found(Llama()).gain_gradient == pytest.approx(1, rel=0.01)
    assert found(build_norm("layernorm", WIDTH)).gain_gradient == pytest.approx(1, rel=0.01)


def test_rows_of_zeros() -> None:
    assert found(Written(eps=0.0)).zero_row == "nan"
    assert found(Outside()).zero_row == "nan gradient"
    assert found(Written()).zero_row == "finite"


def test_a_module_that_takes_fp32_only() -> None:
    class Only32(Written):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("fp32, please")
            return super().forward(x)

    one = found(Only32())
    assert (one.dtype, one.divisor, one.half_statistics) == ("float32", "rms", None)
    assert one.eps.value == pytest.approx(1e-5, rel=0.01)


def test_no_norms() -> None:
    softmax, sequence = nn.Softmax(-1), nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    for module, reason in (
        (nn.GELU(), "its output changes with the scale of its input"),
        (nn.Linear(WIDTH, WIDTH), "its output changes with the scale of its input"),
        (nn.Identity(), "its output changes with the scale of its input"),
        (nn.Tanh(), "it is bounded, not scale-invariant"),
        (nn.Hardtanh(), "it is bounded, not scale-invariant"),
        (softmax, "it is scale-invariant, but not its input times one number a row"),
        (sequence, "it is scale-invariant, but not its input times one number a row"),
        (
            nn.Sequential(nn.RMSNorm(WIDTH), nn.Tanh()),
            "it is scale-invariant, but not its input times one number a row",
        ),
        (nn.LayerNorm(WIDTH + 1), "RuntimeError: Given normalized_shape=[49]"),
        (nn.GRU(WIDTH, WIDTH), "it does not map a tensor to one of the same shape"),
        (nn.ModuleList(), "NotImplementedError"),
    ):
        result = probe(module, WIDTH)
        assert isinstance(result, NotANorm)
        assert reason in result.reason, module
    assert isinstance(probe(nn.LayerNorm(3), 3), NotANorm)


def test_a_random_map_is_no_norm() -> None:
    class Noisy(Written):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * torch.randn_like(x)

    result = probe(Noisy(), WIDTH)
    assert isinstance(result, NotANorm)
    assert "another output each time" in result.reason


def test_parameters_without_values_are_drawn() -> None:
    one = found(nn.LayerNorm(WIDTH, device="meta"))
    assert (one.subtracts_mean, one.bias_names, str(one.eps)) == (True, ("bias",), "1e-05 inside")
