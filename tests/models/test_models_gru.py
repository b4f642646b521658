"""The GRU layer: equal to torch.nn.GRU without norms, to its equations with them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Site
from rmsrepro.models.gru import GRULayer
from rmsrepro.norms import NormSpec, is_norm

INPUT, DIM, STEPS, BATCH = 5, 7, 6, 4
NONE = NormSpec("none")


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def with_weights_of(gru: nn.GRU, suffix: str = "l0", sites: tuple[Site, ...] = tuple(Site)) -> GRULayer:
    layer = GRULayer(gru.input_size, gru.hidden_size, NONE, sites).to(gru.weight_ih_l0.dtype)
    weights = {
        kind: getattr(gru, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    assert layer.gates_h_bias is not None
    assert layer.candidate_h_bias is not None
    with torch.no_grad():
        layer.input_projection.weight.copy_(weights["weight_ih"])
        layer.input_projection.bias.copy_(weights["bias_ih"])
        layer.recurrent_projection.weight.copy_(weights["weight_hh"])
        layer.gates_h_bias.copy_(weights["bias_hh"][: 2 * gru.hidden_size])
        layer.candidate_h_bias.copy_(weights["bias_hh"][2 * gru.hidden_size :])
    return layer


def gradients_like_torch(layer: GRULayer) -> dict[str, Tensor]:
    gradient = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {
        "weight_ih": gradient["input_projection.weight"],
        "bias_ih": gradient["input_projection.bias"],
        "weight_hh": gradient["recurrent_projection.weight"],
        "bias_hh": torch.cat((gradient["gates_h_bias"], gradient["candidate_h_bias"])),
    }


def weighted_sum(states: Tensor) -> Tensor:
    """A loss in which each state counts differently."""
    return (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)).sum()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("with_state", [False, True])
def test_without_norm_equals_torch_gru(dtype: torch.dtype, atol: float, with_state: bool) -> None:
    reference = nn.GRU(INPUT, DIM).to(dtype)
    randomise(reference)
    layer = with_weights_of(reference)
    torch.manual_seed(0)
    xs = [torch.randn(STEPS, BATCH, INPUT, dtype=dtype, requires_grad=True)]
    xs.append(xs[0].detach().clone().requires_grad_())
    hs = [torch.randn(BATCH, DIM, dtype=dtype, requires_grad=True) if with_state else None]
    hs.append(None if hs[0] is None else hs[0].detach().clone().requires_grad_())

    ours = layer(xs[0], hs[0])
    theirs, _ = reference(xs[1], None if hs[1] is None else hs[1].unsqueeze(0))
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    weighted_sum(ours).backward()
    weighted_sum(theirs).backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad, atol=atol, rtol=0)
    if hs[0] is not None and hs[1] is not None:
        torch.testing.assert_close(hs[0].grad, hs[1].grad, atol=atol, rtol=0)
    for kind, gradient in gradients_like_torch(layer).items():
        torch.testing.assert_close(gradient, getattr(reference, f"{kind}_l0").grad, atol=10 * atol, rtol=1e-6)


def test_no_sites_is_no_norm() -> None:
    bare = GRULayer(INPUT, DIM, NormSpec("layernorm", backend="composite"), ())
    none = GRULayer(INPUT, DIM, NONE, tuple(Site))
    bare.load_state_dict(none.state_dict())
    x = torch.randn(STEPS, BATCH, INPUT)
    torch.testing.assert_close(bare(x), none(x), atol=0, rtol=0)


def test_padding_equals_packed_sequences_in_both_directions() -> None:
    reference = nn.GRU(INPUT, DIM, bidirectional=True).double()
    randomise(reference)
    forward, backward = with_weights_of(reference), with_weights_of(reference, "l0_reverse")
    lengths = torch.tensor([6, 2, 5, 1])
    mask = torch.arange(STEPS).unsqueeze(1) < lengths
    ours = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()

    states = torch.cat((forward(ours, mask=mask), backward(ours, mask=mask, reverse=True)), -1)
    packed = nn.utils.rnn.pack_padded_sequence(theirs, lengths, enforce_sorted=False)
    packed_states, last = reference(packed)
    unpacked, _ = nn.utils.rnn.pad_packed_sequence(packed_states)

    visible = states * mask.unsqueeze(-1)
    torch.testing.assert_close(visible, unpacked, atol=1e-10, rtol=0)
    torch.testing.assert_close(states[-1, :, :DIM], last[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(states[0, :, DIM:], last[1], atol=1e-10, rtol=0)
    weighted_sum(visible).backward()
    weighted_sum(unpacked).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=0)
    assert (ours.grad * ~mask.unsqueeze(-1) == 0).all()
    for layer, suffix in ((forward, "l0"), (backward, "l0_reverse")):
        for kind, gradient in gradients_like_torch(layer).items():
            torch.testing.assert_close(
                gradient, getattr(reference, f"{kind}_{suffix}").grad, atol=1e-9, rtol=0
            )


@pytest.mark.parametrize("reverse", [False, True])
def test_padding_keeps_the_state_bit_for_bit(reverse: bool) -> None:
    layer = GRULayer(INPUT, DIM, NormSpec("rmsnorm", backend="composite"), tuple(Site))
    x = torch.randn(STEPS, 1, INPUT)
    start = torch.randn(1, DIM)
    mask = torch.tensor([True, True, True, False, False, False]).unsqueeze(1)
    states = layer(x, start, mask, reverse=reverse)
    kept = start if reverse else states[2]
    assert torch.equal(states[3:], kept.expand(3, 1, DIM))


def scan_by_equations(layer: GRULayer, x: Tensor, h: Tensor) -> Tensor:
    """The equations of the module, one product and one norm at a time, six separate matrices."""

    def norm(module: nn.Module | None, a: Tensor) -> Tensor:
        return a if module is None else module(a)

    d = layer.dim
    wr, wu, wn = layer.input_projection.weight.split(d)
    br, bu, bn = layer.input_projection.bias.split(d)
    ur, uu, un = layer.recurrent_projection.weight.split(d)
    gates_bias = 0.0 if layer.gates_h_bias is None else layer.gates_h_bias
    candidate_bias = 0.0 if layer.candidate_h_bias is None else layer.candidate_h_bias
    states = []
    for now in x:
        gates_x = norm(layer.norm_gates_x, torch.cat((now @ wr.T + br, now @ wu.T + bu), -1))
        gates_h = norm(layer.norm_gates_h, torch.cat((h @ ur.T, h @ uu.T), -1) + gates_bias)
        r, u = torch.sigmoid(gates_x + gates_h).split(d, -1)
        candidate_x = norm(layer.norm_candidate_x, now @ wn.T + bn)
        candidate_h = norm(layer.norm_candidate_h, h @ un.T + candidate_bias)
        n = torch.tanh(candidate_x + r * candidate_h)
        h = u * h + (1 - u) * n
        states.append(h)
    return torch.stack(states)


ALL_SITES = [sites for size in range(5) for sites in itertools.combinations(Site, size)]


@pytest.mark.parametrize("sites", ALL_SITES, ids=lambda sites: "+".join(site.value for site in sites) or "no")
@pytest.mark.parametrize("norm", ["layernorm", "prmsnorm"])
def test_every_choice_of_sites_follows_the_equations(norm: str, sites: tuple[Site, ...]) -> None:
    layer = GRULayer(INPUT, DIM, NormSpec(norm, {"p": 0.5} if norm == "prmsnorm" else {}), sites).double()
    randomise(layer)
    x, h = torch.randn(STEPS, BATCH, INPUT).double(), torch.randn(BATCH, DIM).double()
    torch.testing.assert_close(layer(x, h), scan_by_equations(layer, x, h), atol=1e-12, rtol=0)
    assert sum(is_norm(module) for module in layer.modules()) == len(sites)
    # A normalised side has no bias but its norm's; the other keeps torch's.
    assert (layer.gates_h_bias is None) == (Site.gates_h in sites)
    assert (layer.candidate_h_bias is None) == (Site.cand_h in sites)


def test_gradients_of_the_normalised_loop() -> None:
    layer = GRULayer(3, 4, NormSpec("layernorm", backend="composite"), tuple(Site)).double()
    randomise(layer)
    x, h = torch.randn(3, 2, 3).double().requires_grad_(), torch.randn(2, 4).double().requires_grad_()
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    assert torch.autograd.gradcheck(lambda *inputs: layer(*inputs, mask, reverse=True), (x, h))


def test_no_steps() -> None:
    layer = GRULayer(INPUT, DIM, NormSpec("rmsnorm"), tuple(Site))
    assert layer(torch.zeros(0, BATCH, INPUT), reverse=True).shape == (0, BATCH, DIM)


@pytest.mark.parametrize("norm", ["none", "layernorm", "rmsnorm", "prmsnorm"])
def test_state_dtype_is_constant_under_autocast(norm: str) -> None:
    layer = GRULayer(INPUT, DIM, NormSpec(norm, backend="composite"), tuple(Site))
    seen: list[Any] = []
    step = layer.prepare(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gates, candidate = layer.project(torch.randn(STEPS, BATCH, INPUT))
        h = torch.zeros(BATCH, DIM, dtype=torch.bfloat16)
        for now in range(STEPS):
            h = step(gates[now], candidate[now], h, None)
            seen.append(h.dtype)
        states = layer(torch.randn(STEPS, BATCH, INPUT), torch.zeros(BATCH, DIM))
    assert set(seen) == {torch.bfloat16}
    assert states.dtype == torch.bfloat16
    assert states.isfinite().all()


def test_builtin_arm_is_our_loop_with_torchs_kernel(models: Any) -> None:
    ours = models.build("gru", "lm", "none", num_layers=2, perturb=False)
    builtin = models.build("gru", "lm", "none", num_layers=2, perturb=False, builtin=True)
    assert [type(layer).__bases__[0] for layer in builtin.layers] == [nn.GRU, nn.GRU]
    tokens = models.tokens(3, 7)
    torch.testing.assert_close(builtin(tokens), ours(tokens), atol=1e-6, rtol=0)
    logits, state = builtin.step(tokens[:, 0], None)
    torch.testing.assert_close(logits, ours(tokens)[:, 0], atol=1e-6, rtol=0)
    logits, _ = builtin.step(tokens[:, 1], state)
    torch.testing.assert_close(logits, ours(tokens)[:, 1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("task", "norm"), [("lm", "rmsnorm"), ("translation", "none")])
def test_builtin_has_no_norm_and_no_attention(models: Any, task: str, norm: str) -> None:
    with pytest.raises(
        UserError, match=rf"model\.builtin.*task=lm \(here {task}\).*norm=none \(here {norm}\)"
    ):
        models.build("gru", task, norm, builtin=True)


def test_builtin_under_autocast(models: Any) -> None:
    model = models.build("gru", "lm", "none", builtin=True, perturb=False)
    tokens = models.tokens(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    torch.testing.assert_close(logits.float(), model(tokens), atol=0.1, rtol=0)
