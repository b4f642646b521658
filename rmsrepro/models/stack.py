"""The layers of a Transformer (Vaswani et al. 2017), one above the other, and a decoder's memory of them.

Where the norms sit is decided in `blocks.py`. Padding stands on the right, so causal attention hides it
from every token before it; the encoder and the attention to it need a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

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
    rotation,
)
from rmsrepro.models.blocks import FeedForward, Residual, Stream, final_norm, norm_of, whole
from rmsrepro.models.embedding import PositionedEmbedding
from rmsrepro.norms import NormSpec
from rmsrepro.norms.adding import watched


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
    qk_norm: bool
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


@dataclass(frozen=True)
class Source:
    """What a decoder attends to: the encoder's output, and where in it there is something."""

    memory: Tensor
    """(B, S, d)"""
    token_mask: Tensor | None
    """(B, S), True where there is a token; None: everywhere."""
    attention_mask: Tensor | None
    """(B, 1, 1, S), True where attention may look; None: everywhere."""


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
        dim, heads, norm = shape.d_model, shape.num_heads, shape.norm
        qk_norm, bias = shape.qk_norm, shape.bias
        self.self_attention = SelfAttention(dim, heads, norm, qk_norm=qk_norm, bias=bias, causal=causal)
        self.self_attention_residual = shape.residual()
        self.cross_attention = CrossAttention(dim, heads, norm, qk_norm=qk_norm, bias=bias) if cross else None
        self.cross_attention_residual = shape.residual() if cross else None
        self.feed_forward = FeedForward(dim, shape.d_ff, shape.ffn, norm, bias=bias)
        self.feed_forward_residual = shape.residual()

    def forward(
        self,
        x: Stream,
        *,
        rotary: Rotation | None,
        mask: Tensor | None = None,
        token_mask: Tensor | None = None,
        source: Source | None = None,
        leave_sum: bool = False,
    ) -> Stream:
        """Map the stream (B, T, d) to the next layer's input; see `TransformerStack.forward`.

        With `leave_sum` its last sum may be left to who comes next: see `Residual`.
        """
        memory = None if source is None else self.read(source)
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(y, mask=mask, token_mask=token_mask, rotary=rotary),
            token_mask,
            leave_sum=self.alone(),
        )
        memory_mask = None if source is None else source.attention_mask
        return self._after_self_attention(x, memory, memory_mask, token_mask, leave_sum=leave_sum)

    def step(
        self,
        x: Stream,
        past: KeysValues | None,
        *,
        rotary: Rotation | None,
        memory: KeysValues | None,
        memory_mask: Tensor | None,
    ) -> tuple[Stream, KeysValues]:
        """Do the same for one new position (B, 1, d); return also the longer past."""
        longer: list[KeysValues] = []

        def attend(y: Tensor) -> Tensor:
            mixed, keys_values = self.self_attention.step(y, past, rotary)
            longer.append(keys_values)
            return mixed

        alone = self.alone()
        x = self.self_attention_residual(x, attend, leave_sum=alone)
        return self._after_self_attention(x, memory, memory_mask, leave_sum=alone), longer[0]

    def alone(self) -> bool:
        """Whether nobody sees what passes between the blocks of this layer, or between it and the next."""
        parts = (
            self,
            self.self_attention_residual,
            self.cross_attention_residual,
            self.feed_forward_residual,
        )
        return not any(watched(part) for part in parts if part is not None)

    def read(self, source: Source) -> KeysValues:
        """Return this layer's keys and values of the source."""
        if self.cross_attention is None:
            raise RuntimeError("this layer has no attention to an encoder")
        return self.cross_attention.read(source.memory, source.token_mask)

    def _after_self_attention(
        self,
        x: Stream,
        memory: KeysValues | None,
        memory_mask: Tensor | None,
        token_mask: Tensor | None = None,
        *,
        leave_sum: bool,
    ) -> Stream:
        cross = self.cross_attention
        if cross is not None and self.cross_attention_residual is not None and memory is not None:
            x = self.cross_attention_residual(
                x, lambda y: cross(y, memory, memory_mask, token_mask), token_mask, leave_sum=self.alone()
            )
        y: Stream = self.feed_forward_residual(x, self.feed_forward, token_mask, leave_sum=leave_sum)
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
        token_mask: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            x: (B, T, d).
            mask: of the self attention, as `padding_mask` makes it.
            token_mask: (B, T), True for the tokens that a norm over positions may count; None: all.
            source: what a decoder attends to.
        """
        rotary = self._rotary(0, x)
        stream: Stream = x
        for layer in self._layers():
            # A layer that is wrapped or watched gives and is given tensors.
            ours: dict[str, bool] = {}
            if type(layer) is TransformerLayer and layer.alone():
                ours["leave_sum"] = True
            else:
                stream = whole(stream)
            stream = layer(stream, rotary=rotary, mask=mask, token_mask=token_mask, source=source, **ours)
        return norm_of(self.final_norm, stream, token_mask)[1]

    def start(self, source: Source | None = None) -> TransformerState:
        """Return the state before the first token."""
        past: list[KeysValues | None] = [None] * len(self.layers)
        if source is None:
            return TransformerState(0, past, [], None)
        memory = [layer.read(source) for layer in self._layers()]
        return TransformerState(0, past, memory, source.attention_mask)

    def step(self, x: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Run all layers on one new position x (B, 1, d)."""
        rotary = self._rotary(state.position, x)
        past: list[KeysValues | None] = []
        stream: Stream = x
        for number, layer in enumerate(self._layers()):
            stream, longer = layer.step(
                stream,
                state.past[number],
                rotary=rotary,
                memory=state.memory[number] if state.memory else None,
                memory_mask=state.memory_mask,
            )
            past.append(longer)
        x = norm_of(self.final_norm, stream)[1]
        return x, TransformerState(state.position + 1, past, state.memory, state.memory_mask)

    def _layers(self) -> Iterable[TransformerLayer]:
        return cast("Iterable[TransformerLayer]", self.layers)

    def _rotary(self, start: int, x: Tensor) -> Rotation | None:
        if self.rotary_dim is None:
            return None
        return rotation(start, x.shape[1], self.rotary_dim, x.device)
