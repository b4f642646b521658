"""The tasks with the real models, norms and data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsrepro.config.schema import (
    GRUConfig,
    LMConfig,
    ParallelFilesConfig,
    Positions,
    TextFilesConfig,
    Tokenizer,
    TrainConfig,
    TrainerConfig,
    TransformerConfig,
    TranslationConfig,
)
from rmsrepro.config.sizes import resolve_model
from rmsrepro.data import build_data
from rmsrepro.norms import list_norms, norm_info, norm_parameter_names, register_norm
from rmsrepro.norms.registry import unregister_norm
from rmsrepro.tasks import build_task, decayed_parameter_names, evaluate, sample, translate_texts
from rmsrepro.tasks.base import Task
from tests.tasks.fakes import trainer

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ZAHLEN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]
MODELS = [
    TransformerConfig(d_model=16, num_layers=2, num_heads=2, d_ff=32),
    GRUConfig(d_model=16, d_embed=12, num_layers=1),
]
MODEL_NAMES = ["transformer", "gru"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty sentence pairs in files, and a text."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [
        (
            f"the {NUMBERS[i]} and the {NUMBERS[(3 * i + j) % 10]}",
            f"die {ZAHLEN[(3 * i + j) % 10]} und die {ZAHLEN[i]}",
        )
        for j in (1, 2)
        for i in range(10)
    ]
    for side, lines in enumerate(zip(*pairs, strict=True)):
        (folder / f"side{side}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "text.txt").write_text("".join(f"{a}, {b}.\n" for a, b in pairs) * 4, encoding="utf-8")
    return folder


def _config(task: str, model: Any, folder: Path, **changes: Any) -> TrainConfig:
    pairs = [str(folder / f"side{side}.txt") for side in (0, 1)]
    lm, translation = (
        TextFilesConfig(train=str(folder / "text.txt"), max_len=16, batch_tokens=64),
        ParallelFilesConfig(
            tokenizer=Tokenizer.char,
            max_len=40,
            batch_tokens=400,
            train_src=pairs[0],
            train_tgt=pairs[1],
            val_src=pairs[0],
            val_tgt=pairs[1],
            test_src=pairs[0],
            test_tgt=pairs[1],
        ),
    )
    config = TrainConfig(
        norm={"name": "rmsnorm"},
        model=resolve_model(model),
        task=LMConfig() if task == "lm" else TranslationConfig(),
        data=lm if task == "lm" else translation,
        trainer=TrainerConfig(max_steps=2),
    )
    return replace(config, **changes)


def _build(config: TrainConfig, folder: Path) -> tuple[Task, Any]:
    data = build_data(
        config.data,
        config.task.name,
        seed=config.seed,
        accumulate=config.trainer.accumulate,
        cache_dir=folder / "cache",
    )
    return build_task(config, data), data


def _norms_for(task: str) -> list[str]:
    """All norms but those that a task does not have (see `check_task`)."""
    return [norm for norm in list_norms() if task == "translation" or not norm_info(norm).takes_mask]


@pytest.mark.parametrize(
    ("task", "norm"), [(task, norm) for task in ("lm", "translation") for norm in _norms_for(task)]
)
@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
def test_mixed_precision_trains_and_validates(task: str, model: Any, norm: str, folder: Path) -> None:
    config = _config(task, model, folder, norm={"name": norm}, precision="bf16-mixed")
    module, data = _build(config, folder)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    trainer(max_steps=2, precision="bf16-mixed", limit_val_batches=2, val_check_interval=1).fit(module, data)
    assert module.last_loss is not None
    assert torch.isfinite(module.last_loss)
    metrics = module.pop_training_metrics()
    # Untrained, the loss is near that of a uniform guess.
    uniform = torch.tensor(float(data.tgt_vocab)).log().item()
    assert 0.5 * uniform < metrics["train_loss"] < 2 * uniform
    assert metrics["grad_norm"] > 0
    after = module.model.state_dict()
    assert all(value.dtype == torch.float32 for value in after.values())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name, _ in module.model.named_parameters()} - changed <= set()
    assert 0 < module.validation_metrics["val_loss"] < 2 * uniform


@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_same_parameters_decay_under_every_norm(task: str, model: Any, folder: Path) -> None:
    @register_norm("tasks_test_norm")
    class Odd(nn.Module):
        """A norm whose parameters neither look like a gain nor are vectors."""

        def __init__(self, dim: int) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(1, dim))
            self.inner = nn.LayerNorm(dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.matrix

    try:
        decayed = {}
        for norm in [*_norms_for(task), "tasks_test_norm"]:
            module, _ = _build(_config(task, model, folder, norm={"name": norm}), folder)
            decayed[norm] = decayed_parameter_names(module.model)
            of_norms = norm_parameter_names(module.model)
            assert not decayed[norm] & of_norms
            assert (len(of_norms) > 0) == (norm != "none")
            groups = module.configure_optimizers()["optimizer"].param_groups
            assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
            assert len(groups[0]["params"]) == len(decayed[norm])
            everything = sum(len(group["params"]) for group in groups)
            assert everything == len(list(module.model.parameters()))
    finally:
        unregister_norm("tasks_test_norm")
    for norm, names in decayed.items():
        assert names == decayed["layernorm"], norm
    assert any("embedding" in name for name in decayed["rmsnorm"])
    assert not any("bias" in name for name in decayed["rmsnorm"])


@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_all_norms_start_from_the_same_shared_weights(task: str, model: Any, folder: Path) -> None:
    weights = {}
    for norm in ("layernorm", "rmsnorm", "none"):
        module, _ = _build(_config(task, model, folder, norm={"name": norm}), folder)
        weights[norm] = module.model.state_dict()
    for norm in ("rmsnorm", "none"):
        shared = weights[norm].keys() & weights["layernorm"].keys()
        assert len(shared) >= 4
        for name in shared:
            assert torch.equal(weights[norm][name], weights["layernorm"][name]), name
    other, _ = _build(_config(task, model, folder, seed=2), folder)
    name = next(name for name in weights["rmsnorm"] if name.endswith("embedding.weight"))
    assert not torch.equal(other.model.state_dict()[name], weights["rmsnorm"][name])


@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
def test_a_source_without_tokens_poisons_nothing(model: Any, folder: Path) -> None:
    module, data = _build(_config("translation", model, folder), folder)
    batch = next(iter(data.train_dataloader()))
    blank = replace(batch, src_mask=batch.src_mask.clone())
    blank.src_mask[0] = False
    loss = module.training_step(blank, 0)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.model.parameters())
    with torch.no_grad():
        kept = module.logits_and_targets(blank)[0][1:]
        torch.testing.assert_close(kept, module.logits_and_targets(batch)[0][1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [*MODELS, TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, positions=Positions.rotary)],
    ids=[*MODEL_NAMES, "rotary"],
)
def test_sampling_agrees_with_reading_the_whole_text(model: Any, folder: Path) -> None:
    module, data = _build(_config("lm", model, folder), folder)
    prompt = "the t"
    tokens = data.tokenizer.encode(prompt)
    with torch.inference_mode():
        for _ in range(11):
            logits = module.model.eval()(torch.tensor([tokens]))[0, -1]
            tokens.append(4 + int(logits[4:].argmax()))
    assert sample(module.model, data.tokenizer, prompt, 11, temperature=0) == data.tokenizer.decode(tokens)
    # Far beyond the window of 16.
    assert len(sample(module.model, data.tokenizer, prompt, 60, seed=1)) == 65


@pytest.mark.parametrize("model", MODELS, ids=MODEL_NAMES)
def test_evaluation_sees_every_token_once(model: Any, folder: Path) -> None:
    module, data = _build(_config("lm", model, folder), folder)
    text = data.tokens["test"]
    with torch.inference_mode():
        module.eval()
        windows = [torch.from_numpy(text[start : start + 17]).long() for start in range(0, len(text) - 1, 16)]
        total = sum(
            float(nn.functional.cross_entropy(module.model(row[None, :-1])[0], row[1:], reduction="sum"))
            for row in windows
        )
    assert evaluate(module, data, "test")["test_loss"] == pytest.approx(total / (len(text) - 1), rel=1e-5)


@pytest.fixture(scope="module", params=MODELS, ids=MODEL_NAMES)
def memorised(request: pytest.FixtureRequest, folder: Path) -> tuple[Task, Any]:
    """A model that was trained on the twenty pairs until it knows them."""
    size = {"d_model": 64, "num_layers": None, "d_embed": None, "num_heads": 2, "d_ff": None}
    given = {name: value for name, value in size.items() if hasattr(request.param, name)}
    config = _config("translation", resolve_model(replace(request.param, **given)), folder)
    # Whole words as tokens make the sentences short, and all of them fit one batch.
    config.data = replace(config.data, tokenizer=Tokenizer.bpe, vocab_size=400)
    config.optim.lr, config.optim.warmup_steps = 5e-3, 20
    config.trainer.max_steps = 120
    module, data = _build(config, folder)
    trainer(max_steps=config.trainer.max_steps, limit_val_batches=0).fit(module, data)
    return module, data


def test_a_small_corpus_is_learned_by_heart(memorised: tuple[Task, Any]) -> None:
    module, data = memorised
    scores = module.final_scores(data, "test")
    assert scores["test_bleu"] > 90
    assert scores["test_chrf"] > 90
    assert len(module.hypotheses["test"]) == 20
    assert evaluate(module, data, "test")["test_accuracy"] > 0.95


def test_beams_agree_with_greedy_search_where_the_model_is_sure(memorised: tuple[Task, Any]) -> None:
    module, data = memorised
    sources = [source for source, _ in data.test_texts]
    greedy = translate_texts(module, data, sources)
    assert translate_texts(module, data, sources, beam_size=3) == greedy
    # Each alone, with no padding around it.
    assert [translate_texts(module, data, [source])[0] for source in sources] == greedy
