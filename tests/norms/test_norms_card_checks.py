"""Each check of a card can fail: norms with one fault each, and the sound norm that they were made from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmsrepro.norms import register_norm, registry
from rmsrepro.norms.batchnorm import BatchNorm
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
        parts = (upstream * y).reshape(-1, y.shape[-1])
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


class OverTime(Sound):
    """Normalises over the second dimension, which a batch of rows does not have."""

    def normalise(self, x: Tensor) -> Tensor:
        over = (1, -1) if x.dim() > 2 else (-1,)
        return x * (x.square().mean(over, keepdim=True) + self.eps).rsqrt()


class NoSentences(Sound):
    def normalise(self, x: Tensor) -> Tensor:
        if x.dim() > 3:
            raise RuntimeError("no heads")
        return super().normalise(x)


class Cumulative(Sound):
    """Looks at the rows before: the first one does not notice."""

    def normalise(self, x: Tensor) -> Tensor:
        squares = x.square().mean(-1, keepdim=True)
        before = squares.reshape(-1, 1).cumsum(0).reshape(squares.shape)
        return x * (squares + 0.1 * (before - squares).clamp_min(0.0) + self.eps).rsqrt()


class _OverTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(y, gain)
        return y * gain

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        y, gain = ctx.saved_tensors
        parts = upstream * y
        if parts.dim() == 3:
            parts = parts[:, -1]
        return upstream * gain, parts.reshape(-1, y.shape[-1]).sum(0)


class BackwardOverTime(Sound):
    """The gain's gradient is that of the last positions of sentences."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("shape")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return _OverTime.apply(self.normalise(wide), self.weight).to(x.dtype)


class HalvedAfterwards(Sound):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y / 2


class NoGainAfterwards(Sound):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y / self.weight.to(x.dtype)


class ImpreciseAfterwards(Sound):
    """In evaluation, fp32 goes through bf16 on the way."""

    def normalise(self, x: Tensor) -> Tensor:
        y = super().normalise(x)
        return y.bfloat16().float() if x.dtype is torch.float32 and not self.training else y


class HalfParameters(Sound):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.float() if self.weight.dtype is torch.bfloat16 else y


class AtLeastTwo(Broadcasts):
    """Not to be had one wide, where the other half of the check would have seen it broadcast."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        if dim < 2:
            raise ValueError("too narrow")
        super().__init__(dim, eps=eps)


# ------------------------------------------------------------------------- nothing is wrong with these


class Frozen(Sound):
    """Its gain is not learned, as in the first stage of a fine-tuning."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        self.weight.requires_grad_(False)


class Counts(Sound):
    """A whole number among the parameters."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)


class Remembers(Sound):
    """Divides by what the batches before were like, and by nothing of this one."""

    seen: Tensor

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        self.register_buffer("seen", torch.ones(()))

    def normalise(self, x: Tensor) -> Tensor:
        y = x * (self.seen + self.eps).rsqrt()
        if self.training and x.numel():
            self.seen = self.seen.lerp(x.detach().square().mean().clamp(0.1, 10).to(self.seen.dtype), 0.1)
        return y


class Recomputes(Sound):
    """Keeps nothing for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Signs(Sound):
    """Its gradient is 0 but for eps."""

    def normalise(self, x: Tensor) -> Tensor:
        return x / (x.abs() + self.eps)


class Large(Sound):
    """Rows of 30000 become larger than fp16 holds."""

    def normalise(self, x: Tensor) -> Tensor:
        return 3 * x


class Centres(Sound):
    """The mean of a row of 30000 is off by an ulp of it, as in some kernels."""

    def normalise(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) * (1 + torch.finfo(x.dtype).eps)
        return centred * (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()


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
    (Forgetful, {"state_dict", "evaluation"}, "state_dict", "other values in evaluation mode"),
    (
        OverTime,
        {"leading_dimensions", "rows_independent"},
        "leading_dimensions",
        "of the shape (B, T, d) differ",
    ),
    (
        NoSentences,
        {"leading_dimensions"},
        "leading_dimensions",
        "the shape (B, H, T, d) raises RuntimeError: no heads",
    ),
    (Cumulative, {"rows_independent"}, "rows_independent", "when other rows change"),
    (BackwardOverTime, {"leading_dimensions"}, "leading_dimensions", "of the shape (B, T, d) differ by"),
    (
        HalvedAfterwards,
        {"evaluation"},
        "evaluation",
        "evaluation differs from training by 0.5, gradients by 0.5",
    ),
    (NoGainAfterwards, {"evaluation"}, "evaluation", "evaluation differs from training by"),
    (ImpreciseAfterwards, {"agreement_fp32", "evaluation"}, "agreement_fp32", "off by"),
    (HalfParameters, {"dtype_rule"}, "dtype_rule", "fp32 for bf16 with bf16 parameters"),
    (
        AtLeastTwo,
        {"last_dimension"},
        "last_dimension",
        "built for 16 and given 1 entries it returns the shape (2, 16)",
    ),
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
RIGHT = [Frozen, Counts, Remembers, Recomputes, Signs, Large, Centres]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(registry._registered)
    for cls in (Sound, Raises, *RIGHT, *(fault[0] for fault in FAULTS)):
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


@pytest.mark.parametrize("cls", RIGHT)
def test_unusual_norms_that_are_right(cls: type[Sound], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {name: check for name, check in CHECKS.items() if name not in SLOW}
    monkeypatch.setattr("rmsrepro.norms.card.card.CHECKS", quick)
    card = make_card(Subject(cls.__name__.lower(), dim=16))
    assert card.failed == [], {name: card.checks[name].text for name in card.failed}
    skipped = {name for name, check in card.checks.items() if check.status is Status.not_applicable}
    assert skipped <= {"table_1", "gradients"}


def test_a_batchnorm_is_compared_in_evaluation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("batchnorm", dim=16)
    check = CHECKS["agreement_fp32"]
    assert check(subject).status is Status.passed

    def forgets_the_variance(self: BatchNorm, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return whole(self, x, mask) if self.training else (x - self.running_mean) * self.weight + self.bias

    whole = BatchNorm.forward
    monkeypatch.setattr(BatchNorm, "forward", forgets_the_variance)
    assert check(subject).status is Status.failed


@pytest.mark.parametrize("raised", [SystemExit(0), SystemExit("bye"), asyncio.CancelledError()])
def test_a_norm_that_ends_the_program_has_failed(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        raise raised

    monkeypatch.setattr(Raises, "forward", forward)
    card = make_card(Subject("raises", dim=16))
    assert {"agreement_fp32", "gradcheck", "last_dimension", "torch_export", "copies"} <= set(card.failed)
    assert type(raised).__name__ in card.checks["agreement_fp32"].text
    assert card.counts["text"].startswith(f"not measured: it raised {type(raised).__name__}")
    assert card.subject.reference_name


def test_an_interrupt_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Raises, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        make_card(Subject("raises", dim=16))


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
