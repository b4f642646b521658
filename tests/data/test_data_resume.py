"""The stream under Lightning: accumulation, a stop in the middle, validation in between."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rmsrepro.config.schema import DataConfig, PydocConfig
from rmsrepro.data import build_data
from rmsrepro.data.lm import LMData
from rmsrepro.data.translation import TranslationData


class Recorder(L.LightningModule):
    """Trains one number and remembers the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.inputs if hasattr(batch, "inputs") else batch.src).flatten().tolist())
        return self.weight**2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.num_tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(params=["lm", "translation"])
def make(request: pytest.FixtureRequest, tmp_path: Path, multi30k: Path) -> Any:
    from rmsrepro.config.schema import Multi30kConfig, Tokenizer

    config: DataConfig = PydocConfig(max_len=16, batch_tokens=64)
    if request.param == "translation":
        config = Multi30kConfig(
            path=str(multi30k), tokenizer=Tokenizer.char, batch_tokens=96, max_len=32, batch_sentences=2
        )

    def build() -> LMData | TranslationData:
        return build_data(config, request.param, seed=3, accumulate=2, cache_dir=tmp_path / "cache")

    return build


def fit(data: Any, steps: int, **more: Any) -> tuple[Recorder, L.Trainer]:
    module = Recorder()
    trainer = L.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(module, datamodule=data, **more)
    return module, trainer


def flat(batch: Any) -> list[int]:
    values: list[int] = (batch.inputs if hasattr(batch, "inputs") else batch.src).flatten().tolist()
    return values


def test_a_resumed_run_sees_the_same_batches(make: Any, tmp_path: Path) -> None:
    whole, _ = fit(make(), 10)
    assert len(whole.seen) == 20
    data = make()
    assert whole.seen == [flat(data.batch_at(number)) for number in range(20)]

    first, trainer = fit(data, 4)
    assert first.seen == whole.seen[:8]
    path = tmp_path / "stopped.ckpt"
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    assert stored[type(data).__qualname__] == {"batches": 8, "updates": 4}

    rest, _ = fit(make(), 10, ckpt_path=path)
    assert rest.seen == whole.seen[8:]
    predicted = sum(batch.num_tokens for batch in data.val_dataloader())
    assert first.validated == 2 * predicted  # after every 4 batches, each time whole


def test_position_can_be_set(make: Any) -> None:
    data = make()
    expected = [flat(batch) for batch in islice(data.train_dataloader(), 9)]
    data.start_batch = 5
    loader = data.train_dataloader()
    assert [flat(batch) for batch in islice(loader, 4)] == expected[5:]
    assert data.position == 9
    assert [flat(batch) for batch in islice(loader, 3)] == expected[5:8]  # each iteration starts there

    other = make()
    other.load_state_dict(data.state_dict())
    assert other.start_batch == 8
    assert other.position == 8
    other.load_state_dict({"batches": 7, "updates": 7})  # of a run with accumulate=1
    assert other.start_batch == 8  # where an update of two batches begins


def test_the_dropout_stream_is_left_alone(make: Any) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    data = make()
    list(islice(data.train_dataloader(), 5))
    list(data.val_dataloader())
    list(data.test_dataloader())
    assert torch.equal(torch.random.get_rng_state(), before)
