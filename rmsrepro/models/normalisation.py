"""How a model is normalised, kept in its state dict, so that no model of another norm takes its weights.

Many norms have the same parameters: the gain of a LayerNorm fits an RMSNorm by name and shape, and the model
would run on as if nothing had happened. So each model notes its norm in the metadata of its state dict (what
`torch.save` keeps beside the tensors), and refuses one that was made with another. A state dict without the
note, for instance one rebuilt as a plain dict, is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import override_text
from rmsrepro.config.schema import ModelConfig, Placement, Site, TransformerConfig
from rmsrepro.config.shell import command
from rmsrepro.norms import NormSpec, norm_info

NOTE = "rmsrepro.norm"
"""The entry of a state dict's metadata."""


@dataclass(frozen=True)
class Normalisation:
    """A norm, its parameters and its places; not its backend, which is the same function."""

    name: str
    params: Mapping[str, Any]
    """All of them, defaults and presets filled in, as plain values."""
    placement: str | None
    """Of a Transformer whose norm is a module on activations."""
    sites: tuple[str, ...] | None
    """Of a GRU with a norm."""
    qk_norm: bool = False
    """Whether a Transformer's queries and keys are normalised."""

    @classmethod
    def of(
        cls, model: ModelConfig, norm: NormSpec, placement: Placement, sites: Sequence[Site]
    ) -> Normalisation:
        """Return how a model of this configuration is normalised."""
        transformer = isinstance(model, TransformerConfig)
        modules = norm.scope == "activation" and not norm.is_none
        return cls(
            norm.name,
            _complete(norm.name, norm.params),
            placement=placement.value if transformer and modules else None,
            sites=None if transformer or norm.is_none else tuple(sorted(site.value for site in sites)),
            qk_norm=isinstance(model, TransformerConfig) and model.qk_norm and modules,
        )

    def note(self) -> dict[str, Any]:
        """Return plain values, which any file may hold."""
        sites = None if self.sites is None else list(self.sites)
        note = {"name": self.name, "params": dict(self.params), "placement": self.placement, "sites": sites}
        return {**note, "qk_norm": self.qk_norm}

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> Normalisation:
        """Read a `note`; parameters that are newer than it get their defaults."""
        name, sites = str(note["name"]), note.get("sites")
        return cls(
            name,
            _complete(name, note["params"]),
            note.get("placement"),
            None if sites is None else tuple(sites),
            bool(note.get("qk_norm", False)),
        )

    def differences(self, other: Normalisation) -> list[str]:
        """Return the overrides that tell this normalisation from `other`; the norm's name is always told."""
        words = [f"norm={self.name}"]
        if self.name == other.name:
            keys = [*self.params, *(key for key in other.params if key not in self.params)]
            different = [key for key in keys if self.params.get(key) != other.params.get(key)]
            # A parameter that the norm has on one side only, for its class was changed, is told there.
            words += [
                f"norm.{key}={override_text(self.params[key])}" for key in different if key in self.params
            ]
            words += [f"(no parameter {key})" for key in different if key not in self.params]
        # Without a place on one side there is nothing to compare: another kind of model, or no norm.
        if self.placement and other.placement:
            if self.placement != other.placement:
                words.append(f"placement={self.placement}")
            if self.qk_norm != other.qk_norm:
                words.append(f"model.qk_norm={override_text(self.qk_norm)}")
        if self.sites is not None and other.sites is not None and self.sites != other.sites:
            words.append(f"sites={override_text(list(self.sites))}")
        return words

    def words(self, other: Normalisation) -> str:
        """Return `differences` as one text."""
        return " ".join(self.differences(other))

    def same_as(self, other: Normalisation) -> bool:
        """Whether they are one function, as far as the models have the same places."""
        return self.differences(other) == other.differences(self)

    @property
    def convertible(self) -> bool:
        """Whether `rmsrepro convert` makes an RMSNorm model of it: a pre-norm LayerNorm Transformer."""
        return self.name in ("layernorm", "layernorm_nobias") and self.placement == "pre"

    def advice(self, wanted: str, path: str = "PATH") -> str:
        """Say what to do with weights of this normalisation where those of the norm `wanted` are asked for.

        Args:
            wanted: the other norm's name.
            path: where the weights lie.
        """
        if wanted == "rmsnorm" and self.convertible:
            return f"{command('convert', ckpt=path, to='rmsnorm')} makes an equal RMSNorm model"
        return "keep the norm of the checkpoint, or train anew"


class KnowsItsNorm(nn.Module):
    """A model whose state dict says how it was normalised. Without `normalisation` it says nothing."""

    normalisation: Normalisation | None = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if self.normalisation is not None and metadata is not None:
            metadata[prefix[:-1]][NOTE] = self.normalisation.note()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        note, own = local_metadata.get(NOTE), self.normalisation
        if own is not None and note is not None:
            found = Normalisation.from_note(note)
            if not found.same_as(own):
                changed = found.name == own.name and set(found.params) != set(own.params)
                advice = (
                    f"the class of the norm {own.name} has other parameters now than it had then: give them "
                    "the names they had, or train anew"
                    if changed
                    else found.advice(own.name)
                )
                raise UserError(
                    f"these weights were trained with {found.words(own)}, not {own.words(found)}, which is "
                    f"another model even where they fit; {advice} "
                    "(from Python, load_state_dict(dict(state_dict)) takes them without this check)"
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _complete(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    try:
        spec = NormSpec(name, params)
        values = dict(spec.resolved_params)
        built_in = norm_info(name).factory is None
    except (TypeError, ValueError):
        return dict(params)  # of a norm that is not to be had here
    if built_in:
        # What a variant presets is among the others, and two ways to write one norm are one norm.
        values.pop("variant", None)
    return values
