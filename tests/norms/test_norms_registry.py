"""Names, norms of the user's own, and the mark by which norms are known."""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import (
    NormSpec,
    build_norm,
    is_norm,
    list_norms,
    norm_info,
    norm_parameter_names,
    register_norm,
    resolve_params,
    unregister_norm,
)
from rmsrepro.norms import registry as registry_module
from rmsrepro.norms.layers import RMSNorm
from rmsrepro.norms.params import BUILTIN_PARAMS, RMSNormParams

pytestmark = pytest.mark.usefixtures("forget_norms")

BUILTIN = list(BUILTIN_PARAMS)
ON_ACTIVATIONS = [name for name in BUILTIN if name != "weightnorm"]


class Mode(Enum):
    soft = "soft"
    hard = "hard"


class UserNorm(nn.Module):
    """Scale by the mean magnitude.

    More text.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-6,
        mode: Mode = Mode.soft,
        power: int = 1,
        cap: float | None = None,
        flag=True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.inner = nn.Linear(dim, dim)
        self.given = (eps, mode, power, cap, flag)

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.given[0]) * self.weight


class OffsetGainNorm(RMSNorm):
    """RMSNorm whose gain is stored as an offset from one."""

    gain_offset = 1.0

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, RMSNormParams(eps=eps))


def test_names() -> None:
    assert list_norms() == BUILTIN
    register_norm("zz_user")(UserNorm)
    register_norm("aa_user")(UserNorm)
    assert list_norms() == [*BUILTIN, "aa_user", "zz_user"]


def test_information_about_a_builtin() -> None:
    info = norm_info("prmsnorm")
    assert (info.name, info.scope, info.factory) == ("prmsnorm", "activation", None)
    assert "Zhang & Sennrich 2019" in info.source
    assert info.params_class().p == 0.0625


def test_parameters_come_from_the_signature() -> None:
    register_norm("mine")(UserNorm)
    params = resolve_params("mine", mode="hard", power=2)
    assert (params.eps, params.mode, params.power, params.cap, params.flag) == (
        1e-6,
        Mode.hard,
        2,
        None,
        True,
    )
    norm = build_norm("mine", 4, eps=1, mode="hard", cap=3)
    assert norm.given == (1.0, Mode.hard, 1, 3.0, True)
    assert NormSpec("mine", {"mode": "hard"}).resolved_params["mode"] == "hard"
    assert NormSpec("mine").flags(4) == []
    assert norm_info("mine").summary == "Scale by the mean magnitude."
    with pytest.raises(TypeError, match="mine has no parameter 'mod'; did you mean mode"):
        build_norm("mine", 4, mod="hard")
    with pytest.raises(ValueError, match=r"mine\.eps must be 0 or more"):
        build_norm("mine", 4, eps=-1.0)
    with pytest.raises(TypeError, match="true or false"):
        build_norm("mine", 4, flag=0)
    with pytest.raises(ValueError, match="dim must be positive"):
        build_norm("mine", 0)


def test_parameters_as_a_dataclass_of_the_users_own() -> None:
    @dataclass(frozen=True)
    class Params:
        eps: float = 1e-3

    @register_norm("own", params=Params, summary="a summary", source="a paper")
    class Own(nn.Module):
        def __init__(self, dim: int, **kwargs: float) -> None:
            super().__init__()
            self.kwargs = kwargs

    assert build_norm("own", 3, eps=2).kwargs == {"eps": 2.0}
    assert (norm_info("own").summary, norm_info("own").source) == ("a summary", "a paper")


@pytest.mark.parametrize("name", ["rmsnorm", "taken"])
def test_a_name_is_given_once(name: str) -> None:
    register_norm("taken")(UserNorm)
    register_norm("taken")(UserNorm)  # the same class again is no conflict
    with pytest.raises(ValueError, match=f"the norm '{name}' is registered already"):
        register_norm(name)(OffsetGainNorm)
    assert norm_info("rmsnorm").factory is None


def test_a_norm_can_be_defined_anew_after_unregistering() -> None:
    register_norm("again")(UserNorm)
    unregister_norm("again")
    register_norm("again")(OffsetGainNorm)
    assert isinstance(build_norm("again", 3), OffsetGainNorm)
    with pytest.raises(ValueError, match="was not registered"):
        unregister_norm("never")


@pytest.mark.parametrize("name", ["Upper", "a-b", "a:b", "", "a/b", "1a"])
def test_malformed_names(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters"):
        register_norm(name)


def test_what_is_no_norm_is_refused() -> None:
    with pytest.raises(TypeError, match=r"derived from torch\.nn\.Module"):
        register_norm("bad")(dict)
    with pytest.raises(ValueError, match="scope must be one of activation"):
        register_norm("bad", scope="activations")

    class NoDim(nn.Module):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="must take the size of the last dimension"):
        register_norm("bad")(NoDim)

    class Untyped(nn.Module):
        def __init__(self, dim, *, width):
            super().__init__()

    with pytest.raises(TypeError, match="'width' needs an annotation or a default"):
        register_norm("bad")(Untyped)

    class Odd(nn.Module):
        def __init__(self, dim: int, *, sizes: tuple[int, ...] = ()) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="must be bool, int, float, str, an Enum"):
        register_norm("bad")(Odd)
    assert "bad" not in list_norms()


# ---------------------------------------------------------------------------- import strings, plug-ins

MODULE = """
import torch
from rmsrepro.norms import register_norm

class Doubled(torch.nn.Module):
    def __init__(self, dim, *, eps: float = 1e-5):
        super().__init__()
    def forward(self, x):
        return 2 * x

@register_norm("from_{name}")
class Named(Doubled):
    pass
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "user_norms_for_test"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    for known in [key for key in registry_module._import_strings if key.startswith(name)]:
        del registry_module._import_strings[known]


def test_import_string(user_module: str) -> None:
    spec = NormSpec(f"{user_module}:Doubled", {"eps": 0})
    assert torch.equal(spec.build(2)(torch.ones(2)), torch.full((2,), 2.0))
    assert spec.backend_used == "composite"
    assert is_norm(spec.build(2))
    # The class is registered by its module too, under a name of its own: one norm, not two.
    assert norm_info(f"{user_module}:Named") is norm_info(f"from_{user_module}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_module_here:Norm", "there is no module 'no_such_module_here'"),
        ("user_norms_for_test:Doublet", "has no 'Doublet'; did you mean Doubled"),
        ("user_norms_for_test:", "form package.module:Class"),
        (":Doubled", "form package.module:Class"),
        ("a b:c", "form package.module:Class"),
    ],
)
def test_wrong_import_strings(user_module: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_norm(text, 3)


def test_import_string_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"derived from torch\.nn\.Module"):
        build_norm("math:sqrt", 3)


def _offer(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    offered = [importlib.metadata.EntryPoint(n, v, registry_module.ENTRY_POINT_GROUP) for n, v in points]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: offered)
    registry_module._entry_points.cache_clear()


@pytest.fixture
def fresh_entry_points() -> Iterator[None]:
    yield
    registry_module._entry_points.cache_clear()


@pytest.mark.usefixtures("fresh_entry_points")
def test_entry_points(user_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _offer(patch, ("plugged", f"{user_module}:Doubled"), (f"from_{user_module}", f"{user_module}:Named"))
        assert list_norms()[len(BUILTIN) :] == [f"from_{user_module}", "plugged"]
        assert user_module not in sys.modules, "listing must not import plug-ins"
        assert torch.equal(build_norm("plugged", 2)(torch.ones(2)), torch.full((2,), 2.0))
        assert build_norm(f"from_{user_module}", 2) is not None
    registry_module._entry_points.cache_clear()


@pytest.mark.usefixtures("fresh_entry_points")
def test_entry_points_that_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    for points in ((("twice", "a:A"), ("twice", "b:B")), (("rmsnorm", "a:A"),)):
        with monkeypatch.context() as patch:
            _offer(patch, *points)
            with pytest.raises(ValueError, match="is offered twice"):
                list_norms()
        registry_module._entry_points.cache_clear()


# -------------------------------------------------------------------------------------- offset gains


def test_an_offset_gain_by_a_user() -> None:
    register_norm("offset_rmsnorm")(OffsetGainNorm)
    offset, plain = build_norm("offset_rmsnorm", 8), build_norm("rmsnorm", 8, backend="composite")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(offset(x), plain(x))

    half = copy.deepcopy(offset).bfloat16()
    assert isinstance(half, OffsetGainNorm)
    assert half.weight is not None
    nn.init.constant_(half.weight, 15.8125)
    # The sum in bf16 would be 16.75.
    assert torch.equal(half.effective_gain(), torch.full((8,), 16.8125))
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    assert torch.equal(half(ones), torch.full((1, 8), 16.8125).bfloat16())

    expected = plain(x)
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"this offset_rmsnorm stores gains as their offset from 1, the"
        ):
            offset.load_state_dict(plain.state_dict(), strict=strict)
        with pytest.raises(RuntimeError, match=r"this rmsnorm stores the gains themselves, the state dict"):
            plain.load_state_dict(offset.state_dict(), strict=strict)
    assert torch.equal(offset(x), expected)
    assert torch.equal(plain(x), expected)
    converted = {"weight": plain.state_dict()["weight"] - 1, "gain_offset": torch.ones(())}
    offset.load_state_dict(converted)
    assert torch.equal(offset(x), expected)


# -------------------------------------------------------------------------------------------- roles


class Model(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = build_norm(norm, 4)
        self.block = nn.ModuleDict({"linear": nn.Linear(4, 4), "inner": build_norm(norm, 4)})
        self.not_ours = nn.LayerNorm(4)


@pytest.mark.parametrize("norm", [*ON_ACTIVATIONS, "mine", "offset_rmsnorm"])
def test_norm_parameters_are_known_by_role(norm: str) -> None:
    register_norm("mine")(UserNorm)
    register_norm("offset_rmsnorm")(OffsetGainNorm)
    own = {
        "none": [],
        "layernorm": ["weight", "bias"],
        "batchnorm": ["weight", "bias"],
        "dyt": ["weight", "bias", "alpha"],
        "mine": ["weight", "inner.weight", "inner.bias"],
    }.get(norm, ["weight"])
    expected = {f"{place}.{name}" for place in ("norm", "block.inner") for name in own}
    model = Model(norm)
    for variant in (model, copy.deepcopy(model), torch.compile(model, backend="eager")):
        prefix = "_orig_mod." if variant is not model and hasattr(variant, "_orig_mod") else ""
        assert norm_parameter_names(variant) == {prefix + name for name in expected}
    assert is_norm(model.norm)
    assert not is_norm(model.not_ours)
    assert not is_norm(model)
    decayed = {name for name, _ in model.named_parameters()} - norm_parameter_names(model)
    assert decayed == {
        "embedding.weight",
        "block.linear.weight",
        "block.linear.bias",
        "not_ours.weight",
        "not_ours.bias",
    }


def test_a_shared_norm_is_found_under_each_name() -> None:
    model = nn.ModuleDict({"a": build_norm("rmsnorm", 3)})
    model["b"] = model["a"]
    assert norm_parameter_names(model) == {"a.weight", "b.weight"}
