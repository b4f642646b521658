"""Where configuration files are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import quoted


def expanded(path: str | Path) -> Path:
    """Return a path that the user gave, with a leading ~ or ~user replaced as a shell does it.

    Where there is no such user, or no home directory, it is a name like any other; `Path.expanduser` raises.
    """
    return Path(os.path.expanduser(path))


def packaged_conf_dir() -> Path:
    """Return the folder of the built-in configuration: the wheel's copy, else the checkout's."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(
        f"the built-in configuration is missing: neither {package / 'conf'} nor {package.parent / 'conf'} "
        "holds a train.yaml; install the package again"
    )


def user_conf_dir(cwd: Path | None = None) -> Path | None:
    """Return the user's own `./conf`, or None where there is none (or it is the built-in one)."""
    own = ((cwd or Path.cwd()) / "conf").resolve()
    return own if own.is_dir() and own != packaged_conf_dir().resolve() else None


def group_choices(group: str, cwd: Path | None = None) -> list[str]:
    """Return the names of the YAML files of a group, the built-in ones and the user's own."""
    folders = [packaged_conf_dir(), user_conf_dir(cwd)]
    names = {file.stem for folder in folders if folder for file in (folder / group).glob("*.yaml")}
    return sorted(names)


def search_path() -> list[str]:
    """Return the override that joins the user's own `./conf` to Hydra's search path, if there is one."""
    own = user_conf_dir()
    return [f"hydra.searchpath=[{quoted('file://' + own.as_posix())}]"] if own else []


def own_files(group: str) -> list[Path]:
    """Return the user's own YAML files of a group."""
    own = user_conf_dir()
    return sorted((own / group).glob("*.yaml")) if own else []


def shadowed_files() -> list[str]:
    """Return a note for each file of the user that has the name of a built-in one, which is read instead."""
    built_in = packaged_conf_dir()
    return [
        f"conf/{group}/{file.name} is not read: the built-in {group}={file.stem} goes first; rename yours"
        for group in sorted(
            folder.name for folder in built_in.iterdir() if folder.is_dir() and folder.name != "study"
        )
        for file in own_files(group)
        if (built_in / group / file.name).is_file()
    ]
