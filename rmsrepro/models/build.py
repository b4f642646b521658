"""From a configuration to an initialised model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import GRUConfig, ModelConfig, Placement, Site, TransformerConfig
from rmsrepro.models.gru import GRULanguageModel
from rmsrepro.models.initialise import initialise
from rmsrepro.models.interface import LanguageModel, TranslationModel
from rmsrepro.models.normalisation import Normalisation
from rmsrepro.models.rnnsearch import RNNSearch, RNNSearchShape
from rmsrepro.models.stack import TransformerShape
from rmsrepro.models.transformer import TransformerLanguageModel, TransformerTranslation
from rmsrepro.norms import NormSpec, match_gains
from rmsrepro.norms.given import check_task

TASKS = ("lm", "translation")
Model = LanguageModel[Any] | TranslationModel[Any]


@overload
def build_model(
    config: ModelConfig,
    task: Literal["lm"],
    *,
    src_vocab: int,
    tgt_vocab: int,
    max_len: int,
    norm: NormSpec,
    placement: Placement,
    sites: Sequence[Site],
    seed: int,
    pad_id: int = 0,
    bos_id: int = 1,
) -> LanguageModel[Any]: ...


@overload
def build_model(
    config: ModelConfig,
    task: Literal["translation"],
    *,
    src_vocab: int,
    tgt_vocab: int,
    max_len: int,
    norm: NormSpec,
    placement: Placement,
    sites: Sequence[Site],
    seed: int,
    pad_id: int = 0,
    bos_id: int = 1,
) -> TranslationModel[Any]: ...


@overload
def build_model(
    config: ModelConfig,
    task: str,
    *,
    src_vocab: int,
    tgt_vocab: int,
    max_len: int,
    norm: NormSpec,
    placement: Placement,
    sites: Sequence[Site],
    seed: int,
    pad_id: int = 0,
    bos_id: int = 1,
) -> Model: ...


def build_model(
    config: ModelConfig,
    task: str,
    *,
    src_vocab: int,
    tgt_vocab: int,
    max_len: int,
    norm: NormSpec,
    placement: Placement,
    sites: Sequence[Site],
    seed: int,
    pad_id: int = 0,
    bos_id: int = 1,
) -> Model:
    """Build the model of `config` for `task` and initialise it by name (see `initialise.py`).

    The global random state is left as it was. Every norm is built by `rmsrepro.norms`, so that the rule for
    weight decay finds its parameters. A norm of weights starts as the function that `none` starts as.

    Args:
        config: a resolved model configuration (no size left None).
        task: lm or translation.
        src_vocab: source vocabulary; not used for lm.
        tgt_vocab: target vocabulary, for lm the only one.
        max_len: length of a learned position table.
        norm: the norm of all sites.
        placement: Transformer: where the norms sit around a residual branch. A GRU has none, nor has a norm
            of weights.
        sites: GRU: which places of a step are normalised. A Transformer has none.
        seed: seed of the initial weights.
        pad_id: id of the padding token.
        bos_id: id of the token that a decoder is fed first.

    Raises:
        UserError: the configuration cannot be built, or its norm does not suit the task.
    """
    if task not in TASKS:
        raise UserError(f"task={task}: models know {' and '.join(TASKS)}{nearest(task, TASKS)}")
    check_task(norm.name, task)
    # Constructors of layers draw from the global generator, as may a user's norm: the state is put back
    # afterwards, and starts from the seed so that such a norm starts the same way in every run.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Model
        scales: Mapping[str, float]
        if isinstance(config, TransformerConfig):
            shape = _transformer_shape(config, max_len, norm, placement)
            if task == "lm":
                model = TransformerLanguageModel(shape, tgt_vocab)
            else:
                model = TransformerTranslation(shape, src_vocab, tgt_vocab)
            scales = transformer_scales(shape.num_layers, placement)
        elif isinstance(config, GRUConfig):
            if config.builtin and not (task == "lm" and norm.is_none):
                raise UserError(
                    f"model.builtin=true is torch.nn.GRU, which has no norms and no attention: it needs "
                    f"task=lm (here {task}) and norm=none (here {norm.name})"
                )
            if task == "lm":
                model = _gru_language_model(config, tgt_vocab, norm, sites)
            else:
                model = _rnnsearch(config, src_vocab, tgt_vocab, norm, sites)
            scales = {}
        else:
            raise UserError(f"model.name={config.name}: no model is built from a {type(config).__name__}")
    model.pad_id, model.bos_id = pad_id, bos_id
    model.normalisation = Normalisation.of(config, norm, placement, sites)
    initialise(model, seed, scales)
    match_gains(model)
    return model


def transformer_scales(num_layers: int, placement: Placement) -> dict[str, float]:
    """Return the Transformer's factors on the standard initialisation.

    Embeddings start a quarter as large, N(0, 1 / (16 dim)): they enter the stream with a standard
    deviation of 1/4 (see `PositionedEmbedding`), and as a tied output they keep the first logits small.
    A tied model compares the stream with the very vectors that were added to it, and with larger ones
    would start by predicting each token to be followed by itself.

    Maps that write to the residual stream start smaller by the square root of the number of branches
    (Radford et al. 2019, section 2.3), so that the stream's variance does not grow with depth; not in
    `post`, whose stream is normalised after each branch. Named by the placement that was asked for, and
    so the same for every norm.
    """
    scales = {"*embedding.weight": 0.25, "output.vocabulary.weight": 0.25}
    if placement is not Placement.post:
        for stack, branches in (("stack", 2), ("encoder", 2), ("decoder", 3)):
            factor = (branches * num_layers) ** -0.5
            scales[f"{stack}.*attention.output.weight"] = factor
            scales[f"{stack}.*feed_forward.down.weight"] = factor
    return scales


def _transformer_shape(
    config: TransformerConfig, max_len: int, norm: NormSpec, placement: Placement
) -> TransformerShape:
    return TransformerShape(
        d_model=_size(config, "d_model"),
        num_layers=_size(config, "num_layers"),
        num_heads=_size(config, "num_heads"),
        d_ff=_size(config, "d_ff"),
        dropout=_dropout(config),
        positions=config.positions,
        ffn=config.ffn,
        bias=config.bias,
        qk_norm=config.qk_norm,
        tie_embeddings=config.tie_embeddings,
        output_bias=config.output_bias,
        empty_source=config.empty_source,
        max_len=max_len,
        norm=norm,
        placement=placement,
    )


def _gru_language_model(
    config: GRUConfig, vocab: int, norm: NormSpec, sites: Sequence[Site]
) -> GRULanguageModel:
    return GRULanguageModel(
        vocab,
        d_embed=_size(config, "d_embed"),
        d_model=_size(config, "d_model"),
        num_layers=_size(config, "num_layers"),
        dropout=_dropout(config),
        tie_embeddings=config.tie_embeddings,
        norm=norm,
        sites=frozenset(sites),
        builtin=config.builtin,
    )


def _rnnsearch(
    config: GRUConfig, src_vocab: int, tgt_vocab: int, norm: NormSpec, sites: Sequence[Site]
) -> RNNSearch:
    shape = RNNSearchShape(
        d_embed=_size(config, "d_embed"),
        d_model=_size(config, "d_model"),
        num_layers=_size(config, "num_layers"),
        dropout=_dropout(config),
        tie_embeddings=config.tie_embeddings,
        start_state=config.start_state,
        norm=norm,
        sites=frozenset(sites),
    )
    return RNNSearch(shape, src_vocab, tgt_vocab)


def _size(config: ModelConfig, field: str) -> int:
    """Return a size that must be a positive whole number by now."""
    value = getattr(config, field)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"model.{field}={value}: a positive whole number is needed")
    return value


def _dropout(config: ModelConfig) -> float:
    value = config.dropout
    if value is None or not 0.0 <= value < 1.0:
        raise UserError(f"model.dropout={value}: a probability from 0 up to, but not, 1 is needed")
    return value
