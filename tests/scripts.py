"""The programs of scripts/ as modules, for tests of their parts."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from tests.conftest import ROOT


def load_script(file: str) -> ModuleType:
    """Return scripts/FILE, run anew; it stands in `sys.modules` while it is run, as dataclasses need."""
    path = ROOT / "scripts" / file
    loader = SourceFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    loader.exec_module(module)
    return module
