"""Each check of a card can fail: norms with one fault each, and the sound norm that they were made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import register_norm, registry
from rmsrepro.norms.card import Check, Status, Subject, make_card
from rmsrepro.norms.card.card import CHECKS
from rmsrepro.norms.card.result import guarded


class Sound(nn.Module):
    """RMSNorm as a user would write it."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(f"expected {self.weight.shape[0]} entries, got {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (self.normalise(wide) * self.weight).to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class HalfSums(Sound):
    """Squares and sums in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("shape")
        return self.normalise(x) * self.weight.to(x.dtype)


class HalfGradients(Sound):
    """The gain is multiplied in half precision, by parameters that were cast at the start."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("shape")
        y = self.normalise(x.double()).to(x.dtype)
        return _HalfGain.apply(y, self.weight)


class _HalfGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(y, gain)
        return y * gain.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        y, gain = ctx.saved_tensors
        parts = (upstream * y).flatten(0, -2)
        total = parts.new_zeros(parts.shape[-1])
        for start in range(0, parts.shape[0], 64):  # rounded to the dtype after each part
            total = total + parts[start : start + 64].sum(0)
        return upstream * gain.to(upstream.dtype), total.to(gain.dtype)


class InPlace(Sound):
    """Works on the caller's memory where the cast is none."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("shape")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if torch.is_grad_enabled():
            return (wide * scale * self.weight).to(x.dtype)
        return wide.mul_(scale).mul_(self.weight).to(x.dtype)


class NaNAtZero(Sound):
    """The root's slope at 0 is infinite, and what it is multiplied with is 0."""

    def normalise(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Broadcasts(Sound):
    """No look at the shape: a gain of one entry goes with any row."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (self.normalise(wide) * self.weight).to(x.dtype)


class GraphBreak(Sound):
    def normalise(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().normalise(x)


class LooksAtValues(Sound):
    """What it does depends on a number in the tensor."""

    def normalise(self, x: Tensor) -> Tensor:
        return super().normalise(x if float(x.detach().abs().sum()) >= 0 else -x)


class Widens(Sound):
    """The product with fp32 gains is fp32, and stays it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("shape")
        return self.normalise(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x) * self.weight


class Forgetful(Sound):
    """Remembers a running scale where no state_dict sees it."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        self.scale = torch.ones(())

    def normalise(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().square().mean().float()
            return super().normalise(x)
        return x * self.scale.rsqrt().to(x.dtype)


class Unpicklable(Sound):
    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        self.root = lambda x: x.rsqrt()

    def normalise(self, x: Tensor) -> Tensor:
        return x * self.root(x.square().mean(-1, keepdim=True) + self.eps)


class NoEmpty(Sound):
    """A largest entry of the whole batch, which an empty one does not have."""

    def normalise(self, x: Tensor) -> Tensor:
        largest = x.detach().abs().max().clamp_min(1e-30)
        scaled = x / largest
        return scaled * (scaled.square().mean(-1, keepdim=True) + self.eps / largest**2).rsqrt()


class UnusedWhenEmpty(Sound):
    """An empty batch is handed back as it came, so that the gain gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.numel() == 0 else super().forward(x)


class ReadsMemory(Sound):
    """Reads the input's memory in order, whatever its strides."""

    def normalise(self, x: Tensor) -> Tensor:
        if x.is_contiguous() or 0 in x.stride():
            return super().normalise(x)
        return super().normalise(torch.as_strided(x, x.shape, x.contiguous().stride()))


class Narrow(Sound):
    """bf16 for everything."""

    def normalise(self, x: Tensor) -> Tensor:
        return super().normalise(x.bfloat16()).to(x.dtype)


class Overflows(Sound):
    """Fourth powers leave fp32 at 1e9."""

    def normalise(self, x: Tensor) -> Tensor:
        return x * (x.square().square().mean(-1, keepdim=True) + self.eps**2).pow(-0.25)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(r)
        return x * r

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (r,) = ctx.saved_tensors
        return upstream * r, None  # the statistic is taken for a constant


class WrongBackward(Sound):
    def normalise(self, x: Tensor) -> Tensor:
        return _Wrong.apply(x, self.eps)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, r)
        return x * r

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        x, r = ctx.saved_tensors
        return upstream * r - x * r**3 * (upstream * x).mean(-1, keepdim=True), None


class OnceDifferentiable(Sound):
    def normalise(self, x: Tensor) -> Tensor:
        return _Once.apply(x, self.eps)


class Leaks(Sound):
    def normalise(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 0.1 * x.square().mean() + self.eps).rsqrt()


class Raises(Sound):
    def forward(self, x: Tensor) -> Tensor:
        raise OSError("the disk is full\nand so on")


FAULTS: list[tuple[type[Sound], set[str], str, str]] = [
    # the norm, the checks that fail, one of them, and what it says
    (
        HalfSums,
        {"agreement_fp16", "half_precision_sums"},
        "half_precision_sums",
        "an fp16 row of 300 gives 0",
    ),
    (HalfGradients, {"half_precision_sums"}, "half_precision_sums", "of weight over 65536 bf16 rows is"),
    (
        Leaks,
        {"rows_independent"},
        "rows_independent",
        "when other rows change; a norm over rows takes a `mask`",
    ),
    (InPlace, {"in_place"}, "in_place", "the input is overwritten in evaluation (fp64, fp32)"),
    (NaNAtZero, {"zero_rows"}, "zero_rows", "rows of zeros: the gradient of the input is not finite"),
    (Broadcasts, {"last_dimension"}, "last_dimension", "built for 1 and given 4 entries it returns"),
    (GraphBreak, {"torch_compile"}, "torch_compile", "1 graph breaks"),
    (LooksAtValues, {"torch_compile", "torch_export"}, "torch_export", "it raised"),
    (Widens, {"dtype_rule"}, "dtype_rule", "fp32 for bf16, fp16, bf16 under autocast, fp16 under autocast"),
    (Forgetful, {"state_dict"}, "state_dict", "other values in evaluation mode"),
    (Unpicklable, {"copies"}, "copies", "pickle"),
    (NoEmpty, {"empty_batch"}, "empty_batch", "it raised"),
    (UnusedWhenEmpty, {"empty_batch"}, "empty_batch", "weight gets no gradient"),
    (ReadsMemory, {"non_contiguous"}, "non_contiguous", "a view (transposed) differs from its copy by"),
    (
        Narrow,
        {"agreement_fp32", "agreement_fp16", "float64_precision", "value_range"},
        "float64_precision",
        "a float64 input is rounded to 0.01 on the way",
    ),
    (Overflows, {"value_range"}, "value_range", "in fp32 the output is accurate from 1e-18 to 1e9 only"),
    (WrongBackward, {"gradcheck", "gradgradcheck"}, "gradcheck", "first derivatives are not those of"),
    (OnceDifferentiable, {"gradgradcheck"}, "gradgradcheck", "second derivatives are not those of"),
]
SLOW = {"torch_compile", "torch_export"}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(registry._registered)
    for cls in (Sound, Raises, *(fault[0] for fault in FAULTS)):
        register_norm(cls.__name__.lower())(cls)
    yield
    registry._registered.clear()
    registry._registered.update(known)


def results(name: str, *, slow: bool) -> dict[str, Check]:
    subject = Subject(name, dim=16)
    chosen: dict[str, Callable[[Subject], Check]] = {
        key: check for key, check in CHECKS.items() if slow or key not in SLOW
    }
    return {key: guarded(lambda check=check: check(subject)) for key, check in chosen.items()}  # type: ignore[misc]


def failed(found: dict[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.status is Status.failed}


@pytest.mark.parametrize(
    ("cls", "expected", "one", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_fails_its_check_and_no_other(
    cls: type[Sound], expected: set[str], one: str, text: str
) -> None:
    found = results(cls.__name__.lower(), slow=bool(expected & SLOW))
    assert failed(found) == expected, {name: found[name].text for name in failed(found) | {one}}
    assert text in found[one].text
    assert found[one].text.count("\n") == 0


def test_every_check_has_a_norm_that_fails_it() -> None:
    covered = set().union(*(fault[1] for fault in FAULTS))
    assert set(CHECKS) - covered == {"agreement_bf16"}  # the same function as the other two


def test_the_sound_norm_passes_them_all() -> None:
    card = make_card(Subject("sound", dim=16))
    assert card.failed == []
    assert {name for name, check in card.checks.items() if check.status is Status.not_applicable} == {
        "table_1"
    }
    assert card.checks["float64_precision"].measured["kept"]
    assert card.checks["agreement_fp32"].measured["reference"] == "its own copy in float64"
    assert card.checks["half_precision_sums"].measured["fp16_300"] == {
        "output": 1.0,
        "exact": pytest.approx(1.0),
    }
    gradients = card.checks["half_precision_sums"].measured["gradients"]
    assert gradients["weight_ones_bf16"]["gradient"] == 65536.0


def test_a_wrong_backward_contradicts_the_invariances() -> None:
    card = make_card(Subject("wrongbackward", dim=16))
    assert {"gradcheck", "gradients"} <= set(card.failed)
    assert card.invariances["weight_matrix_rescaling"]
    assert (
        "<dL/dW, W> = 0 does not hold although weight matrix rescaling does" in card.checks["gradients"].text
    )


def test_a_norm_that_raises_has_a_card_too() -> None:
    card = make_card(Subject("raises", dim=16))
    passed = [name for name, check in card.checks.items() if check.status is Status.passed]
    assert passed == ["last_dimension"]  # it raises there as well
    assert card.checks["agreement_fp32"].text.startswith("it raised OSError: the disk is full")
    assert "and so on" not in str(card.to_json())
    assert card.counts == {"text": "not measured: it raised OSError: the disk is full"}
    assert set(card.invariances.values()) == {False}
