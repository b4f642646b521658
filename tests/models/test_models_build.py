"""Initial weights by name, and what build_model refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import ModelConfig, Placement, Positions
from rmsrepro.config.sizes import resolve_model
from rmsrepro.models import build_model
from rmsrepro.models.build import transformer_scales
from rmsrepro.models.initialise import initial_values
from rmsrepro.norms import NormSpec, norm_parameter_names

KINDS = [("transformer", "lm"), ("transformer", "translation"), ("gru", "lm"), ("gru", "translation")]


@pytest.mark.parametrize(("kind", "task"), KINDS)
@pytest.mark.parametrize("placement", [Placement.pre, Placement.post])
def test_norms_of_one_seed_share_all_other_weights(
    models: Any, kind: str, task: str, placement: Placement
) -> None:
    built = {
        norm: models.build(kind, task, norm, placement=placement, perturb=False)
        for norm in ("none", "layernorm", "rmsnorm", "prmsnorm")
    }
    parameters = {
        norm: {n: p for n, p in model.named_parameters() if n not in norm_parameter_names(model)}
        for norm, model in built.items()
    }
    for norm, own in parameters.items():
        extra = parameters["none"].keys() - own.keys()
        assert own.keys() <= parameters["none"].keys(), norm
        assert all(name.endswith("_h_bias") for name in extra)
        assert (extra == set()) == (norm == "none" or kind == "transformer")
        assert all(torch.equal(value, parameters["none"][name]) for name, value in own.items())
        assert all((parameters["none"][name] == 0).all() for name in extra)
    other = models.build(kind, task, "none", placement=placement, perturb=False, seed=2)
    assert all(
        not torch.equal(value, parameters["none"][name])
        for name, value in other.named_parameters()
        if value.dim() > 1
    )


@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_norm_parameters_stay_and_biases_are_zero(models: Any, kind: str, task: str) -> None:
    model = models.build(kind, task, "layernorm", perturb=False)
    of_norms = norm_parameter_names(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            expected = 1.0 if name in of_norms and name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name


def test_the_global_random_state_is_left_alone(models: Any) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = models.build("transformer", "translation", "rmsnorm", perturb=False)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    second = models.build("transformer", "translation", "rmsnorm", perturb=False)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_values_depend_on_seed_name_and_shape() -> None:
    shape = torch.Size([6, 4])
    values = initial_values("a.linear.weight", shape, 1)
    assert torch.equal(values, initial_values("a.linear.weight", shape, 1))
    assert not torch.equal(values, initial_values("b.linear.weight", shape, 1))
    assert not torch.equal(values, initial_values("a.linear.weight", shape, 2))
    # Another process, another year: the same numbers.
    expected = torch.tensor([0.0])
    assert torch.equal(initial_values("a.linear.bias", torch.Size([1]), 1), expected)


def test_distributions() -> None:
    embedding = initial_values("src_embedding.weight", torch.Size([2000, 64]), 1)
    assert float(embedding.std()) == pytest.approx(64**-0.5, rel=0.02)
    linear = initial_values("up.weight", torch.Size([300, 100]), 1)
    assert float(linear.abs().max()) == pytest.approx(math.sqrt(6 / 400), rel=0.01)
    assert float(linear.std()) == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    fused = initial_values("self_attention.query_key_value.weight", torch.Size([300, 100]), 1)
    for block in fused.chunk(3):
        assert float(block.abs().max()) == pytest.approx(math.sqrt(6 / 200), rel=0.01)
    recurrent = initial_values("layers.0.recurrent_projection.weight", torch.Size([60, 20]), 1)
    for block in recurrent.chunk(3):
        torch.testing.assert_close(block @ block.T, torch.eye(20), atol=1e-5, rtol=0)


def test_maps_to_the_residual_stream_start_smaller(models: Any) -> None:
    pre = dict(models.build("transformer", "lm", placement=Placement.pre, perturb=False).named_parameters())
    post = dict(models.build("transformer", "lm", placement=Placement.post, perturb=False).named_parameters())
    scaled = {name for name, value in pre.items() if value.dim() > 1 and not torch.equal(value, post[name])}
    assert scaled == {
        f"stack.layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("self_attention.output", "feed_forward.down")
    }
    for name in scaled:
        torch.testing.assert_close(pre[name], post[name] / math.sqrt(2 * 2))
    decoder = transformer_scales(2, Placement.pre)["decoder.*attention.output.weight"]
    assert decoder == pytest.approx(6**-0.5)


@pytest.mark.parametrize("norm", ["none", "layernorm", "rmsnorm", "prmsnorm"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["transformer", "gru"])
@pytest.mark.parametrize(("width", "vocab"), [(64, 65), (128, 65), (256, 4096)])
def test_the_first_loss_is_that_of_guessing(
    models: Any, kind: str, norm: str, tied: bool, width: int, vocab: int
) -> None:
    sizes: dict[str, Any] = {"d_model": width, "tie_embeddings": tied}
    sizes |= {"num_heads": 4, "d_ff": 4 * width} if kind == "transformer" else {"d_embed": width}
    model = models.build(kind, "lm", norm, perturb=False, vocab=vocab, max_len=32, **sizes)
    tokens = models.tokens(16, 33, vocab=vocab)
    # Natural text repeats itself, which a model that predicts its own input would profit from.
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(vocab), rel=0.1)


@pytest.mark.parametrize("placement", list(Placement))
def test_the_first_loss_in_every_placement(models: Any, placement: Placement) -> None:
    model = models.build(
        "transformer", "lm", placement=placement, perturb=False, vocab=65, d_model=64, num_heads=4, d_ff=256
    )
    tokens = models.tokens(32, 12, vocab=65)
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(65), rel=0.1)


@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_dropout_only_in_training(models: Any, kind: str, task: str) -> None:
    model = models.build(kind, task, dropout=0.5)
    source, mask = models.ragged([4, 4])
    inputs = (models.tokens(2, 5),) if task == "lm" else (source, mask, models.tokens(2, 5))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))
    model.train()
    assert not torch.allclose(model(*inputs), model(*inputs))


def test_tied_output_has_no_matrix_of_its_own(models: Any) -> None:
    tied = dict(models.build("gru", "lm", tie_embeddings=True).named_parameters())
    assert "output.vocabulary.weight" not in tied
    assert tied["output.resize.weight"].shape == (12, 16)
    untied = dict(models.build("gru", "lm", tie_embeddings=False).named_parameters())
    assert untied["output.vocabulary.weight"].shape == (models.tgt_vocab, 16)
    assert "output.resize.weight" not in untied


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 15}, r"model\.d_model=15 .* model\.num_heads=2"),
        ({"d_model": 0}, r"model\.d_model=0: a positive whole number"),
        ({"num_layers": None}, r"model\.num_layers=None: a positive whole number"),
        ({"dropout": 1.5}, r"model\.dropout=1\.5"),
        ({"d_model": 6, "positions": Positions.rotary}, r"rotary .* heads of 3; choose an even"),
    ],
)
def test_impossible_sizes_are_refused(models: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.build("transformer", "lm", **fields)


def build_from(config: ModelConfig, task: str) -> object:
    return build_model(
        config,
        task,
        src_vocab=5,
        tgt_vocab=5,
        max_len=8,
        norm=NormSpec("rmsnorm"),
        placement=Placement.pre,
        sites=[],
        seed=1,
    )


def test_unknown_tasks_and_models_are_refused() -> None:
    from rmsrepro.config.schema import GRUConfig

    with pytest.raises(UserError, match=r"task=translations.*did you mean translation"):
        build_from(resolve_model(GRUConfig()), "translations")
    with pytest.raises(UserError, match=r"model\.name=mine"):
        build_from(ModelConfig(name="mine"), "lm")


def test_special_tokens_are_known_to_the_model() -> None:
    from rmsrepro.config.schema import TransformerConfig

    model = build_from(resolve_model(TransformerConfig()), "translation")
    assert (getattr(model, "pad_id", None), getattr(model, "bos_id", None)) == (0, 1)
