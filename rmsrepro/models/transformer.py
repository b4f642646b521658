"""The Transformer (Vaswani et al. 2017): a decoder for language modelling, encoder-decoder for translation.

Where the norms sit is decided in `blocks.py`. Padding stands on the right, so causal attention hides it
from every token before it; the encoder and the attention to it need a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import FeedForward as FeedForwardKind
from rmsrepro.config.schema import Placement, Positions
from rmsrepro.models.attention import (
    CrossAttention,
    KeysValues,
    Rotation,
    SelfAttention,
    head_dim,
    padding_mask,
    rotation,
)
from rmsrepro.models.blocks import FeedForward, Residual, final_norm
from rmsrepro.models.embedding import OutputProjection, PositionedEmbedding
from rmsrepro.models.interface import LanguageModel, TranslationModel
from rmsrepro.models.masks import needed_mask, zero_padding
from rmsrepro.norms import NormSpec


@dataclass(frozen=True)
class TransformerShape:
    """Everything a Transformer is made of, apart from its vocabulary."""

    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    dropout: float
    positions: Positions
    ffn: FeedForwardKind
    bias: bool
    tie_embeddings: bool
    output_bias: bool
    empty_source: bool
    max_len: int
    """Length of the learned position table; rotary positions have none."""
    norm: NormSpec
    placement: Placement

    @property
    def position_limit(self) -> int | None:
        return self.max_len if self.positions is Positions.learned else None

    def residual(self) -> Residual:
        return Residual(self.d_model, self.norm, self.placement, self.dropout)

    def embedding(self, vocab: int) -> PositionedEmbedding:
        return PositionedEmbedding(vocab, self.d_model, max_len=self.position_limit, dropout=self.dropout)


@dataclass
class TransformerState:
    """The decoder's memory: what each layer may attend to."""

    position: int
    """Tokens read so far."""
    past: list[KeysValues | None]
    """A layer's own keys and values, (B, H, position, E)."""
    memory: list[KeysValues]
    """A layer's keys and values of the source, (B, H, S, E); empty in a language model."""
    memory_mask: Tensor | None
    """(B, 1, 1, S), True where the source may be read; None: everywhere."""

    def select(self, index: Tensor) -> TransformerState:
        """Return the rows `index` (N,)."""
        return TransformerState(
            self.position,
            [None if past is None else past.select(index) for past in self.past],
            [memory.select(index) for memory in self.memory],
            None if self.memory_mask is None else self.memory_mask.index_select(0, index),
        )


class TransformerLayer(nn.Module):
    """Self attention, in a decoder of translation attention to the source, then the feed-forward part."""

    def __init__(self, shape: TransformerShape, *, causal: bool, cross: bool) -> None:
        super().__init__()
        heads, bias = shape.num_heads, shape.bias
        self.self_attention = SelfAttention(shape.d_model, heads, bias=bias, causal=causal)
        self.self_attention_residual = shape.residual()
        self.cross_attention = CrossAttention(shape.d_model, heads, bias=bias) if cross else None
        self.cross_attention_residual = shape.residual() if cross else None
        self.feed_forward = FeedForward(shape.d_model, shape.d_ff, shape.ffn, bias=bias)
        self.feed_forward_residual = shape.residual()

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Rotation | None,
        mask: Tensor | None = None,
        memory: KeysValues | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, T, d) to the next layer's input."""
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, mask=mask, rotary=rotary))
        return self._after_self_attention(x, memory, memory_mask)

    def step(
        self,
        x: Tensor,
        past: KeysValues | None,
        *,
        rotary: Rotation | None,
        memory: KeysValues | None,
        memory_mask: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Do the same for one new position x (B, 1, d); return also the longer past."""
        longer: list[KeysValues] = []

        def attend(y: Tensor) -> Tensor:
            mixed, keys_values = self.self_attention.step(y, past, rotary)
            longer.append(keys_values)
            return mixed

        x = self.self_attention_residual(x, attend)
        return self._after_self_attention(x, memory, memory_mask), longer[0]

    def read(self, memory: Tensor) -> KeysValues:
        """Return this layer's keys and values of the encoder's output (B, S, d)."""
        if self.cross_attention is None:
            raise RuntimeError("this layer has no attention to an encoder")
        return self.cross_attention.read(memory)

    def _after_self_attention(
        self, x: Tensor, memory: KeysValues | None, memory_mask: Tensor | None
    ) -> Tensor:
        cross = self.cross_attention
        if cross is not None and self.cross_attention_residual is not None and memory is not None:
            x = self.cross_attention_residual(x, lambda y: cross(y, memory, memory_mask))
        y: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return y


class TransformerStack(nn.Module):
    """The layers and, where the placement has one, the final norm: (B, T, d) -> (B, T, d)."""

    def __init__(self, shape: TransformerShape, *, causal: bool, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(shape, causal=causal, cross=cross) for _ in range(shape.num_layers)
        )
        self.final_norm = final_norm(shape.d_model, shape.norm, shape.placement)
        width = head_dim(shape.d_model, shape.num_heads)
        if shape.positions is Positions.rotary and width % 2:
            raise UserError(
                f"model.positions=rotary turns pairs of units, but model.d_model={shape.d_model} over "
                f"model.num_heads={shape.num_heads} gives heads of {width}; choose an even width"
            )
        self.rotary_dim = width if shape.positions is Positions.rotary else None

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Run all layers; `memory` (B, S, d) is the encoder's output, masks as in `padding_mask`."""
        rotary = self._rotary(0, x)
        for layer in self._layers():
            keys_values = None if memory is None else layer.read(memory)
            x = layer(x, rotary=rotary, mask=mask, memory=keys_values, memory_mask=memory_mask)
        return x if self.final_norm is None else self.final_norm(x)

    def start(self, memory: Tensor | None = None, memory_mask: Tensor | None = None) -> TransformerState:
        """Return the state before the first token."""
        read = [] if memory is None else [layer.read(memory) for layer in self._layers()]
        return TransformerState(0, [None] * len(self.layers), read, memory_mask)

    def step(self, x: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Run all layers on one new position x (B, 1, d)."""
        rotary = self._rotary(state.position, x)
        past: list[KeysValues | None] = []
        for number, layer in enumerate(self._layers()):
            x, longer = layer.step(
                x,
                state.past[number],
                rotary=rotary,
                memory=state.memory[number] if state.memory else None,
                memory_mask=state.memory_mask,
            )
            past.append(longer)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, TransformerState(state.position + 1, past, state.memory, state.memory_mask)

    def _layers(self) -> Iterable[TransformerLayer]:
        return cast("Iterable[TransformerLayer]", self.layers)

    def _rotary(self, start: int, x: Tensor) -> Rotation | None:
        if self.rotary_dim is None:
            return None
        return rotation(start, x.shape[1], self.rotary_dim, x.device)


class TransformerLanguageModel(LanguageModel[TransformerState]):
    """A decoder without encoder (Radford et al. 2018): embed, causal stack, project."""

    def __init__(self, shape: TransformerShape, vocab: int) -> None:
        super().__init__()
        self.position_limit = shape.position_limit
        self.embedding = shape.embedding(vocab)
        self.stack = TransformerStack(shape, causal=True, cross=False)
        self.output = OutputProjection(
            shape.d_model,
            self.embedding.token_embedding,
            tied=shape.tie_embeddings,
            bias=shape.output_bias,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """See `LanguageModel`; UserError where T exceeds `position_limit`."""
        x = self.stack(self.embedding(tokens))
        logits: Tensor = self.output(x, self.embedding.token_embedding)
        return logits

    def step(self, tokens: Tensor, state: TransformerState | None) -> tuple[Tensor, TransformerState]:
        """See `LanguageModel`; UserError where `position_limit` tokens were already read."""
        state = self.stack.start() if state is None else state
        x, state = self.stack.step(self.embedding(tokens.unsqueeze(1), state.position), state)
        return self.output(x.squeeze(1), self.embedding.token_embedding), state


class TransformerTranslation(TranslationModel[TransformerState]):
    """Encoder and decoder of `num_layers` each, source and target embeddings apart.

    An empty sentence reads as the value bias alone, whatever its padding; with `empty_source`, as the keys
    and values of that vector.
    """

    def __init__(self, shape: TransformerShape, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.position_limit = shape.position_limit
        self.src_embedding = shape.embedding(src_vocab)
        self.tgt_embedding = shape.embedding(tgt_vocab)
        self.encoder = TransformerStack(shape, causal=False, cross=False)
        self.decoder = TransformerStack(shape, causal=True, cross=True)
        self.output = OutputProjection(
            shape.d_model,
            self.tgt_embedding.token_embedding,
            tied=shape.tie_embeddings,
            bias=shape.output_bias,
        )
        # What the attention to an empty source finds at its padding. In other rows the padding is hidden.
        self.empty_source = nn.Parameter(torch.zeros(shape.d_model)) if shape.empty_source else None

    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        """See `TranslationModel`; UserError where S or T exceeds `position_limit`."""
        memory, memory_mask = self._encode(src, src_mask)
        x = self.decoder(self.tgt_embedding(tgt_in), memory=memory, memory_mask=memory_mask)
        logits: Tensor = self.output(x, self.tgt_embedding.token_embedding)
        return logits

    def start(self, src: Tensor, src_mask: Tensor) -> TransformerState:
        """See `TranslationModel`."""
        return self.decoder.start(*self._encode(src, src_mask))

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """See `TranslationModel`; UserError where `position_limit` tokens were already read."""
        x = self.tgt_embedding(tokens.unsqueeze(1), state.position)
        x, state = self.decoder.step(x, state)
        return self.output(x.squeeze(1), self.tgt_embedding.token_embedding), state

    def _encode(self, src: Tensor, src_mask: Tensor) -> tuple[Tensor, Tensor | None]:
        if src.shape[1] == 0:
            # A batch of empty sentences only: one column of padding gives attention something to look at.
            src = torch.full((src.shape[0], 1), self.pad_id, dtype=src.dtype, device=src.device)
            src_mask = torch.zeros_like(src, dtype=torch.bool)
        token_mask = needed_mask(src_mask)
        attention_mask = None if token_mask is None else padding_mask(token_mask)
        memory = self.encoder(self.src_embedding(src), mask=attention_mask)
        return zero_padding(memory, token_mask, self.empty_source), attention_mask
