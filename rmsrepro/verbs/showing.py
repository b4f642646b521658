"""`train show=true`: the composed config, and where each part of it comes from."""

from __future__ import annotations

from collections.abc import Mapping

from rmsrepro.config.plain import plain, yaml_text
from rmsrepro.config.schema import TrainConfig
from rmsrepro.tasks import norm_spec
from rmsrepro.verbs.common import say


def show_config(config: TrainConfig, files: Mapping[str, str]) -> None:
    """Print the resolved config as YAML, each group headed by the file it was read from.

    The norm is shown with all its parameters, defaults included.
    """
    content = plain(config)
    spec = norm_spec(config)
    content["norm"] = {"name": spec.name, **spec.resolved_params}
    study = content.pop("study_name")
    content["study"] = study
    for group, file in files.items():
        if group not in content or not isinstance(content[group], Mapping):
            say(f"# {group} overlay: {file}")
    say("# the rest: conf/train.yaml and rmsrepro/config/schema.py, overridden by the command line")
    for key, value in content.items():
        text = yaml_text({key: value}).rstrip()
        if key in files and isinstance(value, Mapping):
            say(f"# {files[key]}")
        say(text)
