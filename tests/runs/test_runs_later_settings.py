"""Settings that are newer than the first records, and norms that some settings mean nothing to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.later import LATER_SETTINGS, is_as_before, without_later
from rmsrepro.config.schema import Placement, TrainConfig, TransformerConfig
from rmsrepro.norms import register_norm, unregister_norm
from rmsrepro.runs.identity import check_norm, identify
from rmsrepro.runs.result import flags

Make = Callable[..., TrainConfig]


def run_id(config: TrainConfig) -> str:
    return identify(config, data_hash="d").run_id


of_the_first_version = pytest.mark.parametrize(
    ("model", "task", "norm", "backend", "expected"),
    [
        ("transformer", "lm", "rmsnorm", "composite", "a41296d7de"),
        ("gru", "lm", "layernorm", "torch", "b25ba6b287"),
        ("gru", "translation", "prmsnorm", "composite", "6f57a674cb"),
        ("transformer", "translation", "none", "composite", "0f5332d908"),
    ],
)
of_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="torch's version is part of an identity"
)


@of_torch_2_13
@of_the_first_version
@pytest.mark.usefixtures("no_fused_kernels")
def test_runs_of_the_first_version_keep_their_identity(
    make_config: Make, model: str, task: str, norm: str, backend: str, expected: str
) -> None:
    for more in ([], [f"backend={backend}"]):
        assert run_id(make_config(model, task, f"norm={norm}", *more)).endswith(f"{norm}-s1-{expected}")


@of_torch_2_13
@of_the_first_version
@pytest.mark.usefixtures("fused_kernels")
def test_a_run_on_the_fused_kernels_is_another_run(
    make_config: Make, model: str, task: str, norm: str, backend: str, expected: str
) -> None:
    named = run_id(make_config(model, task, f"norm={norm}", f"backend={backend}"))
    assert named.endswith(f"{norm}-s1-{expected}")
    # Without a norm there are no kernels to take.
    assert (run_id(make_config(model, task, f"norm={norm}")) == named) == (norm == "none")


def test_a_later_setting_enters_the_identity_where_it_is_used(make_config: Make) -> None:
    plain = identify(make_config("transformer", "lm", "norm=rmsnorm"), data_hash="d")
    assert not {"qk_norm", "output_bias", "empty_source"} & set(plain.content["model"])
    assert "casting" not in plain.content["norm_params"]
    for override in ("model.qk_norm=true", "model.output_bias=true", "norm.casting=before_gain"):
        assert run_id(make_config("transformer", "lm", "norm=rmsnorm", override)) != plain.run_id
    same = ("model.qk_norm=false", "norm.casting=after_gain")
    assert run_id(make_config("transformer", "lm", "norm=rmsnorm", *same)) == plain.run_id


def test_the_table_of_later_settings() -> None:
    assert all(is_as_before(name, value) for name, value in LATER_SETTINGS.items())
    assert not is_as_before("model.qk_norm", True)
    assert not is_as_before("model.d_model", 8)
    values = {"qk_norm": False, "output_bias": True, "d_model": 8, "casting": "after_gain"}
    assert without_later("model", values) == {"output_bias": True, "d_model": 8, "casting": "after_gain"}
    assert without_later("norm", values) == {"qk_norm": False, "output_bias": True, "d_model": 8}


@pytest.mark.parametrize("norm", ["none", "weightnorm"])
def test_what_a_norm_without_modules_ignores(make_config: Make, norm: str) -> None:
    base = run_id(make_config("transformer", "translation", f"norm={norm}"))
    for ignored in ("placement=post", "placement=none", "sites=[gates_x]", "model.qk_norm=true"):
        assert run_id(make_config("transformer", "translation", f"norm={norm}", ignored)) == base
    gru = make_config("gru", "translation", f"norm={norm}")
    other = make_config("gru", "translation", f"norm={norm}", "sites=[gates_x]")
    # The sites say which rows of a GRU's matrices are normalised.
    assert (run_id(other) == run_id(gru)) == (norm == "none")


def test_queries_and_keys_are_flagged_at_the_width_of_a_head(make_config: Make) -> None:
    config = make_config("transformer", "lm", "norm=prmsnorm", "norm.p=0.5", "model.d_model=64")
    assert flags(config) == []
    assert isinstance(config.model, TransformerConfig)
    normed = replace(config, model=replace(config.model, qk_norm=True))
    assert [flag.split(";")[0] for flag in flags(normed)] == ["model.qk_norm: prmsnorm: k=8 of 16 entries"]
    bare = replace(normed, placement=Placement.none, norm={"name": "rmsnorm"})
    assert flags(bare) == ["placement=none: the model has no norm but those of queries and keys"]
    assert flags(replace(bare, norm={"name": "weightnorm"})) == []


def test_a_norm_over_positions_needs_a_task_without_a_future(make_config: Make) -> None:
    @register_norm("runs_test_masked")
    class Masked(torch.nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return x

    try:
        for name in ("batchnorm", "runs_test_masked"):
            check_norm(replace(make_config("gru", "translation"), norm={"name": name}))
            with pytest.raises(UserError, match=rf"^norm={name}: .* tokens to come.* use task=translation"):
                check_norm(replace(make_config("gru", "lm"), norm={"name": name}))
    finally:
        unregister_norm("runs_test_masked")


def test_a_norm_of_weights_is_checked_as_one(make_config: Make) -> None:
    check_norm(make_config("gru", "lm", "norm=weightnorm"))
    with pytest.raises(UserError, match="weightnorm"):
        check_norm(make_config("gru", "lm", "norm=weightnorm", "backend=torch"))
