from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from enum import Enum

import numpy as np
import pytest

from rmsrepro.norms import NormSpec, build_norm, norm_info, resolve_params
from rmsrepro.norms.checks import coerce
from rmsrepro.norms.making import make_params, plain
from rmsrepro.norms.params import BUILTIN_PARAMS, KRule, count_entries


def test_parameters_and_defaults() -> None:
    llama = {
        "eps": 1e-6,
        "eps_position": "inside",
        "gain": True,
        "bias": False,
        "casting": "before_gain",
    }
    assert {name: plain(params()) for name, params in BUILTIN_PARAMS.items()} == {
        "none": {},
        "layernorm": {"eps": 1e-5, "eps_position": "inside", "gain": True, "bias": True},
        "layernorm_nobias": {"eps": 1e-5, "eps_position": "inside", "gain": True},
        "rmsnorm": {
            "eps": 1e-5,
            "eps_position": "inside",
            "gain": True,
            "bias": False,
            "casting": "after_gain",
            "variant": "paper",
        },
        "prmsnorm": {
            "eps": 1e-5,
            "eps_position": "inside",
            "gain": True,
            "bias": False,
            "p": 0.0625,
            "k_rule": "ceil",
            "casting": "after_gain",
            "variant": "paper",
        },
        "l2norm": {"eps": 1e-5, "eps_position": "inside", "gain": True, "bias": False},
        "batchnorm": {"eps": 1e-5, "eps_position": "inside", "gain": True, "bias": True, "momentum": 0.1},
        "weightnorm": {"eps": 1e-5, "eps_position": "inside"},
        "scalenorm": {"eps": 1e-5, "eps_position": "inside"},
        "crmsnorm": {"eps": 1e-5, "eps_position": "inside", "gain": True, "bias": False},
        "dyt": {"alpha": 0.5, "gain": True, "bias": True},
        "llama_rmsnorm": llama,
        "mistral_rmsnorm": llama | {"eps": 1e-5},
        "qwen_rmsnorm": llama,
        "t5_rmsnorm": {key: value for key, value in llama.items() if key != "bias"},
        "gemma_rmsnorm": {"eps": 1e-6, "eps_position": "inside", "gain": True, "casting": "after_gain"},
    }


@pytest.mark.parametrize(
    ("variant", "eps", "position", "k_rule"),
    [
        ("paper", 1e-5, "inside", "ceil"),
        ("authors_torch", 1e-8, "outside", "floor"),
        ("authors_tf", 1e-8, "inside", "floor"),
    ],
)
def test_variant_presets(variant: str, eps: float, position: str, k_rule: str) -> None:
    partial = plain(resolve_params("prmsnorm", variant=variant))
    assert (partial["eps"], partial["eps_position"], partial["k_rule"]) == (eps, position, k_rule)
    full = plain(resolve_params("rmsnorm", variant=variant))
    assert (full["eps"], full["eps_position"]) == (eps, position)
    assert "k_rule" not in full


def test_explicit_values_win_over_the_preset() -> None:
    # 1e-5 is also the default: given explicitly it must still win over the preset's 1e-8.
    given = plain(resolve_params("prmsnorm", variant="authors_torch", eps=1e-5, k_rule="ceil"))
    assert (given["eps"], given["eps_position"], given["k_rule"]) == (1e-5, "outside", "ceil")


@pytest.mark.parametrize(
    ("dim", "p", "ceil", "floor"),
    [
        (100, 0.0625, 7, 6),
        (100, 0.07, 7, 7),
        (100, 0.29, 29, 29),
        (300, 0.07, 21, 21),
        (512, 0.0625, 32, 32),
        (8, 0.0625, 1, 1),
        (4, 0.01, 1, 1),
        (7, 1.0, 7, 7),
    ],
)
def test_number_of_entries_on_the_exact_product(dim: int, p: float, ceil: int, floor: int) -> None:
    assert count_entries(p, dim, KRule.ceil) == ceil
    assert count_entries(p, dim, KRule.floor) == floor


@pytest.mark.parametrize(
    ("norm", "given", "error", "message"),
    [
        ("rmsnorm", {"ep": 1e-6}, TypeError, "rmsnorm has no parameter 'ep'; did you mean eps?"),
        ("rmsnorm", {"ep": 1e-6}, TypeError, "its parameters are eps, eps_position, gain, bias, casting"),
        ("rmsnorm", {"p": 0.5}, TypeError, "(prmsnorm has it)"),
        ("none", {"eps": 1e-6}, TypeError, "none has no parameter 'eps'"),
        ("layernorm_nobias", {"bias": True}, TypeError, "has no parameter 'bias'"),
        ("rmsnorm", {"eps": -1e-6}, ValueError, "rmsnorm.eps must be 0 or more"),
        ("rmsnorm", {"eps": math.nan}, ValueError, "must be finite"),
        ("rmsnorm", {"eps": math.inf}, ValueError, "must be finite"),
        ("rmsnorm", {"eps": True}, TypeError, "rmsnorm.eps must be a number, got True"),
        ("rmsnorm", {"eps": None}, TypeError, "must be a number, got None"),
        ("rmsnorm", {"eps": "1e-5"}, TypeError, "write it without quotes"),
        ("rmsnorm", {"gain": 1}, TypeError, "rmsnorm.gain must be true or false, got 1"),
        ("rmsnorm", {"eps_position": "insid"}, ValueError, "did you mean inside?"),
        ("rmsnorm", {"eps_position": 1}, TypeError, "must be one of inside, outside"),
        ("rmsnorm", {"variant": "author_tf"}, ValueError, "did you mean authors_tf"),
        ("prmsnorm", {"p": 6.25}, ValueError, "fraction in (0, 1], got 6.25; did you mean 0.0625?"),
        ("prmsnorm", {"p": 0}, ValueError, "fraction in (0, 1], got 0"),
        ("prmsnorm", {"p": -0.1}, ValueError, "fraction in (0, 1], got -0.1"),
        ("prmsnorm", {"p": 1.5}, ValueError, "did you mean 0.015?"),
        ("batchnorm", {"momentum": 0}, ValueError, "batchnorm.momentum is the weight of the newest batch"),
        ("batchnorm", {"momentum": 1.5}, ValueError, "in (0, 1], got 1.5"),
        ("dyt", {"alpha": 0}, ValueError, "dyt.alpha must be above 0, got 0"),
        ("dyt", {"eps": 1e-6}, TypeError, "dyt has no parameter 'eps'"),
        ("scalenorm", {"gain": False}, TypeError, "scalenorm has no parameter 'gain'"),
        ("llama_rmsnorm", {"casting": "before"}, ValueError, "did you mean before_gain"),
        ("prmsnorm", {"k_rule": "round"}, ValueError, "one of ceil, floor"),
    ],
)
def test_wrong_parameters_are_named(
    norm: str, given: dict[str, object], error: type[Exception], message: str
) -> None:
    for attempt in (lambda: resolve_params(norm, **given), lambda: build_norm(norm, 8, **given)):
        with pytest.raises(error) as caught:
            attempt()
        assert message in str(caught.value)


def test_accepted_spellings() -> None:
    params = resolve_params("prmsnorm", eps=0, p=1, eps_position="outside", k_rule=KRule.floor)
    assert plain(params) | {"eps": 0.0, "p": 1.0} == plain(params)
    assert isinstance(params.eps, float)
    assert isinstance(params.p, float)
    assert resolve_params("rmsnorm", eps=np.float32(0.5)).eps == 0.5


def test_an_instance_made_directly_is_checked_too() -> None:
    params = norm_info("prmsnorm").params_class
    with pytest.raises(ValueError, match=r"prmsnorm\.p is a fraction"):
        params(p=2.0)
    assert params(k_rule="floor").k_rule is KRule.floor
    with pytest.raises(dataclasses.FrozenInstanceError):
        params().eps = 1.0


def test_unknown_norm_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"there is no norm 'rmsnrom'; did you mean rmsnorm"):
        build_norm("rmsnrom", 8)


def test_a_small_k_is_flagged() -> None:
    assert NormSpec("prmsnorm").flags(64) == [
        "prmsnorm: k=4 of 64 entries; below 16 the estimate is heavy-tailed"
    ]
    assert NormSpec("prmsnorm", {"p": 0.25}).flags(64) == []
    # All entries, however few, are no estimate.
    assert NormSpec("prmsnorm", {"p": 1.0}).flags(8) == []
    assert NormSpec("rmsnorm").flags(8) == []


def test_spec_gives_plain_values() -> None:
    spec = NormSpec("rmsnorm", {"variant": "authors_torch"})
    assert spec.resolved_params == {
        "eps": 1e-8,
        "eps_position": "outside",
        "gain": True,
        "bias": False,
        "casting": "after_gain",
        "variant": "authors_torch",
    }
    assert not spec.is_none
    assert NormSpec("none").is_none


class Colour(Enum):
    red = "red"


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (3, int, 3),
        (None, int | None, None),
        (2, float | None, 2.0),
        ("red", Colour, Colour.red),
        ("a", str, "a"),
    ],
)
def test_conversions(value: object, kind: object, result: object) -> None:
    assert coerce("x", value, kind) == result


@pytest.mark.parametrize(
    ("value", "kind"), [(3.0, int), (True, int), ("3", int), (3, str), (None, int), ([], list)]
)
def test_refused_conversions(value: object, kind: object) -> None:
    with pytest.raises(TypeError, match="x "):
        coerce("x", value, kind)


def test_a_parameter_without_default_must_be_given() -> None:
    params = dataclasses.make_dataclass("P", [("width", int)])
    with pytest.raises(TypeError, match="mine needs width, which has no default"):
        make_params(params, "mine", {})
    assert make_params(params, "mine", {"width": 3}).width == 3


def test_names_and_parameters_are_read_without_torch() -> None:
    code = (
        "import sys; import rmsrepro.norms as n; from rmsrepro.norms import params;"
        "n.list_norms(); n.resolve_params('prmsnorm', p=.5);"
        "n.NormSpec('rmsnorm').backend_used; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
