"""How the parameters of a user's norm are read from its class, and what is refused."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Optional

import pytest
import torch
from torch import nn

from rmsrepro.config.schema import TrainConfig
from rmsrepro.norms import NormSpec, build_norm, norm_info, register_norm
from rmsrepro.norms.given import check_norm_parameters

pytestmark = pytest.mark.usefixtures("forget_norms")


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Statistic(Enum):
    MEAN = "mean"
    LARGEST = "largest"


class Order(Enum):
    one = 1
    two = 2


def names(name: str) -> list[str]:
    return [item.name for item in dataclasses.fields(norm_info(name).params_class)]


def test_enums_are_given_by_value_or_name() -> None:
    @register_norm("chosen")
    class Chosen(Norm):
        def __init__(self, dim: int, *, kind: Statistic = Statistic.MEAN, order: Order = Order.two) -> None:
            super().__init__()
            self.given = (kind, order)

    for kind in ("largest", "LARGEST", Statistic.LARGEST):
        assert build_norm("chosen", 2, kind=kind).given == (Statistic.LARGEST, Order.two)
    for order in (1, "1", "one", Order.one):
        assert build_norm("chosen", 2, order=order).given == (Statistic.MEAN, Order.one)
    assert NormSpec("chosen", {"kind": "largest"}).resolved_params == {"kind": "largest", "order": 2}
    for wrong in (True, 1.0, 3):
        with pytest.raises(TypeError, match=r"chosen\.order must be one of 1, 2"):
            build_norm("chosen", 2, order=wrong)
    with pytest.raises(ValueError, match="must be one of mean, largest, got 'larges'; did you mean largest"):
        build_norm("chosen", 2, kind="larges")


def test_optional_parameters_take_none() -> None:
    @register_norm("capped")
    class Capped(Norm):
        def __init__(self, dim: int, cap: float | None = 1.0, window: Optional[int] = None) -> None:  # noqa: UP045
            super().__init__()
            self.given = (cap, window)

    assert build_norm("capped", 2).given == (1.0, None)
    assert build_norm("capped", 2, cap=None, window=3).given == (None, 3)
    assert NormSpec("capped", {"cap": None}).resolved_params == {"cap": None, "window": None}
    with pytest.raises(TypeError, match=r"capped\.window must be a whole number, got 1\.5"):
        build_norm("capped", 2, window=1.5)


def test_a_parameter_without_a_default_is_asked_for() -> None:
    @register_norm("needy")
    class Needy(Norm):
        def __init__(self, dim: int, strength: float, *, count: int) -> None:
            super().__init__()
            self.given = (strength, count)

    assert build_norm("needy", 2, strength=2, count=1).given == (2.0, 1)
    with pytest.raises(TypeError, match="needy needs strength, count, which have no default"):
        build_norm("needy", 2)


@pytest.mark.parametrize(
    ("default", "annotation", "message"),
    [
        ("1e-5", float, r"bad\.value must be a number, got '1e-5'"),
        (True, int, r"bad\.value must be a whole number, got True"),
        (1, bool, r"bad\.value must be true or false, got 1"),
        (2, str, r"bad\.value must be a string, got 2"),
        (None, float, r"bad\.value must be a number, got None"),
        ("hard", Statistic, r"bad\.value must be one of mean, largest, got 'hard'"),
        ((1, 2), tuple, "must be bool, int, float, str, an Enum"),
        (float("inf"), float, r"bad\.value must be finite"),
    ],
)
def test_a_default_of_a_wrong_type_shows_when_the_norm_is_registered(
    default: Any, annotation: Any, message: str
) -> None:
    class Bad(Norm):
        def __init__(self, dim: int, *, value: Any = default) -> None:
            super().__init__()

    Bad.__init__.__annotations__["value"] = annotation
    with pytest.raises((TypeError, ValueError), match=message):
        register_norm("bad")(Bad)


def test_parameters_without_names_are_refused() -> None:
    class Anything(Norm):
        def __init__(self, dim: int, *, eps: float = 1e-5, **kw: float) -> None:
            super().__init__()

    with pytest.raises(
        TypeError, match=r"__init__ takes \*\*kw, which does not say what parameters there are"
    ):
        register_norm("anything")(Anything)

    @dataclasses.dataclass(frozen=True)
    class Params:
        floor: float = 0.5

    register_norm("anything", params=Params)(Anything)
    assert names("anything") == ["floor"]


def test_an_enum_has_one_spelling_in_a_configuration() -> None:
    @register_norm("ordered")
    class Ordered(Norm):
        def __init__(self, dim: int, *, order: Order = Order.one, eps: float = 1e-5) -> None:
            super().__init__()

    for given, kept in (("two", 2), (2, 2), ("2", 2), ("three", "three")):
        config = TrainConfig(norm={"name": "ordered", "order": given, "eps": 1})
        check_norm_parameters([config])
        assert config.norm == {"name": "ordered", "order": kept, "eps": 1}


def test_what_says_nothing_of_its_type_is_refused() -> None:
    class Nothing(Norm):
        def __init__(self, dim, *, window=None):
            super().__init__()

    with pytest.raises(TypeError, match="'window' needs an annotation or a default other than None"):
        register_norm("bad")(Nothing)


@pytest.mark.parametrize("word", ["name", "dim", "backend", "norm", "flags"])
def test_words_that_mean_something_else(word: str) -> None:
    class Bad(Norm):
        pass

    text = f"def init(self, width, *, {word}: int = 1):\n    pass"
    space: dict[str, Any] = {}
    exec(text, space)
    Bad.__init__ = space["init"]
    with pytest.raises(TypeError, match=f"a parameter cannot be called '{word}' here; rename it"):
        register_norm("bad")(Bad)


def test_the_width_may_have_any_name_and_be_a_keyword() -> None:
    @register_norm("torch_like")
    class TorchLike(Norm):
        def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.given = (normalized_shape, eps)

    @register_norm("by_keyword")
    class ByKeyword(Norm):
        def __init__(self, *, normalized_shape: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.given = (normalized_shape, eps)

    assert names("torch_like") == names("by_keyword") == ["eps"]
    assert build_norm("torch_like", 3, eps=1).given == build_norm("by_keyword", 3, eps=1).given == (3, 1.0)

    class NoWidth(Norm):
        def __init__(self, *, eps: float = 1e-5) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="must take the size of the last dimension as its first parameter"):
        register_norm("bad")(NoWidth)


@pytest.mark.parametrize(
    ("name", "expected", "weights"),
    [
        ("torch.nn:RMSNorm", {"eps": None, "elementwise_affine": True}, {"weight"}),
        ("torch.nn:LayerNorm", {"eps": 1e-5, "elementwise_affine": True, "bias": True}, {"weight", "bias"}),
    ],
)
def test_layers_of_torch(name: str, expected: dict[str, Any], weights: set[str]) -> None:
    assert NormSpec(name).resolved_params == expected
    norm = build_norm(name, 4)
    assert {key for key, _ in norm.named_parameters()} == weights
    assert list(build_norm(name, 4, elementwise_affine=False, eps=0.5).parameters()) == []
    x = torch.tensor([[1.0, 2, 3, 6]])
    with pytest.raises(ValueError, match="eps must be 0 or more, got -1"):
        build_norm(name, 4, eps=-1)
    own = build_norm(name.rpartition(":")[2].lower(), 4, eps=0.5, backend="composite")
    assert torch.allclose(build_norm(name, 4, eps=0.5)(x), own(x))


def test_a_dataclass_of_parameters_is_checked_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Params:
        kind: Statistic = Statistic.MEAN
        cap: float | None = None
        power: float = 2.0

        def __post_init__(self) -> None:
            if self.power < 1:
                raise ValueError(f"power must be 1 or more, got {self.power:g}")

    @register_norm("by_dataclass", params=Params)
    class ByDataclass(Norm):
        def __init__(self, dim: int, *, kind: Statistic, cap: float | None, power: float) -> None:
            super().__init__()
            self.given = (dim, kind, cap, power)

    built = build_norm("by_dataclass", 4, kind="largest", power=3)
    assert built.given == (4, Statistic.LARGEST, None, 3.0)
    with pytest.raises(ValueError, match="power must be 1 or more"):
        build_norm("by_dataclass", 4, power=0)
    with pytest.raises(TypeError, match="must be a number, got 'x'"):
        build_norm("by_dataclass", 4, cap="x")
    with pytest.raises(TypeError, match="has no parameter 'pwer'; did you mean power"):
        build_norm("by_dataclass", 4, pwer=1)

    @dataclasses.dataclass(frozen=True)
    class Wrong:
        power: float = "2"  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"bad\.power must be a number, got '2'"):
        register_norm("bad", params=Wrong)(ByDataclass)
