"""Fixtures of the other tests, for cases that go through several parts of the package."""

from __future__ import annotations

from tests.cli.conftest import cli, language_model, program, translator
from tests.models.conftest import models
from tests.norms.conftest import forget_norms
from tests.runs.conftest import make_config

__all__ = ["cli", "forget_norms", "language_model", "make_config", "models", "program", "translator"]
