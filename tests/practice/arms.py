"""The norms on their backends, and models of them, that the cases go through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.config.schema import GRUConfig, Placement, Site, TransformerConfig
from rmsrepro.models import build_model
from rmsrepro.norms import NormSpec, list_norms, norm_info
from tests.norms.conftest import ARMS, Arm, skip_without

BACKENDS = ("composite", "torch", "fused")
"""Those that cost no compiling; test_norms_compiled.py has the fourth."""
CHEAP = [arm for arm in ARMS if arm.backend in BACKENDS]
"""Norms of activations on each of these."""
SAME_CLASS = ("mistral_rmsnorm", "qwen_rmsnorm")
"""These are llama_rmsnorm with another eps: whole models of them add nothing."""
EVERYWHERE = [
    Arm(norm, backend)
    for norm in list_norms()
    for backend in BACKENDS
    if backend in norm_info(norm).backends and norm not in SAME_CLASS
]
"""All norms, that of weights too."""
Cell = tuple[str, dict[str, Any]]
CELLS: list[Cell] = [
    ("lm", {"kind": "transformer", "placement": Placement.pre}),
    ("translation", {"kind": "transformer", "placement": Placement.post}),
    ("translation", {"kind": "transformer", "placement": Placement.sandwich, "qk_norm": True}),
    ("lm", {"kind": "transformer", "placement": Placement.res_post}),
    ("translation", {"kind": "transformer", "placement": Placement.none}),
    ("lm", {"kind": "gru"}),
    ("translation", {"kind": "gru"}),
    ("translation", {"kind": "gru", "sites": (Site.gates_h, Site.cand_x)}),
]
"""Every model, task and placement at least once."""
FEW = CELLS[2], CELLS[5], CELLS[6]
"""One of each kind of model."""
SRC_VOCAB, TGT_VOCAB, MAX_LEN = 13, 11, 12


def name(arm: Arm) -> str:
    return f"{arm.norm}-{arm.backend}"


def cells(arm: Arm, chosen: Sequence[Cell] | None = None) -> list[Cell]:
    """Those that the norm may be used in: all of them in plain operations, a few on the other backends."""
    if chosen is None:
        chosen = CELLS if arm.backend == "composite" else FEW
    masked = norm_info(arm.norm).takes_mask
    return [cell for cell in chosen if not (masked and cell[0] == "lm")]


def model(arm: Arm, task: str, place: dict[str, Any]) -> nn.Module:
    """Build a tiny model; vectors are moved off the zeros and ones that they start from."""
    fields = {key: value for key, value in place.items() if key not in ("kind", "placement", "sites")}
    config = (
        GRUConfig(d_model=16, d_embed=12, num_layers=1, dropout=0.0, **fields)
        if place["kind"] == "gru"
        else TransformerConfig(d_model=16, num_layers=1, num_heads=2, d_ff=24, dropout=0.0, **fields)
    )
    built = build_model(
        config,
        task,
        src_vocab=SRC_VOCAB,
        tgt_vocab=TGT_VOCAB,
        max_len=MAX_LEN,
        # By the default p, the RMS of these widths would be that of one entry.
        norm=NormSpec(arm.norm, {"p": 0.5} if arm.norm == "prmsnorm" else {}, backend=arm.backend),
        placement=place.get("placement", Placement.pre),
        sites=place.get("sites", tuple(Site)),
        seed=1,
    )
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


def ragged(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Sources of these lengths, padded to `width`, and their mask."""
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    drawn = torch.randint(1, SRC_VOCAB, mask.shape, generator=torch.Generator().manual_seed(5))
    return drawn.masked_fill(~mask, 0), mask


def targets(rows: int, length: int) -> Tensor:
    return torch.randint(1, TGT_VOCAB, (rows, length), generator=torch.Generator().manual_seed(6))


def inputs(task: str, lengths: list[int], width: int, length: int = 5) -> tuple[Tensor, ...]:
    """What a model of the task reads; a language model has no sources."""
    target = targets(len(lengths), length)
    return (target,) if task == "lm" else (*ragged(lengths, width), target)


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def skip_where_lacking(arm: Arm) -> None:
    """Skip the test where this machine has not the arm's backend."""
    if arm.norm != "none":
        skip_without(arm.backend)
