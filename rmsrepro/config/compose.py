"""From overrides to a typed `TrainConfig` through Hydra, with one clear message for each mistake.

`Composer` is opened once a command; `Composer.raw(overrides)` composes one job. Norm names and their
parameters are handed in (`register_schemas`), so that this package imports no norm.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rmsrepro.config import schema
from rmsrepro.config.bench import BenchJobConfig
from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.explain import explain
from rmsrepro.config.overrides import Override, unknown_choice, unquote, unreadable
from rmsrepro.config.paths import group_choices, own_files, packaged_conf_dir, search_path, user_conf_dir
from rmsrepro.config.plain import NODES, from_plain, plain, yaml_text

__all__ = [
    "GROUPS",
    "Composer",
    "from_plain",
    "plain",
    "register_schemas",
    "to_train_config",
    "with_values",
    "yaml_text",
]

GROUPS = ("norm", "model", "task", "data", "optim", "trainer", "tracker", "experiment", "debug", "bench")


def register_schemas(norms: Mapping[str, type]) -> None:
    """Store the schemas in Hydra's config store.

    Args:
        norms: the parameter dataclass of each norm that may be named, plug-ins included. Together
            their fields make the `norm` node. One that is not given stays missing: the norm's own default.
    """
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=schema.TrainConfig)
    store.store(group="schema", name="bench", node=BenchJobConfig)
    for group, nodes in NODES.items():
        for name, node in nodes.items():
            store.store(group=f"schema/{group}", name=name, node=node)
    hints: dict[str, Any] = {}
    for params in norms.values():
        resolved = get_type_hints(params)
        for item in fields(params):
            hint = _checkable(resolved[item.name])
            hints[item.name] = _common(hints.get(item.name, hint), hint)
    members: list[tuple[str, Any, Any]] = [("name", str, field(default=MISSING))]
    # OmegaConf makes an object with missing values only where its class does not take them.
    members += [(name, hint, field(default=MISSING, init=False)) for name, hint in sorted(hints.items())]
    store.store(group="schema", name="norm", node=make_dataclass("NormConfig", members))
    files = set(group_choices("norm"))
    for name in norms:
        if name not in files:
            store.store(group="norm", name=name, node={"name": name})


def _checkable(hint: Any) -> Any:
    """Return `hint` where OmegaConf can check it, else Any: the norm itself checks its parameters."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if len(kinds) != 1 or not isinstance(kinds[0], type):
        return Any
    if issubclass(kinds[0], Enum):
        # OmegaConf goes by the members' names, the norms by their values.
        return hint if all(member.name == member.value for member in kinds[0]) else Any
    return hint if kinds[0] in (bool, int, float, str) else Any


def _common(one: Any, other: Any) -> Any:
    """Return a hint that covers both."""
    if one == other:
        return one
    if Any in (one, other):
        return Any
    wider, both = one | None, other | None
    return wider if wider == both else Any


class Composer(AbstractContextManager["Composer"]):
    """Hydra, initialised on the built-in configuration with the user's `./conf` joined to it."""

    def __init__(self, norms: Mapping[str, type], config_name: str = "train") -> None:
        self._norms = norms
        self._config_name = config_name
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def __enter__(self) -> Composer:
        GlobalHydra.instance().clear()
        register_schemas(self._norms)
        self._hydra = initialize_config_dir(str(packaged_conf_dir()), version_base="1.3")
        self._hydra.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hydra.__exit__(kind, error, trace)

    def raw(self, overrides: Sequence[Override]) -> DictConfig:
        """Compose the DictConfig of one job.

        Raises:
            UserError: an unknown group, choice or key, or a value of the wrong type.
        """
        groups = [item for item in overrides if item.key in GROUPS]
        values = [item for item in overrides if item.key not in GROUPS]
        for item in groups:
            self._check_choice(item)
        base = self._base(groups)
        known = _keys(base)
        foreign = self._foreign_parameters(base)
        for item in values:
            self._check_key(item, base, known, foreign)
        return with_values(base, values)

    def files(self, overrides: Sequence[Override]) -> dict[str, str]:
        """Return where each top-level node of the composed config comes from (for `show=true`)."""
        chosen = {item.key: unquote(item.value) for item in overrides if item.key in GROUPS}
        config = compose(
            self._config_name, overrides=self._texts([o.text for o in overrides]), return_hydra_config=True
        )
        choices = dict(config.hydra.runtime.choices) | chosen
        # The order of Hydra's search path.
        folders = [folder for folder in (packaged_conf_dir(), user_conf_dir()) if folder]
        found: dict[str, str] = {}
        for group in GROUPS:
            name = choices.get(group)
            files = [folder / group / f"{name}.yaml" for folder in folders]
            existing = [file for file in files if file.is_file()]
            if name and str(name) != "null":
                found[group] = _display(existing[0]) if existing else f"{group} {name} (registered in Python)"
        return found

    def _texts(self, texts: Sequence[str]) -> list[str]:
        return [*search_path(), *texts]

    def _compose(self, texts: Sequence[str]) -> DictConfig:
        try:
            return compose(self._config_name, overrides=self._texts(texts))
        except Exception as error:
            raise UserError(explain(error)) from error

    def _base(self, groups: Sequence[Override]) -> DictConfig:
        key = tuple(item.text for item in groups)
        if key not in self._bases:
            try:
                self._bases[key] = self._compose(key)
            except UserError as error:
                # No single value was given yet: what is wrong stands in a file of the user, or an overlay
                # sets what another choice has not.
                files = [_display(file) for item in self._at_fault(groups) for file in _suspects(item)]
                where = f" (in {' or '.join(files)})" if files else ""
                raise UserError(f"{error}{where}") from error
        return self._bases[key]

    def _at_fault(self, groups: Sequence[Override]) -> Sequence[Override]:
        """Return the choices that fail by themselves; all, where only their combination does."""

        def fails(item: Override) -> bool:
            try:
                self._compose([item.text])
            except UserError:
                return True
            return False

        return [item for item in groups if _suspects(item) and fails(item)] or groups

    def _check_choice(self, item: Override) -> None:
        value = unquote(item.value)
        choices = group_choices(item.key)
        if item.key == "norm":
            choices = sorted({*choices, *self._norms})
        if value == "null" and item.key in ("experiment", "debug"):
            return
        if value not in choices:
            raise UserError(unknown_choice(item.key, value, choices))

    def _foreign_parameters(self, base: DictConfig) -> set[str]:
        """Return the keys of parameters that other norms have, but not the chosen one."""
        norm = base.get("norm")
        params = self._norms.get(str(norm.get("name"))) if isinstance(norm, DictConfig) else None
        if params is None:
            return set()
        own = {"name", *(item.name for item in fields(params))}
        return {f"norm.{key}" for key in map(str, norm) if key not in own}

    def _check_key(self, item: Override, base: DictConfig, known: list[str], foreign: set[str]) -> None:
        if item.key in known:
            if item.key.endswith(".name") and item.key.split(".")[0] in ("norm", "model", "task", "data"):
                group = item.key.split(".")[0]
                raise UserError(f"{item.text}: the name follows from the choice; write {group}={item.value}")
            return
        parents = [name for name in known if name.startswith(item.key + ".")]
        if parents:
            raise UserError(
                f"{item.text}: {item.key} is a group of keys, not a value; set one of: {', '.join(parents)}"
            )
        raise UserError(
            f"{item.text}: there is no key {item.key}{_directions(item.key, base, known, foreign)}"
        )


def _directions(key: str, base: DictConfig, known: Sequence[str], foreign: set[str]) -> str:
    """Say what the nearest keys to an unknown one are, and which there are beside it."""
    # The name follows from the choice, and a parameter of another norm is no help.
    known = [name for name in known if name not in foreign and (name != "norm.name" or "." not in key)]
    head, _, leaf = key.rpartition(".")
    group = key.split(".")[0]
    if group == "bench" and "bench" not in base:
        return ": how to time is a matter of rmsrepro bench"
    leaves = [name.rpartition(".")[2] for name in known]
    if head:
        hint = nearest(key, known) or nearest(leaf, leaves)
    else:
        # A single word: a misspelt group first, then a key whose group was left out.
        full = [name for name in known if name.rpartition(".")[2] == leaf]
        hint = nearest(key, [*GROUPS, *(name for name in known if "." not in name)])
        hint = f"; did you mean {', '.join(full)}?" if full else hint or nearest(leaf, leaves)
    siblings = [name for name in known if head and name.rpartition(".")[0] == head]
    if not siblings:
        return f"{hint} (rmsrepro train show=true lists all keys)"
    chosen = base.get(group)
    name = chosen.get("name") if isinstance(chosen, DictConfig) else None
    what = f" with {group}={name.value if isinstance(name, Enum) else name}" if name else ""
    return f"{what}{hint} (keys there: {', '.join(siblings)})"


def with_values(base: DictConfig, values: Sequence[Override]) -> DictConfig:
    """Return a copy of `base` with `key=value` overrides applied.

    This is what Hydra does last. Composing the groups again for each job of a sweep would take ten times as
    long as that.

    Raises:
        UserError: a value that cannot be read, or of the wrong type.
    """
    config = copy.deepcopy(base)
    parser = OverridesParser.create()
    for item in values:
        try:
            parsed = parser.parse_override(item.text)
        except HydraException as error:
            raise UserError(unreadable(item, error)) from error
        if parsed.is_sweep_override():
            raise UserError(f"{item.text}: one value is expected here")
        try:
            OmegaConf.update(config, item.key, parsed.value(), merge=True)
        except Exception as error:
            raise UserError(explain(error)) from error
    return config


def to_train_config(config: DictConfig, experiment: str | None = None) -> schema.TrainConfig:
    """Convert at the one boundary after which nothing knows of Hydra or OmegaConf.

    Raises:
        UserError: a required value is missing.
    """
    try:
        missing = sorted(
            key for key in OmegaConf.missing_keys(config) if not key.startswith("norm.") or key == "norm.name"
        )
        if missing:
            raise UserError(f"a value is missing: {', '.join(missing)}; give it as {missing[0]}=VALUE")
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    assert isinstance(result, schema.TrainConfig)
    for key, values in (
        ("sites", result.sites),
        ("optim.betas", result.optim.betas),
        ("plugins", result.plugins),
    ):
        # OmegaConf checks the elements of a list, but not that they are no lists themselves.
        if any(isinstance(value, list | dict) for value in values):
            raise UserError(f"{key}: expected a list without lists or keys inside, as in {key}=[a,b]")
    norm = result.norm
    result.norm = {
        item.name: value.value if isinstance(value, Enum) else value
        for item in fields(norm)
        if (value := getattr(norm, item.name)) != MISSING
    }
    if experiment is not None:
        result.experiment = experiment
    return result


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in map(str, config):
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            names += _keys(node, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def _display(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return f"{path.parent.parent.name}/{path.parent.name}/{path.name} (built in)"


def _suspects(item: Override) -> list[Path]:
    """Return the file that a choice reads, if it is the user's own or an overlay."""
    name = f"{unquote(item.value)}.yaml"
    built_in = packaged_conf_dir() / item.key / name
    if built_in.is_file():
        return [built_in] if item.key in ("experiment", "debug") else []
    return [file for file in own_files(item.key) if file.name == name]
