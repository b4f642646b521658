"""Inspecting whole models: which layers are found, what is said of them, what is normalised besides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsrepro.config.schema import GRUConfig, Placement, Site, Size, TransformerConfig
from rmsrepro.config.sizes import resolve_model
from rmsrepro.models import build_model
from rmsrepro.norms import NormSpec, build_norm, list_norms, norm_info
from rmsrepro.norms.inspecting import Call, Inspection, compare, inspect_model, mixtures, remarks
from rmsrepro.norms.inspecting.grouping import collapse
from rmsrepro.norms.inspecting.walking import likely_widths
from rmsrepro.norms.inspecting.wording import join, plural


def language_model(norm: NormSpec, placement: Placement = Placement.pre) -> tuple[nn.Module, Tensor]:
    model = build_model(
        resolve_model(TransformerConfig(size=Size.tiny)),
        "lm",
        src_vocab=30,
        tgt_vocab=30,
        max_len=8,
        norm=norm,
        placement=placement,
        sites=[],
        seed=1,
    )
    return model, torch.arange(12).reshape(2, 6)


def translator(norm: NormSpec) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = build_model(
        resolve_model(GRUConfig(size=Size.tiny)),
        "translation",
        src_vocab=30,
        tgt_vocab=30,
        max_len=8,
        norm=norm,
        placement=Placement.none,
        sites=list(Site),
        seed=1,
    )
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    return model, (torch.arange(10).reshape(2, 5), mask, torch.arange(8).reshape(2, 4))


def said(inspection: Inspection, norm: str, **params: object) -> list[str]:
    return [str(one) for one in compare(inspection, NormSpec(norm, params))]


# ---------------------------------------------------------------------------------- the package's models


@pytest.mark.parametrize(
    "norm", [name for name in list_norms() if name not in ("batchnorm", "weightnorm", "none")]
)
def test_a_model_is_as_its_norm_says(norm: str) -> None:
    """Norms whose statistic runs over positions would look ahead in a language model."""
    spec = NormSpec(norm)
    found = inspect_model(*language_model(spec))
    assert [layer.path.rpartition(".")[2] for layer in found.layers] == ["norm_input"] * 4 + ["final_norm"]
    assert {tuple(layer.calls.items()) for layer in found.layers if layer.calls} == {
        (("evaluation", 1), ("training", 1))
    }
    assert compare(found, spec) == []
    assert mixtures(found) == []
    assert found.calls == ()
    other = "rmsnorm" if norm in ("layernorm", "layernorm_nobias") else "layernorm"
    assert compare(found, NormSpec(other)) != []


@pytest.mark.parametrize("norm", ["none", "weightnorm"])
def test_a_model_without_norms_of_activations(norm: str) -> None:
    found = inspect_model(*language_model(NormSpec(norm)))
    assert found.layers == ()
    assert compare(found, NormSpec(norm)) == []
    assert said(found, "rmsnorm") == ["nothing is normalised; rmsnorm is a norm"]
    assert said(inspect_model(nn.RMSNorm(8)), "none") == ["the module itself normalises; none does not"]


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm"])
def test_a_recurrent_model(norm: str) -> None:
    spec = NormSpec(norm)
    found = inspect_model(*translator(spec))
    assert len(found.layers) == 22
    assert {layer.finding.width for layer in found.layers} == {64, 128}
    assert compare(found, spec) == []
    assert found.calls == ()


def test_a_planted_layernorm_is_named() -> None:
    model, tokens = language_model(NormSpec("rmsnorm", {"eps": 1e-6}))
    model.stack.layers[1].feed_forward_residual.norm_input = nn.LayerNorm(64)
    place = "stack.layers.1.feed_forward_residual.norm_input"
    found = inspect_model(model, tokens)
    assert said(found, "rmsnorm", eps=1e-6) == [
        f"{place} subtracts a mean; rmsnorm does not",
        f"{place} carries a bias (bias); rmsnorm has none",
        f"{place} has eps 1e-05 inside; rmsnorm has eps 1e-06 inside",
    ]
    assert [str(one) for one in mixtures(found)] == [
        f"{place} subtracts a mean; 4 other layers keep the mean",
        f"{place} carries a bias (bias); 4 other layers carry no bias",
        f"{place} has eps 1e-05 inside; 4 other layers have eps 1e-06 inside",
    ]
    assert "stack.final_norm keeps the mean; layernorm subtracts a mean" in " ".join(
        said(found, "layernorm")
    ) or ("keep the mean; layernorm subtracts a mean" in " ".join(said(found, "layernorm")))


def test_what_else_differs() -> None:
    offset = inspect_model(build_norm("gemma_rmsnorm", 32, eps=1e-5))
    assert said(offset, "rmsnorm") == [
        "the module itself has a gain for each entry, stored as its difference from 1; "
        "rmsnorm has a gain for each entry"
    ]
    partial = inspect_model(build_norm("prmsnorm", 64, p=0.5))
    assert said(partial, "rmsnorm") == [
        "the module itself divides by rms of first 32; rmsnorm divides by rms"
    ]
    assert said(partial, "prmsnorm", p=0.5) == []
    assert said(partial, "prmsnorm") == [
        "the module itself divides by rms of first 32; prmsnorm divides by rms of first 4"
    ]
    lengths = inspect_model(build_norm("l2norm", 64))
    assert said(lengths, "rmsnorm") == ["the module itself divides by l2; rmsnorm divides by rms"]
    one_gain = inspect_model(build_norm("scalenorm", 64))
    assert said(one_gain, "l2norm") == [
        "the module itself has one gain for all entries; l2norm has a gain for each entry"
    ]
    bounded = inspect_model(build_norm("dyt", 64))
    assert said(bounded, "rmsnorm") == [
        "the module itself is bounded, not scale-invariant; rmsnorm is scale-invariant"
    ]
    outside = inspect_model(build_norm("rmsnorm", 64, eps=1e-5, eps_position="outside"))
    assert said(outside, "rmsnorm") == [
        "the module itself has eps 1e-05 outside; rmsnorm has eps 1e-05 inside"
    ]
    assert said(outside, "rmsnorm", variant="authors_torch") == [
        "the module itself has eps 1e-05 outside; rmsnorm has eps 1e-08 outside"
    ]


# ------------------------------------------------------------------------------------- torch's models


def encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )


def test_torchs_encoder_skips_its_norms_in_evaluation() -> None:
    found = inspect_model(encoder(), torch.randn(2, 5, 16))
    assert [layer.path for layer in found.layers] == [f"layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)]
    assert [layer.never_called for layer in found.layers] == [["evaluation"]] * 4
    assert [(call.path, call.function, call.modes, call.eps) for call in found.calls] == [
        (f"layers.{i}", "aten._transformer_encoder_layer_fwd", ("evaluation",), 1e-5) for i in (0, 1)
    ]
    assert said(found, "layernorm") == []
    texts = [str(one) for one in remarks(found)]
    assert "layers.0-1.norm1 and layers.0-1.norm2 are never called in evaluation" in texts
    assert any(text.startswith("layers.0-1 are one fused operation of torch in evaluation") for text in texts)
    assert said(found, "rmsnorm")[-1] == (
        "layers.0-1 normalise in forward by aten._transformer_encoder_layer_fwd, in evaluation only, "
        "subtracting a mean, adding a bias; rmsnorm keeps the mean and carries no bias"
    )


class RMS(nn.Module):
    def __init__(self, dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        if bias:
            self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(
            x
        ) * self.weight


def test_a_norm_swapped_into_torchs_encoder_is_bypassed() -> None:
    """In evaluation torch computes a LayerNorm from the weights of whatever stands there, or fails."""
    for bias in (True, False):
        model = encoder()
        for layer in model.layers:
            layer.norm1, layer.norm2 = RMS(16, bias=bias), RMS(16, bias=bias)
        found = inspect_model(model, torch.randn(2, 5, 16))
        assert not any(layer.finding.subtracts_mean for layer in found.layers)
        if bias:
            assert [call.subtracts_mean for call in found.calls] == [True, True]
            assert len(said(found, "rmsnorm")) == 1
        else:
            assert found.modes == ("training",)
            assert "does not run in evaluation: AttributeError" in found.notes[0]


def test_torchs_decoder_and_images() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1)
    found = inspect_model(decoder, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)))
    assert [layer.path for layer in found.layers] == ["layers.0.norm1", "layers.0.norm2", "layers.0.norm3"]
    assert found.calls == ()
    images = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.InstanceNorm2d(6),
        nn.GroupNorm(1, 6),
        nn.Flatten(),
    )
    found = inspect_model(images, torch.randn(4, 3, 8, 8))
    assert [(layer.path, layer.finding.divisor) for layer in found.layers] == [
        ("1", "std over positions"),
        ("3", "std over positions"),
        ("4", "std and positions"),
    ]


# --------------------------------------------------------------------- what is normalised in a forward


class Functional(nn.Module):
    """Norms of every sort that are no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.unused = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x))
        x = F.layer_norm(x, (32,), self.unused.weight, self.unused.bias, 1e-3)
        x = F.rms_norm(x, (32,), eps=1e-4)
        x = F.normalize(x, dim=-1)
        x = F.batch_norm(x.flatten(0, 1), None, None, training=True).reshape(x.shape)
        return F.group_norm(x.transpose(1, 2), 4, eps=1e-2).transpose(1, 2)


class WrittenOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        x = x + centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x + x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        x = x + x / (x.norm(dim=-1, keepdim=True) + 1e-3)
        x = x + torch.softmax(x, -1) / x.exp().sum(-1, keepdim=True)
        return x * x.mean(-1, keepdim=True) / 32**0.5


def test_functions_in_a_forward() -> None:
    found = inspect_model(Functional(), torch.randn(2, 5, 32))
    assert [layer.path for layer in found.layers] == ["norm", "unused"]
    assert [layer.never_called for layer in found.layers] == [[], ["evaluation", "training"]]
    seen = {call.function: call for call in found.calls}
    assert {
        name: (one.subtracts_mean, one.has_bias, one.eps, one.eps_position) for name, one in seen.items()
    } == {
        "F.layer_norm": (True, True, 1e-3, "inside"),
        "F.rms_norm": (False, False, 1e-4, "inside"),
        "F.normalize": (False, False, 1e-12, "floor"),
        "F.batch_norm": (True, False, 1e-5, "inside"),
        "F.group_norm": (True, False, 1e-2, "inside"),
    }
    assert {(one.path, one.class_name, one.modes, one.count) for one in seen.values()} == {
        ("", "Functional", ("evaluation", "training"), 1)
    }
    texts = said(found, "rmsnorm", eps=1e-6)
    assert (
        "the module itself normalises in forward by F.layer_norm, subtracting a mean, adding a bias, "
        "with eps 0.001 inside; rmsnorm keeps the mean, carries no bias and has eps 1e-06 inside"
    ) in texts
    assert (
        "the module itself normalises in forward by F.rms_norm, with eps 0.0001 inside; "
        "rmsnorm has eps 1e-06 inside"
    ) in texts
    assert "unused is never called in evaluation or training" in [str(one) for one in remarks(found)]


def test_norms_written_out_in_a_forward() -> None:
    found = inspect_model(nn.Sequential(WrittenOut()), torch.randn(2, 5, 32))
    assert [(one.path, one.subtracts_mean, one.eps, one.eps_position) for one in found.calls] == [
        ("0", True, 1e-5, "inside"),
        ("0", False, 1e-6, "inside"),
        ("0", False, 1e-3, "outside"),
    ]
    assert {one.function for one in found.calls} == {"written out"}


class InForward(nn.Module):
    """A function of two linear maps of its input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.function = nn.Linear(32, 32), nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.one(x), self.other(x)) + self.other(x)


def mean(x: Tensor, dim: int = -1) -> Tensor:
    return x.mean(dim, keepdim=True)


def length(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


def by_var_mean(x: Tensor, _: Tensor) -> Tensor:
    variance, centre = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - centre) * (variance + 1e-5).rsqrt()


def by_std_mean(x: Tensor, _: Tensor) -> Tensor:
    deviation, centre = torch.std_mean(x, -1)
    return (x - centre[..., None]) / (deviation[..., None] + 1e-6)


def by_var(x: Tensor, _: Tensor) -> Tensor:
    return (x - mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)


def by_std(x: Tensor, _: Tensor) -> Tensor:
    return (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-3)


def by_mean_of_squares(x: Tensor, _: Tensor) -> Tensor:
    centre = mean(x)
    return (x - centre) / (mean(x * x) - centre * centre + 1e-5) ** 0.5


def by_sums(x: Tensor, _: Tensor) -> Tensor:
    centre = x.sum(-1, keepdim=True) / 32
    variance = x.pow(2).sum(-1, keepdim=True) / 32 - centre.square()
    return (x - centre) * (variance + 1e-5) ** -0.5


def mean_subtracted_last(x: Tensor, _: Tensor) -> Tensor:
    variance, centre = torch.var_mean(x, -1, keepdim=True, correction=0)
    factor = torch.rsqrt(variance + 1e-5)
    return x * factor - centre * factor


def centred_twice(x: Tensor, _: Tensor) -> Tensor:
    variance = mean((x - mean(x)).square())
    return (x - mean(x)) / torch.sqrt(variance + 1e-5)


def by_einsum(x: Tensor, _: Tensor) -> Tensor:
    return x / (torch.einsum("btd,btd->bt", x, x)[..., None] / 32 + 1e-5).sqrt()


def by_matmul(x: Tensor, _: Tensor) -> Tensor:
    return x / (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1).div(32).add(1e-5).sqrt()


def of_the_first_entries(x: Tensor, _: Tensor) -> Tensor:
    return x / (mean(x[..., :8].square()) + 1e-5).sqrt()


def in_place(x: Tensor, _: Tensor) -> Tensor:
    y = x.clone()
    size = mean(y.pow(2)).add_(1e-5).sqrt_()
    y.div_(size)
    return y / (size + 1)


def cast(x: Tensor, _: Tensor) -> Tensor:
    return x * torch.rsqrt(mean(x.double().pow(2)).float() + 1e-6)


def of_heads(x: Tensor, _: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 8))
    return (heads / length(heads).clamp(min=1e-9)).flatten(-2)


def divided_last(x: Tensor, _: Tensor) -> Tensor:
    """eps is divided by n too."""
    return x / ((x.square().sum(-1, keepdim=True) + 32e-5) / 32).sqrt()


def by_magnitudes(x: Tensor, _: Tensor) -> Tensor:
    return x / (mean(x.abs()) + 1e-3)


def transposed(x: Tensor, _: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    return (y * torch.rsqrt(mean(y.square(), 1) + 1e-6)).transpose(1, 2)


def along_time(x: Tensor, _: Tensor) -> Tensor:
    return F.normalize(x)


def of_several(x: Tensor, _: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:])


@pytest.mark.parametrize(
    ("function", "subtracts", "divided_by", "eps", "position", "over"),
    [
        (by_var_mean, True, None, 1e-5, "inside", None),
        (by_std_mean, True, None, 1e-6, "outside", None),
        (by_var, True, None, 1e-5, "inside", None),
        (by_std, True, None, 1e-3, "outside", None),
        (by_mean_of_squares, True, None, 1e-5, "inside", None),
        (by_sums, True, None, 1e-5, "inside", None),
        (mean_subtracted_last, True, None, 1e-5, "inside", None),
        (centred_twice, True, None, 1e-5, "inside", None),
        (by_einsum, False, None, 1e-5, "inside", None),
        (by_matmul, False, None, 1e-5, "inside", None),
        (of_the_first_entries, False, None, 1e-5, "inside", None),
        (in_place, False, None, 1e-5, "inside", None),
        (cast, False, None, 1e-6, "inside", None),
        (of_heads, False, None, 1e-9, "floor", None),
        (divided_last, False, None, 1e-5, "inside", None),
        (by_magnitudes, False, "mean |a|", 1e-3, "outside", None),
        (transposed, False, None, 1e-6, "inside", "dimension 1 of 3"),
        (along_time, False, "l2", 1e-12, "floor", "dimension 1 of 3"),
        (of_several, True, "std", 1e-5, "inside", "dimensions 1 and 2 of 3"),
    ],
)
def test_norms_of_every_form_in_a_forward(
    function: Callable[[Tensor, Tensor], Tensor],
    subtracts: bool,
    divided_by: str | None,
    eps: float,
    position: str,
    over: str | None,
) -> None:
    found = inspect_model(InForward(function), torch.randn(2, 5, 32))
    (call,) = found.calls
    assert (call.subtracts_mean, call.divided_by) == (subtracts, divided_by)
    assert (call.eps, call.eps_position, call.over) == (pytest.approx(eps), position, over)
    assert (call.modes, call.count) == (("evaluation", "training"), 1)
    texts = " ".join(said(found, "rmsnorm", eps=eps, eps_position="inside"))
    assert ("rmsnorm normalises over the last dimension" in texts) == (over is not None)
    assert ("keeps the mean" in texts) == subtracts
    assert bool(texts) == (subtracts or divided_by is not None or over is not None or position != "inside")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, h: h * mean(x.pow(2)).sqrt(),
        lambda x, h: x * mean(x.pow(2)).sqrt(),
        lambda x, h: h / (x.abs() + 1),
        lambda x, h: x / (x.abs() + 1),
        lambda x, h: h / (length(x) + 1),
        lambda x, h: torch.cat([x.chunk(2, -1)[0] / length(x.chunk(2, -1)[1]), h], -1)[..., :32],
        lambda x, h: torch.cat([x[..., :16] / length(x[..., 16:]), h], -1)[..., :32],
        lambda x, h: x * F.cosine_similarity(x, h, dim=-1)[..., None],
        lambda x, h: h * (x * h).sum(-1, keepdim=True) / (length(x) * length(h)),
        lambda x, h: h / x.std(),
        lambda x, h: x / (x.var(-1, keepdim=True) + 1e-5),
        lambda x, h: x * (1 / length(x)).clamp(max=1.0),
        lambda x, h: x.clone().mul_(h) / length(x),
        lambda x, h: x - mean(h),
        lambda x, h: (torch.fft.rfft(x) * torch.ones(1, dtype=torch.complex64)).abs().sum() * h,
        lambda x, h: torch.nested.nested_tensor([x[0], h[0]]).mul(2.0).sqrt().to_padded_tensor(0.0) * 0 + h,
        lambda x, h: (x[0].to_sparse() * x[0].to_sparse()).to_dense() + h,
    ],
    ids=range(17),
)
def test_divisions_that_are_no_norms(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = inspect_model(InForward(function), torch.randn(2, 5, 32))
    assert (found.layers, found.calls) == ((), ())


def test_attention_and_losses_are_no_norms() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
            return F.gelu(mixed) + (x - x.amax(-1, keepdim=True)).exp()

    found = inspect_model(Attention(), torch.randn(2, 5, 16))
    assert (found.layers, found.calls) == ((), ())


def test_a_norm_does_not_report_its_own_function() -> None:
    found = inspect_model(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), torch.randn(3, 16))
    assert len(found.layers) == 1
    assert found.calls == ()


# --------------------------------------------------------------------------------------- the walk


def test_a_norm_with_children_and_norms_in_a_row() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.RMSNorm(16, elementwise_affine=False, eps=1e-5)
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.core(x) * self.weight

    model = nn.Sequential(
        nn.Linear(16, 16), nn.Sequential(Scaled(), nn.Dropout(0.1)), nn.LayerNorm(16), Scaled()
    )
    assert [layer.path for layer in inspect_model(model).layers] == ["1", "2", "3"]
    # One after the other two norms are scale-invariant too, but no norm.
    pair = nn.Sequential(nn.RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5))
    assert [layer.path for layer in inspect_model(pair).layers] == ["0", "1"]


def test_norms_of_heads_and_without_parameters() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.RMSNorm(4, eps=1e-6), nn.LayerNorm(4, elementwise_affine=False)
            self.project = nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            query, key = self.project(x).unflatten(-1, (2, 4, 4)).unbind(-3)
            return (self.query(query) * self.key(key)).flatten(-2)

    for inputs in (None, torch.randn(2, 5, 16)):
        found = inspect_model(Heads(), inputs)
        assert [(one.path, one.finding.width) for one in found.layers] == [("query", 4), ("key", 4)]


def test_the_width_seen_with_inputs() -> None:
    """Nothing tells the width of this norm but what it is called with."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = [torch.linspace(0.5, 2, 24)]

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain[0].to(x)

    model = nn.Sequential(Hidden(), nn.Linear(24, 24))
    assert inspect_model(model).layers == ()
    (layer,) = inspect_model(model, torch.randn(3, 24)).layers
    assert (layer.path, layer.finding.fixed_gain, str(layer.finding.eps)) == ("0", True, "1e-05 inside")


def test_likely_widths() -> None:
    assert likely_widths(nn.LayerNorm((3, 5)))[0] == (3, 5)
    assert likely_widths(nn.BatchNorm2d(6), [(2, 6, 9, 9)])[0] == (6,)
    assert likely_widths(nn.GELU(), [(2, 3, 7)]) == [(7,)]
    assert likely_widths(nn.GELU()) == [(64,)]


def test_the_model_and_its_inputs_stay_as_they_are() -> None:
    model, tokens = language_model(NormSpec("rmsnorm"))
    model.stack.layers[0].feed_forward_residual.norm_input = nn.BatchNorm1d(6)
    model.stack.layers[0].feed_forward_residual.norm_input.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls = []
    model.stack.final_norm.register_forward_hook(lambda *_: calls.append(1))
    modes = [module.training for module in model.modules()]
    before, given, state = copy.deepcopy(model.state_dict()), tokens.clone(), torch.get_rng_state()
    inspect_model(model, {"tokens": tokens})
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(
        torch.equal(one.grad, torch.ones_like(one)) for one in model.parameters() if one.grad is not None
    )
    assert torch.equal(tokens, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_models_that_do_not_run_or_cannot_be_copied() -> None:
    with pytest.raises(ValueError, match="does not run on its inputs: RuntimeError"):
        inspect_model(nn.Linear(4, 4), torch.randn(2, 5))

    class NoCopy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def __deepcopy__(self, memo: object) -> NoCopy:
            raise TypeError("no copies")

    found = inspect_model(NoCopy(), torch.randn(2, 8))
    assert [layer.path for layer in found.layers] == ["norm"]
    assert found.notes == ("the model was not run, for it cannot be copied (TypeError: no copies)",)
    lazy = inspect_model(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)))
    assert [layer.path for layer in lazy.layers] == ["1"]


def test_inputs_of_every_sort() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(x + y)

    x = torch.randn(2, 8)
    for inputs in ((x, x), [x, x], {"x": x, "y": x}, ((x,), {"y": x})):
        (layer,) = inspect_model(Add(), inputs).layers
        assert layer.calls == {"evaluation": 1, "training": 1}


def test_half_precision_models_and_those_without_values() -> None:
    model = nn.Sequential(RMS(16), nn.Linear(16, 16)).bfloat16()
    (layer,) = inspect_model(model, torch.randn(2, 16).bfloat16()).layers
    assert (layer.finding.divisor, str(layer.finding.eps)) == ("rms", "1e-05 inside")
    with torch.device("meta"):
        large = nn.Sequential(nn.RMSNorm(2048, eps=1e-6), nn.Linear(2048, 2048))
    (layer,) = inspect_model(large).layers
    assert (layer.path, str(layer.finding.eps), layer.finding.entries) == ("0", "1e-06 inside", 2048)


# -------------------------------------------------------------------------------------- dimensions


class Pixel(nn.Module):
    """Over the second dimension, and without a parameter that would tell how large it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1e-8).sqrt()


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2), keepdim=True)
        return x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + 1e-6)


def test_norms_over_other_dimensions_than_the_last() -> None:
    for shape, width, words in (
        ((2, 24, 6, 7), 24, "dimension 1 of 4"),
        ((2, 5, 16), 5, "dimension 1 of 3"),
    ):
        found = inspect_model(Pixel(), torch.randn(shape))
        (layer,) = found.layers
        assert (layer.finding.width, layer.finding.over_dimensions) == (width, words)
        assert said(found, "rmsnorm", eps=1e-8, gain=False) == [
            f"the module itself normalises over {words}; rmsnorm over the last dimension"
        ]
    as_rows = inspect_model(Pixel(), torch.randn(6, 16))
    assert said(as_rows, "rmsnorm", eps=1e-8, gain=False) == []
    (layer,) = inspect_model(Whole(), torch.randn(2, 5, 16)).layers
    assert (layer.finding.width, layer.finding.divisor) == (80, "std over dimensions 1 and 2")
    assert inspect_model(nn.Softmax(1), torch.randn(2, 5, 16)).layers == ()
    two = inspect_model(nn.LayerNorm((5, 16)), torch.randn(2, 5, 16))
    assert said(two, "layernorm") == [
        "the module itself normalises over dimensions 1 and 2 of 3; layernorm over the last dimension"
    ]


def test_a_group_for_each_channel_is_found_without_inputs() -> None:
    for inputs in (None, torch.randn(2, 8, 5)):
        (layer,) = inspect_model(nn.Sequential(nn.GroupNorm(8, 8)), inputs).layers
        assert layer.finding.divisor == "std over positions"


def test_dyt_without_gain_is_as_dyt_without_gain() -> None:
    found = inspect_model(nn.Sequential(nn.Linear(8, 8), build_norm("dyt", 8, gain=False), nn.Tanh()))
    assert [layer.path for layer in found.layers] == ["1"]
    assert said(found, "dyt", gain=False) == []
    assert said(found, "dyt") == ["1 has no gain; dyt has a gain for each entry"]


def test_an_exit_in_a_forward() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(0)

    with pytest.raises(ValueError, match="does not run on its inputs: SystemExit: 0"):
        inspect_model(Leaves(), torch.randn(2, 8))
    assert [layer.path for layer in inspect_model(Leaves()).layers] == ["norm"]


# ------------------------------------------------------------------------------------------- words


def test_names_are_drawn_together() -> None:
    assert collapse([]) == []
    assert collapse(["norm"]) == ["norm"]
    assert collapse([f"blocks.{i}.norm{j}" for i in range(12) for j in (1, 2)]) == [
        "blocks.0-11.norm1",
        "blocks.0-11.norm2",
    ]
    assert collapse(["a.0.n", "a.1.n", "a.3.n", "b"]) == ["a.0-1,3.n", "b"]
    assert collapse([f"s.{i}.{j}.n" for i in range(2) for j in range(3)]) == ["s.0-1.0-2.n"]
    assert collapse(["s.0.0.n", "s.0.1.n", "s.1.0.n"]) == ["s.0.0-1.n", "s.1.0.n"]
    assert collapse(["", "0", "1"]) == ["", "0-1"]


def test_phrases() -> None:
    assert plural("has eps 1e-05 inside") == "have eps 1e-05 inside"
    assert plural("carries a bias") == "carry a bias"
    assert plural("normalises; none does not") == "normalise; none does not"
    assert join(["a"]) == "a"
    assert join(["a", "b"], last="or") == "a or b"
    assert join(list("abcdef")) == "a, b, c and 3 more"


def test_a_model_that_mixes() -> None:
    model = nn.Sequential(
        *(nn.RMSNorm(16, eps=1e-6) for _ in range(3)), build_norm("dyt", 16), nn.Linear(16, 16)
    )
    texts = [str(one) for one in mixtures(inspect_model(model))]
    assert texts == [
        "3 is bounded, not scale-invariant; 3 other layers are scale-invariant",
        "3 carries a bias (bias); 3 other layers carry no bias",
    ]
    call = Call("x", "X", "F.layer_norm", "std", True, False, 1e-5, "inside", ("training",))
    inspection = inspect_model(nn.Sequential(nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16)))
    mixed = Inspection(inspection.class_name, inspection.num_modules, inspection.layers, (call,))
    assert [str(one) for one in mixtures(mixed)] == [
        "x normalises in forward by F.layer_norm, eps 1e-05 inside, in training only, subtracting a mean; "
        "every layer keeps it"
    ]


def test_norms_of_users_are_compared_too() -> None:
    info = norm_info("tests.norms.test_norms_inspecting:RMS")
    found = inspect_model(RMS(16))
    assert info.scope == "activation"
    assert said(found, "tests.norms.test_norms_inspecting:RMS") == []
    assert said(found, "rmsnorm") == []
