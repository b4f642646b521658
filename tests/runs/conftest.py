from __future__ import annotations

from collections.abc import Callable

import pytest

from rmsrepro.config.compose import to_train_config
from rmsrepro.config.overrides import split_override
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import TrainConfig
from rmsrepro.verbs.common import composer

TINY = {
    "lm": ["task=lm", "data=pydoc", "data.max_len=16", "data.batch_tokens=64"],
    "translation": [
        "task=translation", "data=cldr", "data.num_train=200", "data.num_val=20", "data.num_test=20",
        "data.max_len=48", "data.batch_tokens=256", "task.max_decode_len=8",
    ],
}  # fmt: skip
SMALL = [
    "model.d_model=16",
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.log_every=1",
    "tracker=none",
]


@pytest.fixture
def make_config() -> Callable[..., TrainConfig]:
    """Compose a tiny resolved config: `make_config("gru", "lm", "norm=rmsnorm")`."""

    def make(model: str, task: str, *overrides: str) -> TrainConfig:
        texts = [f"model={model}", *TINY[task], *SMALL, *overrides]
        merged = {item.key: item for item in map(split_override, texts)}
        with composer(list(merged.values())) as opened:
            return resolve(to_train_config(opened.raw(list(merged.values()))))

    return make
