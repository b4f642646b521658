"""A pre-norm LayerNorm Transformer rewritten as an equal one with RMSNorm.

The idea is that of Jiang et al. 2023, "Pre-RMSNorm and Pre-CRMSNorm Transformers". In `pre` every reader of
the residual stream is a norm, and LayerNorm takes its input's mean away. So the stream may be centred
beforehand: everything that writes into it is multiplied by I - 11'/d (the rows of the embeddings and
position tables, the output maps of attention and feed-forward part, and their biases). The stream's mean is
then zero, and on such rows

    LayerNorm(x) = (x - mean) / sqrt(var + eps) * g + b = x / sqrt(mean(x^2) + eps) * g + b = RMSNorm(x) + b

with the same eps in the same place. Gains and biases go into the linear maps that read the norm:
W (g * r + b) + c = (W diag g) r + (W b + c). Three places need more than that:

* A linear map without bias gets one where b is not zero (`model.bias=true`).
* The final norm is read by the vocabulary's matrix. Its bias becomes a bias of the logits
  (`model.output_bias=true`), and a gain other than one unties the matrix from the embedding
  (`model.tie_embeddings=false`). With a gain of one the two stay tied: a stream of mean zero does not see
  whether the matrix was centred.
* The encoder's final norm keeps its gain. Its bias b goes into the keys and values of each decoder layer. But
  an empty source, read as zeros behind that norm, never had the bias: it now reads as -b
  (`model.empty_source=true`), which takes it off again.

Norms of queries and keys (`model.qk_norm`) read no stream: the units of each head are centred in the maps
before them, and they keep their gains. A bias of theirs acts behind the norm, where no linear map follows, so
it stays, and `norm.bias=true` then gives every other norm a bias of zero.

Equal means: in evaluation mode, up to rounding. In training, dropout and the optimiser go other ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.schema import ModelConfig, Placement, TransformerConfig
from rmsrepro.norms import BackendUnavailable, NormSpec, resolve_backend, resolve_params

TARGETS = ("rmsnorm",)
SOURCES = ("layernorm", "layernorm_nobias")
WHAT_CAN_BE = (
    "what can be converted: model=transformer with placement=pre and norm=layernorm or layernorm_nobias, "
    "to=rmsnorm"
)


@dataclass(frozen=True)
class Conversion:
    """The equal model: its configuration and its weights."""

    model: TransformerConfig
    norm: NormSpec
    state: dict[str, Tensor]
    """By the names of the new model, in fp64."""


def check_convertible(model: ModelConfig, norm: NormSpec, placement: Placement, to: str) -> None:
    """Raise UserError, saying why, unless such a model can be rewritten with the norm `to`."""
    if to not in TARGETS:
        raise UserError(f"to={to}: there is no conversion to it{nearest(to, TARGETS)} ({WHAT_CAN_BE})")
    if norm.name == to:
        raise UserError(f"norm={to} already: there is nothing to convert")
    if not isinstance(model, TransformerConfig):
        raise UserError(
            f"model={model.name}: its norms stand inside the recurrence, where nothing centres their input; "
            f"{WHAT_CAN_BE}"
        )
    if norm.name not in SOURCES:
        raise UserError(
            f"norm={norm.name}: only LayerNorm becomes RMSNorm once the stream has mean zero; {WHAT_CAN_BE}"
        )
    if placement is not Placement.pre:
        raise UserError(
            f"placement={placement.value}: {_WHY_NOT[placement]}, so the stream cannot be kept at mean zero; "
            f"{WHAT_CAN_BE}"
        )


_WHY_NOT = {
    Placement.post: "the norm's gain and bias act on the residual stream itself",
    Placement.sandwich: "a gain and bias stand between each branch and the residual stream",
    Placement.res_post: "a gain and bias stand between each branch and the residual stream",
    Placement.none: "there is no norm",
}


def convert_to_rmsnorm(
    model: ModelConfig, norm: NormSpec, placement: Placement, state: Mapping[str, Tensor]
) -> Conversion:
    """Rewrite a model, as the module's text says.

    Args:
        model: its resolved configuration.
        norm: its norm.
        placement: where its norms sit.
        state: its parameters by name, as `model.state_dict()` gives them; they are not changed.

    Raises:
        UserError: it is none of the models that can be rewritten (`check_convertible`).
        ValueError: `state` is not that of such a model.
    """
    check_convertible(model, norm, placement, "rmsnorm")
    assert isinstance(model, TransformerConfig)
    return _Rewriting(model, norm, state).result()


class _Rewriting:
    """Works through the parameters; each is dealt with once, and none is left out."""

    def __init__(self, model: TransformerConfig, norm: NormSpec, state: Mapping[str, Tensor]) -> None:
        self.model, self.norm = model, norm
        self.old = {name: tensor.detach().double() for name, tensor in state.items()}
        self.new: dict[str, Tensor] = {}
        self.dealt_with: set[str] = set()
        biases = [tensor for name, tensor in self.old.items() if ".norm_input.bias" in name]
        biases += [self.old[name] for name in ("encoder.final_norm.bias",) if name in self.old]
        self.bias = model.bias or any(bool(bias.any()) for bias in biases)
        kept = [tensor for name, tensor in self.old.items() if name.endswith(_KEPT_BIASES)]
        self.norm_bias = any(bool(bias.any()) for bias in kept)
        self.translates = "src_embedding.token_embedding.weight" in self.old

    def result(self) -> Conversion:
        if self.translates:
            self._embedding("src_embedding")
            self._embedding("tgt_embedding")
            memory_bias = self._stack("encoder")
            self._stack("decoder", memory_bias)
            empty_source = self._empty_source(memory_bias)
            tied, output_bias = self._output("decoder.final_norm", "tgt_embedding")
        else:
            self._embedding("embedding")
            self._stack("stack")
            empty_source = False
            tied, output_bias = self._output("stack.final_norm", "embedding")
        left = sorted(set(self.old) - self.dealt_with)
        if left:
            raise ValueError(f"parameters of no Transformer that can be converted: {', '.join(left)}")
        config = replace(
            self.model,
            bias=self.bias,
            tie_embeddings=tied,
            output_bias=output_bias,
            empty_source=empty_source,
        )
        if self.norm_bias:
            for name in [name for name in self.old if _is_norm(name) and name.endswith(".bias")]:
                self.new.setdefault(name, torch.zeros_like(self.old[name]))
        return Conversion(config, _as_rmsnorm(self.norm, bias=self.norm_bias), self.new)

    def _stack(self, stack: str, memory_bias: Tensor | None = None) -> Tensor | None:
        """Rewrite a stack's layers; return the bias that its final norm has lost."""
        up = "up" if f"{stack}.layers.0.feed_forward.up.weight" in self.old else "gate_up"
        for number in range(self.model.num_layers or 0):
            layer = f"{stack}.layers.{number}"
            self._read(
                f"{layer}.self_attention_residual.norm_input", f"{layer}.self_attention.query_key_value"
            )
            self._heads(f"{layer}.self_attention", "query_key_value", "query_key_value")
            self._write(f"{layer}.self_attention.output")
            if stack == "decoder":
                self._read(f"{layer}.cross_attention_residual.norm_input", f"{layer}.cross_attention.query")
                self._map(f"{layer}.cross_attention.key_value", None, memory_bias)
                self._heads(f"{layer}.cross_attention", "query", "key_value")
                self._write(f"{layer}.cross_attention.output")
            self._read(f"{layer}.feed_forward_residual.norm_input", f"{layer}.feed_forward.{up}")
            self._write(f"{layer}.feed_forward.down")
        if stack != "encoder":
            return None
        gain, bias = self._norm("encoder.final_norm")
        if gain is not None:
            self.new["encoder.final_norm.weight"] = gain
        return bias

    def _embedding(self, name: str) -> None:
        """Centre each token's and each position's vector."""
        for table in ("token_embedding", "position_embedding"):
            rows = self._take(f"{name}.{table}.weight")
            if rows is not None:
                self.new[f"{name}.{table}.weight"] = rows - rows.mean(-1, keepdim=True)

    def _write(self, name: str) -> None:
        """Centre what a linear map adds to the stream."""
        self._map(name, None, None)
        weight = self.new[f"{name}.weight"]
        self.new[f"{name}.weight"] = weight - weight.mean(0, keepdim=True)
        if self.bias:
            self.new[f"{name}.bias"] = self.new[f"{name}.bias"] - self.new[f"{name}.bias"].mean()

    def _read(self, norm: str, name: str) -> None:
        """Fold the gain and bias of a norm into the linear map that reads it."""
        gain, bias = self._norm(norm)
        if gain is not None:
            self.new[f"{norm}.weight"] = torch.ones_like(gain)
        self._map(name, gain, bias)

    def _map(self, name: str, gain: Tensor | None, bias: Tensor | None) -> None:
        """Write W diag(gain) and W bias + c, for a linear map W x + c."""
        weight, own = self._need(f"{name}.weight"), self._take(f"{name}.bias")
        self.new[f"{name}.weight"] = weight if gain is None else weight * gain
        if self.bias:
            folded = weight.new_zeros(len(weight)) if own is None else own
            self.new[f"{name}.bias"] = folded if bias is None else folded + weight @ bias

    def _heads(self, attention: str, query: str, key: str) -> None:
        """Centre the units of each head of queries and keys, where a norm reads them; it keeps its gain."""
        if not self.model.qk_norm:
            return
        dim, heads = self.model.d_model or 0, self.model.num_heads or 1
        # Queries stand before keys, and those before values.
        for name, rows in {query: dim, key: 2 * dim if query == key else dim}.items():
            for part in ("weight", "bias"):
                stored = self.new.get(f"{attention}.{name}.{part}")
                if stored is None:
                    continue
                by_head = stored[:rows].unflatten(0, (-1, dim // heads))
                centred = (by_head - by_head.mean(1, keepdim=True)).flatten(0, 1)
                self.new[f"{attention}.{name}.{part}"] = torch.cat((centred, stored[rows:]))
        for norm in ("norm_query", "norm_key"):
            gain, bias = self._norm(f"{attention}.{norm}")
            if gain is not None:
                self.new[f"{attention}.{norm}.weight"] = gain
            if bias is not None and self.norm_bias:
                self.new[f"{attention}.{norm}.bias"] = bias

    def _output(self, norm: str, embedding: str) -> tuple[bool, bool]:
        """Rewrite the way to the logits; return whether it is tied, and whether it has a bias."""
        gain, bias = self._norm(norm)
        if gain is not None:
            self.new[f"{norm}.weight"] = torch.ones_like(gain)
        tied = self.model.tie_embeddings
        matrix = self._need(f"{embedding}.token_embedding.weight" if tied else "output.vocabulary.weight")
        if gain is not None and bool((gain != 1).any()):
            tied = False
            self.new["output.vocabulary.weight"] = matrix * gain
        elif not tied:
            self.new["output.vocabulary.weight"] = matrix
        own = self._take("output.bias")
        if bias is not None and bool(bias.any()):
            own = matrix @ bias + (0.0 if own is None else own)
        if own is not None:
            self.new["output.bias"] = own
        return tied, own is not None

    def _empty_source(self, memory_bias: Tensor | None) -> bool:
        """Let an empty source read as it did; return whether it needs a vector for that."""
        own = self._take("empty_source")
        if memory_bias is not None and bool(memory_bias.any()):
            own = -memory_bias if own is None else own - memory_bias
        if own is not None:
            self.new["empty_source"] = own
        return own is not None

    def _norm(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        return self._take(f"{name}.weight"), self._take(f"{name}.bias")

    def _need(self, name: str) -> Tensor:
        found = self._take(name)
        if found is None:
            raise ValueError(f"{name} is missing")
        return found

    def _take(self, name: str) -> Tensor | None:
        self.dealt_with.add(name)
        return self.old.get(name)


_KEPT_BIASES = (".norm_query.bias", ".norm_key.bias")


def _is_norm(name: str) -> bool:
    return name.split(".")[-2] in ("norm_input", "final_norm", "norm_query", "norm_key")


def _as_rmsnorm(norm: NormSpec, *, bias: bool) -> NormSpec:
    """RMSNorm with the eps, and with a gain where the LayerNorm has one; defaults are left out."""
    found, default = resolve_params(norm.name, **norm.params), resolve_params("rmsnorm")
    kept = {
        key: getattr(value, "value", value)
        for key in ("eps", "eps_position", "gain")
        if (value := getattr(found, key)) != getattr(default, key)
    }
    spec = NormSpec("rmsnorm", {**kept, **({"bias": True} if bias else {})}, norm.backend)
    try:
        resolve_backend([spec], spec.backend)
    except BackendUnavailable:
        return replace(spec, backend="auto")
    return spec
