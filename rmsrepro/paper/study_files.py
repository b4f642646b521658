"""Study files: read and checked, and which of the built-in ones address a claim."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError
from rmsrepro.config.explain import explain
from rmsrepro.config.paths import packaged_conf_dir
from rmsrepro.config.study import StudyConfig
from rmsrepro.paper.declared import declared
from rmsrepro.paper.study_checks import check_study

BY_COST = ("quick", "small", "paper")
"""The built-in studies that address claims, the cheapest first."""


def read_study(file: Path) -> StudyConfig:
    """Read one study file.

    Raises:
        UserError: it does not fit `StudyConfig`, or contradicts itself.
    """
    try:
        study = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StudyConfig), OmegaConf.load(file)))
    except Exception as error:
        raise UserError(f"{file.parent.name}/{file.name}: {explain(error)}") from error
    assert isinstance(study, StudyConfig)
    check_study(study)
    return study


@lru_cache
def built_in(name: str) -> StudyConfig:
    """Read a study that comes with the package."""
    return read_study(packaged_conf_dir() / "study" / f"{name}.yaml")


@lru_cache
def cheapest_study() -> dict[str, str]:
    """Claim -> the built-in study that addresses it; of several the cheapest."""
    found: dict[str, str] = {}
    for name in BY_COST:
        for claim_id in declared(built_in(name)):
            found.setdefault(claim_id, name)
    return found
