"""The tasks: what a model is trained for, how it is judged and how it is used afterwards."""

from __future__ import annotations

from typing import Any

from rmsrepro.config.schema import LMConfig, TrainConfig, TranslationConfig
from rmsrepro.models import build_model
from rmsrepro.models.normalisation import Normalisation
from rmsrepro.norms import NormSpec
from rmsrepro.tasks.base import Task, evaluate
from rmsrepro.tasks.language_modelling import LanguageModelling
from rmsrepro.tasks.optim import build_optimizer, decayed_parameter_names, learning_rate_factor
from rmsrepro.tasks.sampling import sample
from rmsrepro.tasks.scoring import corpus_scores
from rmsrepro.tasks.search import beam_search, greedy_search
from rmsrepro.tasks.translation import Translation, translate_texts

__all__ = [
    "LanguageModelling",
    "Task",
    "Translation",
    "beam_search",
    "build_optimizer",
    "build_task",
    "corpus_scores",
    "decayed_parameter_names",
    "evaluate",
    "greedy_search",
    "learning_rate_factor",
    "norm_spec",
    "normalisation",
    "sample",
    "translate_texts",
]


def build_task(config: TrainConfig, data: Any) -> Task:
    """Return the Lightning module of a run: a freshly initialised model and its task.

    `config` is resolved (no size left open); `data` is a prepared data module, whose vocabularies size
    the model. Initial weights depend on `config.seed` and the parameters' names alone, so two runs that
    differ in their norm start from identical shared weights.

    Raises:
        TypeError: a task configuration of an unknown kind.
    """
    task = config.task
    if not isinstance(task, LMConfig | TranslationConfig):
        raise TypeError(f"unknown kind of task configuration: {type(task).__name__}")
    max_len = config.data.max_len
    if isinstance(task, TranslationConfig) and task.max_decode_len is not None:
        # Position tables have to hold the longest hypothesis too.
        max_len = max(max_len, task.max_decode_len)
    shared: dict[str, Any] = {
        "src_vocab": data.src_vocab,
        "tgt_vocab": data.tgt_vocab,
        "max_len": max_len,
        "norm": norm_spec(config),
        "placement": config.placement,
        "sites": config.sites,
        "seed": config.seed,
    }
    if isinstance(task, LMConfig):
        return LanguageModelling(config, build_model(config.model, "lm", **shared), data)
    return Translation(config, build_model(config.model, "translation", **shared))


def normalisation(config: TrainConfig) -> Normalisation:
    """How the run's model is normalised."""
    return Normalisation.of(config.model, norm_spec(config), config.placement, config.sites)


def norm_spec(config: TrainConfig) -> NormSpec:
    """The run's norm as the models take it."""
    given = dict(config.norm)
    return NormSpec(name=given.pop("name"), params=given, backend=config.backend.value)
