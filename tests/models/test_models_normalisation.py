"""A model takes the weights of its own norm only, however well those of another one fit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import GRUConfig, Placement, Site, TransformerConfig
from rmsrepro.models import build_model
from rmsrepro.models.normalisation import NOTE, Normalisation
from rmsrepro.norms import NormSpec

CONFIGS = {
    "transformer": TransformerConfig(d_model=8, num_layers=1, num_heads=2, d_ff=8, dropout=0.0),
    "gru": GRUConfig(d_model=8, d_embed=8, num_layers=1, dropout=0.0),
}


def build(
    norm: str = "rmsnorm", model: str = "transformer", *, backend: str = "composite",
    placement: Placement = Placement.pre, sites: Any = tuple(Site), task: str = "lm", **params: Any,
) -> Any:  # fmt: skip
    return build_model(
        CONFIGS[model], task, src_vocab=5, tgt_vocab=5, max_len=4, norm=NormSpec(norm, params, backend),
        placement=placement, sites=sites, seed=1,
    )  # fmt: skip


PAIRS = [
    ({"norm": "layernorm_nobias"}, {"norm": "rmsnorm"}, "norm=layernorm_nobias, not norm=rmsnorm"),
    ({"norm": "layernorm"}, {"norm": "rmsnorm"}, "norm=layernorm, not norm=rmsnorm"),
    ({"norm": "l2norm"}, {"norm": "prmsnorm"}, "norm=l2norm, not norm=prmsnorm"),
    ({"norm": "none"}, {"norm": "rmsnorm"}, "norm=none, not norm=rmsnorm"),
    ({"norm": "weightnorm"}, {"norm": "rmsnorm"}, "norm=weightnorm, not norm=rmsnorm"),
    ({"eps": 1e-4}, {"eps": 1e-5}, "norm=rmsnorm norm.eps=0.0001, not norm=rmsnorm norm.eps=1e-05"),
    (
        {"norm": "prmsnorm", "p": 0.5, "model": "gru"},
        {"norm": "prmsnorm", "p": 0.25, "model": "gru"},
        "norm=prmsnorm norm.p=0.5, not norm=prmsnorm norm.p=0.25",
    ),
    (
        {"variant": "authors_torch"},
        {"variant": "authors_tf"},
        "norm=rmsnorm norm.eps_position=outside, not norm=rmsnorm norm.eps_position=inside",
    ),
    (
        {"placement": Placement.post},
        {"placement": Placement.res_post},
        "norm=rmsnorm placement=post, not norm=rmsnorm placement=res_post",
    ),
    (
        {"model": "gru", "sites": [Site.gates_x, Site.cand_h]},
        {"model": "gru", "sites": [Site.gates_x, Site.cand_x]},
        r"norm=rmsnorm sites=\[cand_h,gates_x\], not norm=rmsnorm sites=\[cand_x,gates_x\]",
    ),
]


@pytest.mark.parametrize(("source", "target", "message"), PAIRS)
def test_weights_of_another_norm_are_refused_both_ways(
    source: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    first, second = build(**source), build(**target)
    before = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    with pytest.raises(UserError, match=f"these weights were trained with {message}"):
        second.load_state_dict(first.state_dict())
    for strict in (True, False):
        with pytest.raises(UserError, match="these weights were trained with norm="):
            first.load_state_dict(second.state_dict(), strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in second.state_dict().items())


@pytest.mark.parametrize("task", ["lm", "translation"])
@pytest.mark.parametrize("model", ["transformer", "gru"])
def test_weights_of_the_same_norm_are_taken(model: str, task: str) -> None:
    for source, target in (
        ({}, {}),
        ({"backend": "composite"}, {"backend": "torch"}),
        ({"variant": "authors_tf"}, {"eps": 1e-8}),  # one function, told in two ways
        ({"norm": "none", "placement": Placement.pre}, {"norm": "none", "placement": Placement.post}),
        ({"norm": "weightnorm"}, {"norm": "weightnorm", "placement": Placement.sandwich}),
    ):
        build(model=model, task=task, **target).load_state_dict(
            build(model=model, task=task, **source).state_dict()
        )


def test_a_dict_forgets_the_norm() -> None:
    build("rmsnorm").load_state_dict(dict(build("layernorm_nobias").state_dict()))


def test_the_note_survives_files_and_copies() -> None:
    model, other = build("layernorm_nobias"), build("rmsnorm")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (
        torch.load(file, weights_only=True),
        copy.deepcopy(model).state_dict(),
        pickle.loads(pickle.dumps(model)).state_dict(),
        torch.nn.ModuleDict({"model": model}).state_dict(),
    ):
        owner = other if "model" not in state._metadata else torch.nn.ModuleDict({"model": other})
        with pytest.raises(UserError, match="norm=layernorm_nobias, not norm=rmsnorm"):
            owner.load_state_dict(state)


def test_a_note_of_an_older_version_lacks_parameters() -> None:
    model = build("rmsnorm", eps=1e-4)
    state = model.state_dict()
    assert state._metadata[""][NOTE] == model.normalisation.note()
    state._metadata[""][NOTE]["params"] = {"eps": 1e-4}
    del state._metadata[""][NOTE]["qk_norm"]
    model.load_state_dict(state)


def test_convert_is_named_where_it_helps() -> None:
    def advice(source: dict[str, Any], target: dict[str, Any]) -> str:
        with pytest.raises(UserError) as refusal:
            build(**target).load_state_dict(build(**source).state_dict())
        return str(refusal.value)

    command = "rmsrepro convert ckpt=PATH to=rmsnorm"
    assert command in advice({"norm": "layernorm"}, {"norm": "rmsnorm"})
    assert command in advice({"norm": "layernorm_nobias"}, {"norm": "rmsnorm"})
    for source, target in (
        ({"norm": "rmsnorm"}, {"norm": "layernorm"}),
        (
            {"norm": "layernorm", "placement": Placement.post},
            {"norm": "rmsnorm", "placement": Placement.post},
        ),
        ({"norm": "layernorm", "model": "gru"}, {"norm": "rmsnorm", "model": "gru"}),
        ({"norm": "prmsnorm"}, {"norm": "rmsnorm"}),
    ):
        assert command not in advice(source, target)


def test_queries_and_keys_count() -> None:
    plain, normed = (
        Normalisation.of(
            TransformerConfig(qk_norm=qk_norm), NormSpec("rmsnorm", {"gain": False}), Placement.pre, []
        )
        for qk_norm in (False, True)
    )
    assert not plain.same_as(normed)
    assert normed.words(plain) == "norm=rmsnorm model.qk_norm=true"


def test_parameters_of_a_class_that_was_changed() -> None:
    blended = Normalisation("blended", {"mix": 0.5, "eps": 1e-5}, None, None)
    renamed = Normalisation("blended", {"blend": 0.5, "eps": 1e-5}, None, None)
    assert not blended.same_as(renamed)
    assert blended.words(renamed) == "norm=blended norm.mix=0.5 (no parameter blend)"
    assert renamed.words(blended) == "norm=blended norm.blend=0.5 (no parameter mix)"
    weights, model = build().state_dict(), build()
    weights._metadata[""][NOTE] = blended.note()
    model.normalisation = renamed
    with pytest.raises(UserError, match="the class of the norm blended has other parameters now"):
        model.load_state_dict(weights)
