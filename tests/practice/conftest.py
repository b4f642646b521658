"""Fixtures of the other tests, for cases that go through several parts of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import cli, language_model, program, translator
from tests.models.conftest import models
from tests.models.norms import users_norms
from tests.norms.conftest import forget_norms
from tests.runs.conftest import make_config

__all__ = ["cli", "forget_norms", "language_model", "make_config", "models", "program", "translator"]


@pytest.fixture(scope="module")
def users_norms_registered() -> Iterator[None]:
    """Norms as users write them, beside the package's own."""
    with users_norms():
        yield
