"""RNNSearch: the paper's attentional GRU translation model (Bahdanau et al. 2015, as built in Nematus).

Source: Zhang & Sennrich 2019, section 6.1 and appendix A.1, whose base code is Nematus v0.3 (Sennrich et
al. 2017). E is the embeddings' width, d the states', S and T the lengths of source and target::

    annotations  m_i = [forward GRU; backward GRU] of the source, width 2 d
    start        s_0 = tanh(n(W m + b))       m: mean of the m_i, or [last forward; last backward state]
    each step    q   = GRU_1(y, s)                                    y: the last target token's vector
                 e_i = v . tanh(n(W_m m_i + b) + n(W_q q))            (the keys n(W_m m_i + b) only once)
                 c   = sum_i softmax(e)_i m_i
                 s'  = GRU_2(c, q)
    readout      t   = tanh(n(W_s s' + b) + n(W_y y + b) + n(W_c c + b)), width E, then dropout
    logits           = t times the target embedding (tied) or a matrix of its own; no norm, no bias

Each n is a norm of its own. The four norms inside every GRU step (both directions of the encoder, GRU_1
and GRU_2) are governed by `sites`; the six outside (start, two of the attention, three of the readout)
are there with every norm but `none`, whatever `sites` says. Norms in all, with L encoder layers:
(2 L + 2) * len(sites) + 6. A norm of weights normalises the weights of the same maps instead.

A norm over positions sees in training one step at a time within the loops (the GRUs and n(W_q q)), elsewhere
all positions at once: n(W_m m_i + b) those of the sources, the readout those of the targets.

Unlike Nematus, GRU_2 carries its bias on the side of the context, as GRU_1 does on the side of the word
(one cell for both; Nematus adds it on the side of the state), and the logits have no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rmsrepro.config.schema import Site, StartState
from rmsrepro.models.embedding import OutputProjection
from rmsrepro.models.gru import GRULayer, batch_norms, over_time
from rmsrepro.models.interface import TranslationModel
from rmsrepro.models.masks import counted_targets, needed_mask, zero_padding
from rmsrepro.models.normed import for_loop
from rmsrepro.norms import NormSpec, normed_linear, recurrence


@dataclass(frozen=True)
class RNNSearchShape:
    """Everything RNNSearch is made of, apart from its vocabularies."""

    d_embed: int
    d_model: int
    num_layers: int
    """Bidirectional layers of the encoder; the decoder is one conditional GRU, as in the paper."""
    dropout: float
    """On both embeddings, between the encoder's layers and on the readout."""
    tie_embeddings: bool
    start_state: StartState
    norm: NormSpec
    sites: Collection[Site]


@dataclass
class RNNSearchState:
    """The decoder's state and what it needs of the source."""

    hidden: Tensor
    """(B, d)"""
    annotations: Tensor
    """(B, S, 2 d), zero at the padding."""
    keys: Tensor
    """(B, S, 2 d)"""
    padding: Tensor | None
    """(B, S) bool, True at the padding; None: there is none."""

    def select(self, index: Tensor) -> RNNSearchState:
        """Return the rows `index` (N,)."""
        return RNNSearchState(
            self.hidden.index_select(0, index),
            self.annotations.index_select(0, index),
            self.keys.index_select(0, index),
            None if self.padding is None else self.padding.index_select(0, index),
        )


AttendFunction = Callable[[Tensor, Tensor | None], Tensor]
"""(query (B, d), mask (B,) of the rows that a norm over positions may count) -> context (B, 2 d)"""


class AdditiveAttention(nn.Module):
    """c = sum_i softmax_i(v . tanh(n(W_m m_i + b) + n(W_q q))) m_i, as wide inside as the annotations."""

    def __init__(self, query_dim: int, annotation_dim: int, norm: NormSpec) -> None:
        super().__init__()
        self.key = normed_linear(nn.Linear(annotation_dim, annotation_dim), norm)
        # No bias: the key's stands in the same sum.
        self.query = normed_linear(nn.Linear(query_dim, annotation_dim, bias=False), norm)
        self.energy = nn.Linear(annotation_dim, 1, bias=False)

    def prepare(self, state: RNNSearchState) -> AttendFunction:
        """Return the function from a query (B, d) to its context (B, 2 d), for one batch of sentences.

        Padding has weight zero. A row of padding only gets equal weights on annotations that are all
        zero, hence a zero context and finite gradients; so does a source of length 0.
        """
        keys, annotations, padding = state.keys, state.annotations, state.padding
        project = for_loop(self.query, keys.dtype)

        def attend(query: Tensor, mask: Tensor | None) -> Tensor:
            energy = (keys + project(query, mask).unsqueeze(1)).tanh_()
            score: Tensor = self.energy(energy).squeeze(2)
            if padding is not None:
                score = score.masked_fill(padding, torch.finfo(score.dtype).min)
            weight = score.softmax(1).to(annotations.dtype)
            return torch.bmm(weight.unsqueeze(1), annotations).squeeze(1)

        return attend


class BidirectionalEncoder(nn.Module):
    """Stacked pairs of a forward and a backward GRU: (S, B, E) -> (S, B, 2 d)."""

    def __init__(self, shape: RNNSearchShape) -> None:
        super().__init__()
        widths = [shape.d_embed] + [2 * shape.d_model] * (shape.num_layers - 1)

        def direction() -> nn.ModuleList:
            return nn.ModuleList(GRULayer(w, shape.d_model, shape.norm, shape.sites) for w in widths)

        self.forward_layers, self.backward_layers = direction(), direction()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` is (S, B). Over padding the forward half keeps its last state, the backward half is 0."""
        for number, (forward, backward) in enumerate(
            zip(self.forward_layers, self.backward_layers, strict=True)
        ):
            x = self.dropout(x) if number else x
            x = torch.cat((forward(x, mask=mask), backward(x, mask=mask, reverse=True)), -1)
        return x


class RNNSearch(TranslationModel[RNNSearchState]):
    """The model at the top of this module."""

    def __init__(self, shape: RNNSearchShape, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        embed, dim, norm = shape.d_embed, shape.d_model, shape.norm
        self.dim, self.start_state = dim, shape.start_state
        self.src_embedding = nn.Embedding(src_vocab, embed)
        self.tgt_embedding = nn.Embedding(tgt_vocab, embed)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = BidirectionalEncoder(shape)
        self.start_projection = normed_linear(nn.Linear(2 * dim, dim), norm)
        self.first = GRULayer(embed, dim, norm, shape.sites)
        self.attention = AdditiveAttention(dim, 2 * dim, norm)
        self.second = GRULayer(2 * dim, dim, norm, shape.sites)
        self.readout_state = normed_linear(nn.Linear(dim, embed), norm)
        self.readout_word = normed_linear(nn.Linear(embed, embed), norm)
        self.readout_context = normed_linear(nn.Linear(2 * dim, embed), norm)
        self.masks_norms = norm.takes_mask
        self.loop_batch_norms = batch_norms(self.first, self.attention.query, self.second)
        self.output = OutputProjection(embed, self.tgt_embedding, tied=shape.tie_embeddings)

    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        """See `TranslationModel`."""
        counted = None
        if self.masks_norms:
            counted = counted_targets(tgt_in, src_mask, pad_id=self.pad_id, bos_id=self.bos_id)
        words = self.dropout(self.tgt_embedding(tgt_in.t()))
        start = self.start(src, src_mask)
        states, contexts = self._decode(words, start, None if counted is None else counted.t())
        # Batch first before the readout: the logits, much the largest tensor, are then contiguous.
        parts = (part.transpose(0, 1) for part in (states, words, contexts))
        return self._read_out(*parts, mask=counted)

    def start(self, src: Tensor, src_mask: Tensor) -> RNNSearchState:
        """See `TranslationModel`."""
        mask = needed_mask(src_mask)
        x = self.encoder(self.dropout(self.src_embedding(src.t())), None if mask is None else mask.t())
        annotations = zero_padding(x.transpose(0, 1).contiguous(), mask)
        if self.start_state is StartState.mean:
            length = src_mask.sum(1, keepdim=True).clamp(min=1)
            summary = annotations.sum(1) / length.to(annotations.dtype)
        elif src.shape[1] == 0:
            summary = annotations.sum(1)
        else:
            # The forward GRU carries its last state over the padding; the backward one ends at position 0.
            summary = torch.cat((x[-1, :, : self.dim], x[0, :, self.dim :]), -1)
        rows = src_mask.any(1) if self.masks_norms else None
        hidden = torch.tanh(self.start_projection(summary, rows))
        padding = None if mask is None else ~mask
        return RNNSearchState(hidden, annotations, self.attention.key(annotations, mask), padding)

    def step(self, tokens: Tensor, state: RNNSearchState) -> tuple[Tensor, RNNSearchState]:
        """See `TranslationModel`."""
        word = self.dropout(self.tgt_embedding(tokens.unsqueeze(0)))
        states, contexts = self._decode(word, state)
        logits = self._read_out(states[0], word[0], contexts[0])
        return logits, RNNSearchState(states[0], state.annotations, state.keys, state.padding)

    def _decode(
        self, words: Tensor, state: RNNSearchState, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map words (T, B, E) to the states (T, B, d) and contexts (T, B, 2 d) after each.

        `mask` (T, B) is True for the words that a norm over positions may count.
        """
        with recurrence(self.loop_batch_norms):
            dtype, inputs, first = self.first.for_inputs(words, mask)
            hidden = state.hidden.to(dtype)
            second, attend = self.second.for_states(hidden), self.attention.prepare(state)
            states: list[Tensor] = []
            contexts: list[Tensor] = []
            for word, now_mask in zip(inputs, over_time(mask, len(words)), strict=True):
                query = first(word, hidden, now_mask)
                context = attend(query, now_mask)
                hidden = second(context, query, now_mask)
                states.append(hidden)
                contexts.append(context)
        return torch.stack(states), torch.stack(contexts)

    def _read_out(
        self, state: Tensor, word: Tensor, context: Tensor, *, mask: Tensor | None = None
    ) -> Tensor:
        """Return logits (..., V) for states (..., d), words (..., E) and contexts (..., 2 d).

        `mask` (...) is True for the positions that a norm over positions may count.
        """
        mixed = (
            self.readout_state(state, mask)
            + self.readout_word(word, mask)
            + self.readout_context(context, mask)
        )
        logits: Tensor = self.output(self.dropout(torch.tanh(mixed)), self.tgt_embedding)
        return logits
