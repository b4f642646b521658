"""The optimiser and its learning-rate schedule: the same rule for every norm and model.

Weight decay goes by role, not by class name: it reaches the matrices (embeddings and position tables
among them) and nothing else. No parameter of a norm and no bias decays, whatever registered the norm,
so the decayed parameters of two arms that differ only in their norm are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rmsrepro.config.schema import OptimConfig, Schedule
from rmsrepro.norms import norm_parameter_names


def is_bias(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias by role: named like one, or a vector or scalar."""
    last = name.rpartition(".")[2]
    return last == "bias" or last.endswith("_bias") or last.startswith("bias_") or parameter.dim() < 2


def decayed_parameter_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay reaches: neither a norm's own nor a bias."""
    of_norms = norm_parameter_names(model)
    return {
        name
        for name, parameter in model.named_parameters()
        if name not in of_norms and not is_bias(name, parameter)
    }


def learning_rate_factor(config: OptimConfig, max_steps: int) -> Callable[[int], float]:
    """Return f(step), the learning rate of update `step` (counted from 1) over the peak rate.

    With w = warmup_steps, f(step) = step / w up to w, so that f(w) is exactly 1. After it:

    * inverse_sqrt: sqrt(w / step) (Vaswani et al. 2017, section 5.3), with w = 1 for no warm-up;
    * cosine: from 1 down to final_lr_fraction at `max_steps`, and that from then on;
    * constant: 1.
    """
    warmup, final = config.warmup_steps, config.final_lr_fraction

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if config.schedule is Schedule.inverse_sqrt:
            return math.sqrt(max(warmup, 1) / max(step, 1))
        if config.schedule is Schedule.cosine:
            progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
        return 1.0

    return factor


def build_optimizer(
    model: nn.Module, config: OptimConfig, max_steps: int, *, decayed: Collection[str] | None = None
) -> tuple[AdamW, LambdaLR]:
    """Return AdamW (Loshchilov & Hutter 2019) with two groups, decayed first, and its schedule.

    The schedule is stepped once after each update. AdamW's fused kernel is used on every device:
    on a CPU it takes a third of the time of the `foreach` path for models of many small tensors, and
    the two agree to the last bits.

    Args:
        decayed: `decayed_parameter_names`, as they were before the model was wrapped; None: of `model`.
    """
    decayed = decayed_parameter_names(model) if decayed is None else decayed
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for name, parameter in named if name in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        fused=True,
    )
    factor = learning_rate_factor(config, max_steps)
    # LambdaLR counts finished updates from 0: the next update is one more than that.
    return optimizer, LambdaLR(optimizer, lambda finished: factor(finished + 1))
