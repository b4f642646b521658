"""What `model.size` stands for. An explicit `model.d_model=...` wins over the preset."""

from __future__ import annotations

import dataclasses
from typing import Any

from rmsrepro.config.schema import GRUConfig, ModelConfig, Size, TransformerConfig

TRANSFORMER_SIZES: dict[Size, dict[str, Any]] = {
    Size.tiny: {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 256, "dropout": 0.0},
    Size.small: {"d_model": 256, "num_layers": 3, "num_heads": 4, "d_ff": 1024, "dropout": 0.1},
    # The base Transformer of Vaswani et al. 2017, which Zhang & Sennrich 2019, appendix A.2, trained.
    Size.paper: {"d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "dropout": 0.1},
}
"""num_layers counts the encoder's and the decoder's layers each."""

GRU_SIZES: dict[Size, dict[str, Any]] = {
    Size.tiny: {"d_model": 64, "d_embed": 64, "num_layers": 1, "dropout": 0.0},
    Size.small: {"d_model": 256, "d_embed": 256, "num_layers": 1, "dropout": 0.2},
    # RNNSearch of Zhang & Sennrich 2019, appendix A.1: embeddings 512, hidden 1024.
    Size.paper: {"d_model": 1024, "d_embed": 512, "num_layers": 1, "dropout": 0.0},
}


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Return a copy of `config` whose None fields are filled from the preset of its size."""
    if isinstance(config, TransformerConfig):
        preset = TRANSFORMER_SIZES[config.size]
    elif isinstance(config, GRUConfig):
        preset = GRU_SIZES[config.size]
    else:
        raise TypeError(f"no size presets for {type(config).__name__}")
    missing = {name: value for name, value in preset.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing)
