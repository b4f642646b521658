"""The models: `build_model` makes one from a configuration, with any norm, initialised by name."""

from __future__ import annotations

from rmsrepro.models.build import build_model
from rmsrepro.models.interface import DecodingState, LanguageModel, TranslationModel

__all__ = ["DecodingState", "LanguageModel", "TranslationModel", "build_model"]
