"""A gain is never read under another convention than it was stored under."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import build_norm, register_norm
from rmsrepro.norms.layers import RMSNorm

pytestmark = pytest.mark.usefixtures("forget_norms")


class PlainOffset(nn.Module):
    """A user's module of its own, whose gain is 1 + weight: nothing but its code says so."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight.float())).to(x.dtype)


def saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Tensor] = torch.load(buffer)
    return loaded


def rows() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_gemma_starts_as_rmsnorm_and_keeps_the_precision_of_its_offset() -> None:
    gemma = build_norm("gemma_rmsnorm", 8, backend="composite", eps=1e-5)
    assert torch.equal(gemma(rows()), build_norm("rmsnorm", 8, backend="composite")(rows()))
    gemma.bfloat16()
    nn.init.constant_(gemma.weight, 15.8125)
    # 1 + 15.8125 in bf16 would be 16.75.
    assert torch.equal(gemma.effective_gain(), torch.full((8,), 16.8125))
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    assert torch.equal(gemma(ones), torch.full((1, 8), 16.8125).bfloat16())
    assert build_norm("gemma_rmsnorm", 8).double().effective_gain().dtype == torch.float64


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", ["rmsnorm", "prmsnorm", "l2norm", "llama_rmsnorm", "layernorm_nobias"])
def test_plain_gains_and_offsets_are_not_exchanged(other: str, strict: bool) -> None:
    gemma, plain = build_norm("gemma_rmsnorm", 8), build_norm(other, 8)
    nn.init.constant_(plain.weight, 1.5)
    with pytest.raises(RuntimeError, match=r"weight: this gemma_rmsnorm stores gains as their offset from 1"):
        gemma.load_state_dict(saved(plain.state_dict()), strict=strict)
    assert torch.equal(gemma.weight, torch.zeros(8))
    with pytest.raises(RuntimeError, match=rf"weight: this {other} stores the gains themselves, the state"):
        plain.load_state_dict(saved(gemma.state_dict()), strict=strict)
    assert torch.equal(plain.weight, torch.full((8,), 1.5))
    # As the message says.
    gemma.load_state_dict({"weight": plain.weight.detach() - 1, "gain_offset": torch.tensor(1.0)})
    assert torch.equal(gemma.effective_gain(), torch.full((8,), 1.5))


def test_inside_a_model_the_message_names_the_place() -> None:
    model = nn.Sequential(nn.Linear(8, 8), build_norm("gemma_rmsnorm", 8))
    other = nn.Sequential(nn.Linear(8, 8), build_norm("rmsnorm", 8))
    with pytest.raises(RuntimeError, match=r"1\.weight: this gemma_rmsnorm"):
        model.load_state_dict(other.state_dict())
    model.load_state_dict(saved(model.state_dict()))


def test_a_plain_gain_goes_to_every_norm_that_stores_plain_gains() -> None:
    plain = build_norm("rmsnorm", 8)
    nn.init.constant_(plain.weight, 1.5)
    for other in ("prmsnorm", "l2norm", "crmsnorm", "llama_rmsnorm", "t5_rmsnorm", "layernorm_nobias"):
        norm = build_norm(other, 8)
        norm.load_state_dict(saved(plain.state_dict()))
        assert torch.equal(norm.weight, torch.full((8,), 1.5))


def test_a_users_own_module_exchanges_gains_with_its_own_kind_only() -> None:
    register_norm("plain_offset")(PlainOffset)
    register_norm("subclass")(type("Subclass", (RMSNorm,), {"__init__": _init_of_subclass}))
    users, plain = build_norm("plain_offset", 8), build_norm("rmsnorm", 8)
    assert torch.allclose(users(rows()), plain(rows()), rtol=1e-6)
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match="state dict is of the norm rmsnorm, this norm is plain_offset"
        ):
            users.load_state_dict(saved(plain.state_dict()), strict=strict)
        with pytest.raises(
            RuntimeError, match="state dict is of the norm plain_offset, this norm is rmsnorm"
        ):
            plain.load_state_dict(saved(users.state_dict()), strict=strict)
    assert torch.equal(users.weight, torch.zeros(8))
    assert torch.equal(plain.weight, torch.ones(8))
    # Its own kind, from a file and through copies and pickles.
    nn.init.constant_(users.weight, 0.25)
    for again in (build_norm("plain_offset", 8), copy.deepcopy(users), pickle.loads(pickle.dumps(users))):
        again.load_state_dict(saved(users.state_dict()))
        assert torch.equal(again.weight, torch.full((8,), 0.25))
    # A plain dict, and a state dict that was written without the marks, are taken as they are.
    users.load_state_dict(dict(plain.state_dict()))
    users.load_state_dict(OrderedDict(weight=torch.ones(8)))
    unmarked = PlainOffset(8).state_dict()
    users.load_state_dict(unmarked)
    # A subclass of one of the package's layers says by `gain_offset` what it stores.
    build_norm("subclass", 8).load_state_dict(plain.state_dict())


def _init_of_subclass(self: RMSNorm, dim: int) -> None:
    RMSNorm.__init__(self, dim)


def test_an_effective_gain_of_ones_own_is_a_kind_of_its_own() -> None:
    @register_norm("squared_gain")
    class SquaredGain(RMSNorm):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)

        def effective_gain(self) -> Tensor:
            assert self.weight is not None
            return self.weight**2

    norm = build_norm("squared_gain", 8)
    nn.init.constant_(norm.weight, 3.0)
    plain = build_norm("rmsnorm", 8, backend="composite")
    assert torch.equal(norm(rows()), plain(rows()) * 9)
    with pytest.raises(RuntimeError, match="this norm is squared_gain"):
        norm.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("offset", [1, 1.0, torch.tensor(1.0), torch.ones(1)])
def test_the_offset_may_be_any_one_number(offset: object) -> None:
    gemma = build_norm("gemma_rmsnorm", 8)
    gemma.load_state_dict({"weight": torch.full((8,), 0.5), "gain_offset": offset})
    assert torch.equal(gemma.effective_gain(), torch.full((8,), 1.5))


def test_an_offset_that_is_no_number_is_refused() -> None:
    gemma = build_norm("gemma_rmsnorm", 8)
    with pytest.raises(RuntimeError, match="gain_offset: the offset of the gains is one number"):
        gemma.load_state_dict({"weight": torch.full((8,), 0.5), "gain_offset": torch.ones(8)})
    assert torch.equal(gemma.weight, torch.zeros(8))


def test_a_functional_call_takes_the_state_dict() -> None:
    gemma = build_norm("gemma_rmsnorm", 8)
    state = gemma.state_dict() | {"weight": torch.full((8,), 0.5)}
    y = torch.func.functional_call(gemma, state, (rows(),))
    assert torch.equal(y, gemma(rows()) * 1.5)
    assert torch.equal(copy.deepcopy(gemma)(rows()), pickle.loads(pickle.dumps(gemma))(rows()))
    assert build_norm("gemma_rmsnorm", 8, gain=False).state_dict() == {}


def test_an_offset_set_too_late_is_refused() -> None:
    class Late(RMSNorm):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.gain_offset = 1.0  # type: ignore[misc]

    with pytest.raises(AttributeError, match=r"write gain_offset = 1.0 in the body of Late"):
        Late(8)
