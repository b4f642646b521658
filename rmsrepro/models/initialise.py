"""Initial parameters, drawn by name.

The values of a parameter depend on the seed, its full name and its shape (and on the model's `scales`),
on nothing else: not on what was built before it, not on the global random state. So models that differ
in their norm only start from the same bits wherever they share a parameter, which is what makes their
runs pairs.

    embedding tables       N(0, 1 / dim)
    recurrent matrices     random orthogonal, each gate's square block by itself (Zhang & Sennrich 2019, A.1)
    other matrices         uniform(-a, a), a = sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010)
    vectors (biases)       zero

Matrices that are several maps in one product (q, k, v; the parts of a GRU) are drawn block by block: the
fans are those of a block. Parameters of norms stay as the norm made them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rmsrepro.norms import norm_parameter_names

FUSED_MAPS = {
    "query_key_value": 3,
    "key_value": 2,
    "gate_up": 2,
    "input_projection": 3,
    "recurrent_projection": 3,
}
"""How many maps of equal size stand one above the other in the matrix of the module of this name."""

# torch.nn.GRU draws what our own loop draws, so that the built-in arm starts as the arm it is compared with.
_SYNONYMS = ((r"weight_ih_l0$", "input_projection.weight"), (r"weight_hh_l0$", "recurrent_projection.weight"))


def initialise(model: nn.Module, seed: int, scales: Mapping[str, float]) -> None:
    """Fill all parameters of `model` but those of its norms, in place.

    Args:
        model: any module.
        seed: the run's seed.
        scales: factors on the standard deviations above, by a pattern of the full name (`*` stands for
            anything); every pattern that matches counts.
    """
    of_norms = norm_parameter_names(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in of_norms:
                continue
            factor = math.prod(scale for pattern, scale in scales.items() if fnmatchcase(name, pattern))
            # Drawn in fp32 whatever the parameter's dtype, so that dtypes start from the same values.
            parameter.copy_(factor * initial_values(name, parameter.shape, seed))


def initial_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the fp32 values of the parameter of this full name and shape, before any `scales`."""
    for pattern, synonym in _SYNONYMS:
        name = re.sub(pattern, synonym, name)
    if len(shape) < 2:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    owner = name.split(".")[-2] if "." in name else ""
    values = torch.empty(shape)
    if owner.endswith("embedding"):
        return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)
    for block in values.chunk(FUSED_MAPS.get(owner, 1)):
        if owner == "recurrent_projection":
            nn.init.orthogonal_(block, generator=generator)
        else:
            nn.init.xavier_uniform_(block, generator=generator)
    return values
