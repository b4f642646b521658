"""The Transformer's two models: a decoder for language modelling, encoder and decoder for translation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rmsrepro.models.attention import padding_mask
from rmsrepro.models.embedding import OutputProjection
from rmsrepro.models.interface import LanguageModel, TranslationModel
from rmsrepro.models.masks import counted_targets, needed_mask, zero_padding
from rmsrepro.models.stack import Source, TransformerShape, TransformerStack, TransformerState


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

    A norm over positions sees, in training, the tokens of all sources in the encoder and those of all targets
    in the decoder: the statistics of a target position are partly those of later ones.
    """

    def __init__(self, shape: TransformerShape, src_vocab: int, tgt_vocab: int) -> None:
        super().__init__()
        self.position_limit = shape.position_limit
        self.masks_norms = shape.norm.takes_mask
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
        counted = None
        if self.masks_norms:
            counted = counted_targets(tgt_in, src_mask, pad_id=self.pad_id, bos_id=self.bos_id)
        source = self._encode(src, src_mask)
        x = self.decoder(self.tgt_embedding(tgt_in), token_mask=counted, source=source)
        logits: Tensor = self.output(x, self.tgt_embedding.token_embedding)
        return logits

    def start(self, src: Tensor, src_mask: Tensor) -> TransformerState:
        """See `TranslationModel`."""
        return self.decoder.start(self._encode(src, src_mask))

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """See `TranslationModel`; UserError where `position_limit` tokens were already read."""
        x = self.tgt_embedding(tokens.unsqueeze(1), state.position)
        x, state = self.decoder.step(x, state)
        return self.output(x.squeeze(1), self.tgt_embedding.token_embedding), state

    def _encode(self, src: Tensor, src_mask: Tensor) -> Source:
        if src.shape[1] == 0:
            # A batch of empty sentences only: one column of padding gives attention something to look at.
            src = torch.full((src.shape[0], 1), self.pad_id, dtype=src.dtype, device=src.device)
            src_mask = torch.zeros_like(src, dtype=torch.bool)
        token_mask = needed_mask(src_mask)
        attention_mask = None if token_mask is None else padding_mask(token_mask)
        memory = self.encoder(self.src_embedding(src), mask=attention_mask, token_mask=token_mask)
        memory = zero_padding(memory, token_mask, self.empty_source)
        return Source(memory, token_mask, attention_mask)
