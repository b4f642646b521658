"""The GRU with four norm sites, as a cell and over a sequence, and the language model made of it.

One step, x the input and h the state of width d (gate order r, u, n and the place of r as in
`torch.nn.GRU`, whose z is u; Cho et al. 2014, Zhang & Sennrich 2019, section 6 with the authors' Nematus
patch)::

    r, u = sigmoid(gates_x(W x + b) + gates_h(U h))       one norm over all 2 d gate units a side
    n    = tanh(cand_x(W_n x + b_n) + r * cand_h(U_n h))  a norm over d a side
    h'   = u * h + (1 - u) * n

where gates_x, gates_h, cand_x and cand_h are norms with their own parameters at the chosen `sites` and
the identity elsewhere. A side of the state that is not normalised keeps the bias that `torch.nn.GRU`
has there, inside r * (U_n h + b_hn); a normalised side has none, its norm's own bias takes its place.
So without any norm (`norm=none`, or no sites) this is `torch.nn.GRU`, computed by the same loop.

The loop runs over time-first tensors (T, B, ...). All that does not depend on the state, the products
with x and their norms, is done for all steps at once before it. Only a norm over positions looks at one step
at a time, on both sides: at the B inputs or states of the step, padding left out (Cooijmans et al. 2017).

A norm of weights normalises the rows of W and U that belong to the chosen sites. Nothing else changes: the
state keeps its biases, as without any norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Site
from rmsrepro.models import fused_gru
from rmsrepro.models.embedding import OutputProjection
from rmsrepro.models.interface import LanguageModel
from rmsrepro.models.normed import effective_weight, linear_for_loop, norm_module
from rmsrepro.norms import BatchNorm, NormSpec, apply_norm, recurrence, takes_mask, weight_normed

Mask = Tensor | None
StepFunction = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
"""(gates_x (B, 2 d), candidate_x (B, d), h (B, d), mask (B,)) -> h' (B, d). The mask is for norms over
positions alone: it does not keep the state of the rows outside."""
Sides = tuple[Tensor, ...]
"""What one step takes of its input: gates (B, 2 d) and candidate (B, d), normed, or in the fused form the raw
product with it alone, (B, 3 d)."""
ProjectFunction = Callable[[Tensor, Mask], tuple[Tensor, Tensor]]
"""(x (B, input_dim), mask (B,)) -> gates_x (B, 2 d), candidate_x (B, d)"""


def batch_norms(*parts: nn.Module) -> list[BatchNorm]:
    """Return the norms of `parts` whose running statistics must know of a loop over time (`recurrence`)."""
    return [module for part in parts for module in part.modules() if isinstance(module, BatchNorm)]


def over_time(mask: Mask, steps: int) -> Sequence[Mask]:
    """Return the mask (T, B) step by step, each (B,), or None as often."""
    return [None] * steps if mask is None else mask.unbind(0)


def normed_steps(norm: nn.Module | None, x: Tensor, mask: Mask) -> Tensor:
    """Normalise x (T, B, dim): all steps at once, or each by itself where positions matter to one another."""
    if norm is None or not takes_mask(norm) or len(x) == 0:
        return apply_norm(norm, x)
    masks = over_time(mask, len(x))
    return torch.stack([apply_norm(norm, now, its) for now, its in zip(x.unbind(0), masks, strict=True)])


class GRULayer(nn.Module):
    """A GRU over a sequence, (T, B, input_dim) -> (T, B, dim), and its step for loops of other kinds.

    The state has the dtype of the products with x at every step (bf16 under bf16 autocast), whatever
    dtype the first state has.
    """

    def __init__(self, input_dim: int, dim: int, norm: NormSpec, sites: Collection[Site]) -> None:
        super().__init__()
        self.dim = dim

        def rows(gates: Site, candidate: Site) -> list[slice] | None:
            """Return what a norm of weights normalises of a matrix with 3 d rows; None: all of it."""
            parts = ((gates, slice(0, 2 * dim)), (candidate, slice(2 * dim, 3 * dim)))
            chosen = [part for site, part in parts if site in sites]
            return None if len(chosen) == 2 else chosen

        def build(site: Site, width: int) -> nn.Module | None:
            return norm_module(norm, width) if site in sites else None

        self.input_projection = weight_normed(
            nn.Linear(input_dim, 3 * dim), norm, rows(Site.gates_x, Site.cand_x)
        )
        self.recurrent_projection = weight_normed(
            nn.Linear(dim, 3 * dim, bias=False), norm, rows(Site.gates_h, Site.cand_h)
        )
        self.norm_gates_x = build(Site.gates_x, 2 * dim)
        self.norm_gates_h = build(Site.gates_h, 2 * dim)
        self.norm_candidate_x = build(Site.cand_x, dim)
        self.norm_candidate_h = build(Site.cand_h, dim)
        self.gates_h_bias = nn.Parameter(torch.zeros(2 * dim)) if self.norm_gates_h is None else None
        self.candidate_h_bias = nn.Parameter(torch.zeros(dim)) if self.norm_candidate_h is None else None
        self.batch_norms = batch_norms(self)
        # Without any norm in it, only the backend that it was asked for says which form a layer has.
        self.fuses_none = norm.scope == "activation" and norm.backend_used == "fused"
        if self.fuses_none:
            fused_gru.chosen_form()  # a wrong one is refused here, before anything runs

    def forward(
        self, x: Tensor, h: Tensor | None = None, mask: Tensor | None = None, *, reverse: bool = False
    ) -> Tensor:
        """Return the states (T, B, d) after each step, in the order of x.

        Args:
            x: inputs (T, B, input_dim).
            h: first state (B, d); None: zeros.
            mask: (T, B) bool, True where there is a token; None: everywhere. Other positions leave the
                state as it is, bit for bit, and get no gradient.
            reverse: read from the last position to the first.
        """
        fused = fused_gru.fused_for(self, x, h, mask)
        if fused is not None:
            return fused_gru.scan(fused, x, h, mask, reverse=reverse)
        with recurrence(self.batch_norms):
            return self._scan(x, h, mask, reverse)

    def _scan(self, x: Tensor, h: Tensor | None, mask: Mask, reverse: bool) -> Tensor:
        gates_x, candidate_x = self.project(x, mask)
        if mask is not None:
            # An update gate of exactly one keeps the state. Said once here, it costs nothing in the loop.
            gates_x = gates_x.masked_fill(~mask.unsqueeze(-1), torch.inf)
        h = x.new_zeros(x.shape[1], self.dim) if h is None else h
        h = h.to(gates_x.dtype)
        step = self.prepare(gates_x.dtype)
        inputs = list(zip(gates_x.unbind(0), candidate_x.unbind(0), over_time(mask, len(x)), strict=True))
        states: list[Tensor] = []
        for now_gates, now_candidate, now_mask in reversed(inputs) if reverse else inputs:
            h = step(now_gates, now_candidate, h, now_mask)
            states.append(h)
        if not states:
            return h.new_zeros(0, *h.shape)
        if reverse:
            states.reverse()
        return torch.stack(states)

    def project(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the x sides of gates (T, B, 2 d) and candidate (T, B, d), normed; x: (T, B, input_dim).

        `mask` (T, B) is True for the inputs that a norm over positions may count.
        """
        gates, candidate = self._split(self.input_projection(x))
        return (
            normed_steps(self.norm_gates_x, gates, mask),
            normed_steps(self.norm_candidate_x, candidate, mask),
        )

    def prepare_projection(self, dtype: torch.dtype) -> ProjectFunction:
        """Return `project` for one step at a time on inputs of `dtype`, prepared as by `prepare`."""
        linear = linear_for_loop(self.input_projection, dtype)
        norm_gates, norm_candidate = self.norm_gates_x, self.norm_candidate_x

        def project(x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
            gates, candidate = self._split(linear(x))
            return apply_norm(norm_gates, gates, mask), apply_norm(norm_candidate, candidate, mask)

        return project

    def prepare(self, dtype: torch.dtype) -> StepFunction:
        """Return the step for states of `dtype`, with all that is the same at each step done once."""
        # Transposed and, under autocast, cast here: autocast would cast this view anew at each step.
        weight = effective_weight(self.recurrent_projection).t().to(dtype)
        bias = self._recurrent_bias(dtype)
        norm_gates, norm_candidate = self.norm_gates_h, self.norm_candidate_h

        def step(gates_x: Tensor, candidate_x: Tensor, h: Tensor, mask: Mask) -> Tensor:
            product = torch.mm(h, weight) if bias is None else torch.addmm(bias, h, weight)
            gates_h, candidate_h = self._split(product)
            gates_h = apply_norm(norm_gates, gates_h, mask)
            candidate_h = apply_norm(norm_candidate, candidate_h, mask)
            reset, update = torch.add(gates_x, gates_h).sigmoid_().chunk(2, 1)
            candidate = torch.addcmul(candidate_x, reset, candidate_h).tanh_()
            return torch.lerp(candidate, h, update)

        return step

    def for_inputs(
        self, x: Tensor, mask: Mask = None
    ) -> tuple[torch.dtype, list[Sides], Callable[[Sides, Tensor, Mask], Tensor]]:
        """Make ready for a loop whose inputs x (T, B, input_dim) are all known before it.

        Returns:
            The dtype of the states, what each step takes of its input, and the step: (that, h (B, d),
            mask (B,)) -> h' (B, d), the mask as in `StepFunction`.
        """
        fused = fused_gru.fused(self, x) if x.numel() else None
        if fused is not None:
            layer, raw = fused, self.input_projection(x)
            inputs: list[Sides] = [(now,) for now in raw.unbind(0)]
            return raw.dtype, inputs, lambda x, h, mask: fused_gru.cell(layer, x[0], h)
        gates, candidate = self.project(x, mask)
        step = self.prepare(gates.dtype)
        inputs = list(zip(gates.unbind(0), candidate.unbind(0), strict=True))
        return gates.dtype, inputs, lambda x, h, mask: step(x[0], x[1], h, mask)

    def for_states(self, h: Tensor) -> Callable[[Tensor, Tensor, Mask], Tensor]:
        """Make ready for a loop whose states are like h (B, d) and whose inputs come up in it.

        Returns:
            The step, from its input: (x (B, input_dim), h (B, d), mask (B,)) -> h' (B, d), the mask as in
            `StepFunction`.
        """
        fused = fused_gru.fused(self, h) if h.numel() else None
        if fused is not None:
            return lambda x, h, mask: fused_gru.cell(fused, self.input_projection(x), h)
        project, step = self.prepare_projection(h.dtype), self.prepare(h.dtype)
        return lambda x, h, mask: step(*project(x, mask), h, mask)

    def _split(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Part (..., 3 d) into gates (..., 2 d) and candidate (..., d)."""
        gates, candidate = product.split((2 * self.dim, self.dim), -1)
        return gates, candidate

    def _recurrent_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the state's biases as one vector (3 d,), zero where a norm takes their place."""
        gates, candidate = self.gates_h_bias, self.candidate_h_bias
        if gates is None and candidate is None:
            return None
        weight = self.recurrent_projection.weight
        parts = (
            weight.new_zeros(2 * self.dim) if gates is None else gates,
            weight.new_zeros(self.dim) if candidate is None else candidate,
        )
        return torch.cat(parts).to(dtype)


class BuiltinGRULayer(nn.GRU):
    """`torch.nn.GRU` with the interface that the language model uses; it has no place for a norm."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__(input_dim, dim)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the states (T, B, d) for x (T, B, input_dim) and the first state h (B, d)."""
        states: Tensor = super().forward(x, None if h is None else h.unsqueeze(0))[0]
        return states


@dataclass
class GRUState:
    """The state of each layer, (B, d), first layer first."""

    hidden: list[Tensor]

    def select(self, index: Tensor) -> GRUState:
        """Return the rows `index` (N,)."""
        return GRUState([h.index_select(0, index) for h in self.hidden])


class GRULanguageModel(LanguageModel[GRUState]):
    """Embed, stacked GRU layers with dropout between, project. The state is zero where a window begins."""

    def __init__(
        self,
        vocab: int,
        *,
        d_embed: int,
        d_model: int,
        num_layers: int,
        dropout: float,
        tie_embeddings: bool,
        norm: NormSpec,
        sites: Collection[Site],
        builtin: bool = False,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, d_embed)
        self.dropout = nn.Dropout(dropout)
        widths = [d_embed] + [d_model] * (num_layers - 1)
        self.layers = nn.ModuleList(
            BuiltinGRULayer(width, d_model) if builtin else GRULayer(width, d_model, norm, sites)
            for width in widths
        )
        self.output = OutputProjection(d_model, self.token_embedding, tied=tie_embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        """See `LanguageModel`."""
        x, _ = self._run(tokens.t(), None)
        # Transposed before the projection: the logits, much the larger tensor, are then contiguous.
        logits: Tensor = self.output(x.transpose(0, 1), self.token_embedding)
        return logits

    def step(self, tokens: Tensor, state: GRUState | None) -> tuple[Tensor, GRUState]:
        """See `LanguageModel`."""
        x, state = self._run(tokens.unsqueeze(0), state)
        return self.output(x.squeeze(0), self.token_embedding), state

    def _run(self, tokens: Tensor, state: GRUState | None) -> tuple[Tensor, GRUState]:
        """Map time-first tokens (T, B) to states (T, B, d) of the last layer, and the layers' last states."""
        x = self.dropout(self.token_embedding(tokens))
        last: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            states = layer(x, None if state is None else state.hidden[number])
            last.append(states[-1])
            x = self.dropout(states)
        return x, GRUState(last)
