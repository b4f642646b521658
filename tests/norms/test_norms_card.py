"""The card of every norm: the paper's table and gradients by measurement, cost, eps, references."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.norms import list_norms, register_norm
from rmsrepro.norms.card import Subject, make_card
from rmsrepro.norms.card.card import CHECKS, card_path
from rmsrepro.norms.card.counting import Counter, count, exponent
from rmsrepro.norms.card.epsilon import measure_eps
from rmsrepro.norms.card.gradients import STATEMENTS, measure_gradients
from rmsrepro.norms.card.invariance import INVARIANCES, PAPER, choose_setting, judge, measure
from rmsrepro.norms.card.lifting import Lifted

pytestmark = pytest.mark.usefixtures("forget_norms")

# Zhang & Sennrich 2019, table 1, copied by hand: W matrix rescaling and recentring, W vector rescaling,
# data set rescaling and recentring, single case rescaling.
PRINTED = """
batchnorm   yes no  yes yes yes no
weightnorm  yes no  yes no  no  no
layernorm   yes yes no  yes no  yes
rmsnorm     yes no  no  yes no  yes
prmsnorm    yes no  no  yes no  yes
"""
TABLE = {name: [word == "yes" for word in row] for name, *row in map(str.split, PRINTED.strip().splitlines())}
LIKE_RMSNORM = (
    "l2norm", "scalenorm", "crmsnorm", "llama_rmsnorm", "mistral_rmsnorm", "qwen_rmsnorm", "t5_rmsnorm",
    "gemma_rmsnorm",
)  # fmt: skip
EXPECTED = TABLE | {
    "layernorm_nobias": TABLE["layernorm"],
    "none": [False] * 6,
    "dyt": [False] * 6,
    **dict.fromkeys(LIKE_RMSNORM, TABLE["rmsnorm"]),
}


def row_of(subject: Subject) -> list[bool]:
    setting = choose_setting(subject)
    held = judge(setting, measure(setting))
    assert tuple(held) == INVARIANCES
    return list(held.values())


# ---------------------------------------------------------------------------------- table 1, gradients


def test_the_card_knows_the_printed_table() -> None:
    assert INVARIANCES == (
        "weight_matrix_rescaling", "weight_matrix_recentering", "weight_vector_rescaling",
        "dataset_rescaling", "dataset_recentering", "single_case_rescaling",
    )  # fmt: skip
    assert {name: list(row) for name, row in PAPER.items()} == TABLE


@pytest.mark.parametrize("dim", [3, 64])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_measured_rows(name: str, dim: int) -> None:
    assert row_of(Subject(name, dim=dim)) == EXPECTED[name]


def test_no_norm_is_left_out() -> None:
    assert set(EXPECTED) == {name for name in list_norms() if ":" not in name}


@pytest.mark.parametrize("name", ["layernorm", "layernorm_nobias", "rmsnorm"])
def test_torch_kernels_whose_eps_cannot_be_zero(name: str) -> None:
    subject = Subject(name, backend="torch")
    assert choose_setting(subject).method == "its eps cannot be 0"
    assert row_of(subject) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("rmsnorm", {"eps_position": "outside"}),
        ("rmsnorm", {"variant": "authors_torch", "gain": False}),
        ("layernorm", {"gain": False, "bias": False}),
        ("prmsnorm", {"p": 1.0, "bias": True}),
        ("prmsnorm", {"p": 0.5}),
        ("batchnorm", {"eps_position": "outside"}),
        ("weightnorm", {"eps": 1e-8}),
    ],
)
def test_parameters_do_not_change_the_row(name: str, params: dict[str, Any]) -> None:
    assert row_of(Subject(name, params)) == EXPECTED[name]


def test_gradient_statements_of_the_paper() -> None:
    """For y = g a / RMS(a) + b all seven hold, to rounding."""
    found = measure_gradients(choose_setting(Subject("rmsnorm", {"bias": True})))
    assert list(found) == list(STATEMENTS)
    assert all(one is not None and one["holds"] and one["deviation"] < 1e-12 for one in found.values())
    without_bias = measure_gradients(choose_setting(Subject("rmsnorm")))
    assert [name for name, one in without_bias.items() if one is None] == [
        "bias_unchanged_by_input_scale",
        "bias_unchanged_by_weight_scale",
    ]


def test_gradients_where_the_statements_do_not_hold() -> None:
    plain = measure_gradients(choose_setting(Subject("none")))
    held = {name for name, one in plain.items() if one and one["holds"]}
    assert held == set()
    # y = W x: dL/dW = upstream^T x grows with x, and does not notice W.
    assert plain["weight_unchanged_by_input_scale"]["deviation"] == pytest.approx(7.0)  # type: ignore[index]
    weights = measure_gradients(choose_setting(Subject("weightnorm")))
    held = {name for name, one in weights.items() if one and one["holds"]}
    assert held == {
        "gain_unchanged_by_weight_scale",
        "weight_inverse_to_weight_scale",
        "weight_orthogonal_to_weight",
    }


# -------------------------------------------------------------------------------------- users' norms


class Fixed(nn.Module):
    """RMSNorm with an eps of its own that nobody can set."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class FixedInFP32(Fixed):
    """The same, in fp32 whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Saturating(Fixed):
    """Invariant for large inputs only, where tanh has nothing left to say."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * x) * self.weight


class OnlySmall(Fixed):
    """Invariant up to a size, then cut off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x.square().mean(-1, keepdim=True) < 1e4)


class Bounded(Fixed):
    """Never divides by less than 0.1, whatever its eps."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt().clamp_min(0.1) * self.weight


class OnlyPositive(nn.Module):
    """Divides by eps as well, so that 0 is not possible."""

    def __init__(self, dim: int, *, eps: float = 1e-4) -> None:
        super().__init__()
        if eps == 0:
            raise ValueError("eps must be positive")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


@pytest.mark.parametrize(
    ("cls", "row", "method"),
    [
        (Fixed, "rmsnorm", "it has no parameter eps"),
        (FixedInFP32, "rmsnorm", "it has no parameter eps"),
        (Saturating, "none", "it has no parameter eps"),
        (OnlySmall, "none", "it has no parameter eps"),
        (Bounded, "none", "eps = 0"),
        (OnlyPositive, "layernorm", "its eps cannot be 0"),
    ],
)
def test_rows_of_norms_without_an_eps_to_set(cls: type[nn.Module], row: str, method: str) -> None:
    register_norm("users")(cls)
    subject = Subject("users")
    assert choose_setting(subject).method == method
    assert row_of(subject) == EXPECTED[row]


def test_a_norm_in_fp32_is_compared_with_float64_all_the_same() -> None:
    register_norm("users")(FixedInFP32)
    subject = Subject("users")
    assert not subject.keeps_float64
    assert 1e-9 < subject.inner_precision < 1e-6
    assert subject.reference_name == "its own copy in float64, casts lifted"
    card = make_card(subject)
    assert card.failed == ["last_dimension"]  # it looks at no shape
    precision = card.checks["float64_precision"]
    assert "computes in fp32 inside" in precision.text
    assert "(fp32)" in card.checks["gradcheck"].text
    # Against a reference that rounds as the norm does, nothing would be off.
    assert 0.1 < card.checks["agreement_fp32"].measured["output"] < 8


def test_lifting_undoes_the_casts_of_float64_only() -> None:
    wide = torch.full((2,), 1 + 1e-12, dtype=torch.float64, requires_grad=True)
    with Lifted():
        y = wide.float().to(torch.bfloat16) * 2
        assert y.dtype == torch.float64
        assert y.sum(dtype=torch.float32).dtype == torch.float64
        (gradient,) = torch.autograd.grad(y.sum(), wide)
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
    assert torch.equal(y, wide * 2)
    assert torch.equal(gradient, torch.full_like(wide, 2))
    assert wide.float().dtype == torch.float32


# ---------------------------------------------------------------------------------------------- cost


def test_operations_and_bytes_counted_by_hand() -> None:
    n, d = 6, 10
    x, gain = torch.randn(n, d), torch.randn(d)
    with Counter() as counter:
        squares = x * x  # n d
        m = squares.mean(-1, keepdim=True)  # n d
        r = (m + 1e-5).rsqrt()  # n, n
        y = x * r * gain  # n d, n d
        y.view(2, 3, d).transpose(0, 1)[..., ::2]  # views
        y.to(torch.float64)  # a copy
    assert counter.cost.flops == 4 * n * d + 2 * n
    read_and_written = (2 + 1) * n * d + (n * d + n) + 2 * n + 2 * n + (2 * n * d + n) + (2 * n * d + d)
    assert counter.cost.bytes == 4 * read_and_written + (4 + 8) * n * d
    assert counter.cost.operations == 7
    with Counter() as product:
        torch.randn(n, d) @ torch.randn(d, 5)
    assert product.cost.flops - 2 * n * d * 5 == n * d + d * 5  # drawing is one an entry


def test_a_fused_kernel_counts_what_its_parts_would() -> None:
    n, d = 16, 64
    x, gain = torch.randn(n, d), torch.ones(d)
    with Counter() as counter:
        torch.nn.functional.layer_norm(x, (d,), gain, gain)
    assert counter.cost.operations == 1
    assert 5 * n * d <= counter.cost.flops <= 9 * n * d
    # Read x and two parameters, written y and two numbers a row.
    assert counter.cost.bytes == 4 * (2 * n * d + 2 * d + 2 * n)


@pytest.mark.parametrize(
    ("name", "state", "rows", "width"),
    [("rmsnorm", 1, 1, 1), ("layernorm", 1, 1, 1), ("scalenorm", 0, 1, 1), ("batchnorm", 1, 1, 1),
     ("weightnorm", 1, 0, 2)],
)  # fmt: skip
def test_exponents(name: str, state: float, rows: float, width: float) -> None:
    counts = count(Subject(name))
    grown = counts["exponents"]
    assert grown["state_d"] == pytest.approx(state, abs=0.01)
    for key in ("flops", "bytes", "flops_with_backward", "bytes_with_backward"):
        # What a batchnorm does to its running statistics does not grow with the rows.
        assert grown[f"{key}_n"] == pytest.approx(rows, abs=0.1), key
        assert grown[f"{key}_d"] == pytest.approx(width, abs=0.05), key


def test_a_norm_of_quadratic_cost_is_seen() -> None:
    class Whitening(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(dim))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.mix

    register_norm("whitening")(Whitening)
    grown = count(Subject("whitening"))["exponents"]
    assert (grown["state_d"], grown["flops_n"], grown["flops_d"]) == (2.0, 1.0, 2.0)


def test_parameters_are_listed() -> None:
    counts = count(Subject("layernorm", dim=8))
    assert counts["parameters"] == [
        {"name": "weight", "shape": [8], "count": 8},
        {"name": "bias", "shape": [8], "count": 8},
    ]
    assert (counts["parameter_count"], counts["buffer_count"]) == (16, 0)
    # Of a norm of weights, what it adds to the map.
    assert count(Subject("weightnorm", dim=8))["parameter_count"] == 8
    assert count(Subject("batchnorm", dim=8))["buffer_count"] == 16


def test_exponent_of_a_power() -> None:
    assert exponent([1, 10, 100], [5, 500, 50000]) == 2.0
    assert exponent([1, 2], [0, 0]) is None


# ----------------------------------------------------------------------------------------------- eps


def short_below(eps: float, *, outside: bool) -> float:
    """The RMS r at which r / sqrt(r^2 + eps), or r / (r + eps), is 0.99."""
    return 99 * eps if outside else 0.99 * math.sqrt(eps / (1 - 0.99**2))


@pytest.mark.parametrize(("eps", "outside"), [(1e-5, False), (1e-8, False), (1e-3, True)])
@pytest.mark.parametrize(("name", "unit"), [("rmsnorm", 1), ("prmsnorm", 1), ("layernorm", 1), ("l2norm", 8)])
def test_where_eps_is_felt(name: str, unit: float, eps: float, outside: bool) -> None:
    position = "outside" if outside else "inside"
    found = measure_eps(Subject(name, {"eps": eps, "eps_position": position}))
    assert found["setting"] == {"eps": eps, "eps_position": position}
    # l2norm divides by a length, which is sqrt(64) times the RMS.
    assert found["short_of_zero_eps_below"] == pytest.approx(
        short_below(eps, outside=outside) / unit, rel=0.01
    )


def test_where_settings_of_eps_part() -> None:
    found = measure_eps(Subject("rmsnorm"))
    # (r^2 + 1e-8) / (r^2 + 1e-5) = 0.99^2
    r = math.sqrt((0.99**2 * 1e-5 - 1e-8) / (1 - 0.99**2))
    assert found["eps_1e-5_and_1e-8_part_below"] == pytest.approx(r, rel=0.01)
    # sqrt(r^2 + e) (1 - 1/100) = r + e
    e, c = 1e-5, 0.99**2
    r = (-2 * e + math.sqrt(4 * e * e + 4 * (1 - c) * (c * e - e * e))) / (2 * (1 - c))
    assert found["inside_and_outside_part_below"] == pytest.approx(r, rel=0.01)
    shares = {(one["eps"], one["eps_position"]): one["share"] for one in found["share_of_zero_eps"]}
    assert shares[1e-5, "inside"][3] == pytest.approx(1e-3 / math.sqrt(1e-6 + 1e-5))
    assert shares[1e-5, "outside"][3] == pytest.approx(1e-3 / (1e-3 + 1e-5))
    # torch's functions have one position only; what eps does is no matter of the backend.
    assert measure_eps(Subject("rmsnorm", backend="torch")) == found


def test_eps_of_ones_own_spelling() -> None:
    """eps may be None, and its position plain text."""

    class Own(Fixed):
        def __init__(self, dim: int, *, eps: float | None = None, eps_position: str = "inside") -> None:
            super().__init__(dim)
            self.eps, self.inside = 1e-4 if eps is None else eps, eps_position == "inside"

        def forward(self, x: Tensor) -> Tensor:
            square = x.square().mean(-1, keepdim=True)
            return x / ((square + self.eps).sqrt() if self.inside else square.sqrt() + self.eps)

    register_norm("own")(Own)
    found = measure_eps(Subject("own"))
    assert found["setting"] == {"eps": None, "eps_position": "inside"}
    assert found["short_of_zero_eps_below"] == pytest.approx(short_below(1e-4, outside=False), rel=0.01)
    outside = measure_eps(Subject("own", {"eps": 1e-3, "eps_position": "outside"}))
    assert outside["setting"] == {"eps": 1e-3, "eps_position": "outside"}
    assert outside["short_of_zero_eps_below"] == pytest.approx(short_below(1e-3, outside=True), rel=0.01)


def test_eps_of_norms_that_have_none() -> None:
    assert measure_eps(Subject("dyt")) == {"text": "it has no parameter eps"}


# ----------------------------------------------------------------------------------------- whole cards


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in TABLE else pytest.mark.slow) for name in EXPECTED],
)
def test_every_norm_passes_its_card(name: str) -> None:
    card = make_card(Subject(name))
    assert card.failed == [], {one: card.checks[one].text for one in card.failed}
    content = card.to_json()
    assert "text" not in content["counts"]
    assert json.loads(json.dumps(content)) == content
    if name in TABLE:
        assert card.checks["table_1"].status.value == "pass"
        assert list(content["invariances"].values()) == TABLE[name]
    assert len(content["invariances"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 33, 257])
@pytest.mark.parametrize("name", EXPECTED)
def test_every_norm_passes_at_odd_widths(name: str, dim: int) -> None:
    card = make_card(Subject(name, dim=dim))
    assert card.failed == [], {one: card.checks[one].text for one in card.failed}


@pytest.mark.parametrize(
    "name",
    [
        "layernorm",
        "rmsnorm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("layernorm_nobias", "none")),
    ],
)
def test_torch_kernels_pass_their_cards(name: str) -> None:
    card = make_card(Subject(name, backend="torch"))
    assert card.failed == [], {one: card.checks[one].text for one in card.failed}


def test_a_row_that_differs_from_the_printed_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsrepro.norms.card.invariance.PAPER", {"rmsnorm": PAPER["layernorm"]})
    monkeypatch.setattr("rmsrepro.norms.card.card.CHECKS", {})
    card = make_card(Subject("rmsnorm"))
    assert card.failed == ["table_1"]
    assert card.checks["table_1"].text == "measured otherwise than printed: weight_matrix_recentering"


def test_a_card_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ("torch_compile", "torch_export")
    quick = {name: check for name, check in CHECKS.items() if name not in compiler}
    monkeypatch.setattr("rmsrepro.norms.card.card.CHECKS", quick)
    torch.manual_seed(1)
    first = make_card(Subject("prmsnorm")).to_json()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert make_card(Subject("prmsnorm")).to_json() == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn from the global generator


def test_file_of_a_card(tmp_path: Any) -> None:
    assert card_path(tmp_path, "rmsnorm") == tmp_path / "cards" / "rmsnorm.json"
    assert card_path(tmp_path, "pkg.mod:Class") == tmp_path / "cards" / "pkg.mod.Class.json"


def test_the_page_explains_every_check_and_invariance(repo_root: Path) -> None:
    page = (repo_root / "docs" / "card.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [*CHECKS, "table_1", "gradients", *INVARIANCES]
