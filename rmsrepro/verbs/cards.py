"""The verb that measures a norm: check-norm."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, check_single, override_text, take, unquote
from rmsrepro.config.paths import expanded
from rmsrepro.verbs.card_text import head, print_card
from rmsrepro.verbs.common import composer, console, say, take_options

if TYPE_CHECKING:
    from rmsrepro.norms.card import Subject


@dataclass
class CheckNormVerb:
    dim: int = 64
    out_dir: str = "outputs"
    show: bool = False


def check_norm(overrides: list[Override]) -> int:
    """Measure a norm, print its card and write it; `show=true` says what would be measured instead."""
    options, rest = take_options(CheckNormVerb, overrides)
    if not options.out_dir.strip():
        raise UserError("out_dir='': expected a folder")
    subject = _subject(options, rest)
    from rmsrepro.norms.card import make_card
    from rmsrepro.norms.card.card import card_path
    from rmsrepro.runs.files import to_json, write_atomic

    path = card_path(expanded(options.out_dir), card_name(rest, subject.spec.params))
    screen = console()
    if options.show:
        screen.print(head(subject))
        say(f"card: {path}")
        return 0
    with _writing(options.out_dir):
        _look(path)
    progress = console(stderr=True)
    if progress.is_terminal:
        with progress.status("") as spinner:
            card = make_card(subject, lambda what: spinner.update(Text(f"{subject.name}: {what}")))
    else:
        card = make_card(subject)
    with _writing(options.out_dir):
        write_atomic(path, to_json(card.to_json()) + "\n")
    print_card(card, screen)
    say(f"card: {path}")
    if card.failed:
        failed = f"failed: {', '.join(card.failed)}"
        say(textwrap.fill(failed, 80, subsequent_indent="  "), stderr=True)
    return 1 if card.failed else 0


@contextlib.contextmanager
def _writing(out_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: no card can be written there ({error})") from error


def _look(path: Path) -> None:
    """Make the card's folder, and see before anything is measured what would keep the card from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path.parent} cannot be written to")


def card_name(overrides: Sequence[Override], params: Mapping[str, Any]) -> str:
    """Return what a card's file is named by: the norm as it was chosen, and the parameters that were given.

    A file of ./conf/norm goes by its own name: several of them may hold one norm.
    """
    chosen, _ = take(overrides, "norm")
    given = {item.key.removeprefix("norm.") for item in overrides if item.key.startswith("norm.")}
    parts = [f"{key}_{override_text(params[key])}" for key in sorted(given) if key in params]
    return "-".join([unquote(chosen or ""), *(re.sub(r"[^\w.+-]", "_", part) for part in parts)])


def _subject(options: CheckNormVerb, overrides: Sequence[Override]) -> Subject:
    """Return the norm that the command names, known to be one that can be built.

    Raises:
        UserError: no such norm, a wrong parameter, a backend that does not run it, or a class that cannot be
            built.
    """
    from rmsrepro.config.compose import to_train_config
    from rmsrepro.norms.given import check_norm_parameters

    if not any(item.key == "norm" for item in overrides):
        raise UserError("check-norm needs a norm: rmsrepro check-norm rmsnorm, or pkg.module:Class")
    for item in overrides:
        if item.key not in ("norm", "backend", "plugins") and not item.key.startswith("norm."):
            raise UserError(
                f"{item.text}: check-norm takes a norm, norm.PARAMETER=VALUE, backend, plugins, dim, "
                "out_dir and show"
            )
    check_single(overrides, "check-norm measures one norm", "; run it once for each")
    if options.dim < 1:
        raise UserError(f"dim={options.dim}: expected a whole number above zero")
    # Composed as for a run, so that names, files of ./conf and parameters mean what they mean there.
    with composer(overrides) as opened:
        config = to_train_config(opened.raw(list(overrides)))
    check_norm_parameters([config])
    given = dict(config.norm)
    name = given.pop("name")
    chosen = any(item.key == "backend" for item in overrides)
    return _buildable(name, given, config.backend.value if chosen else "composite", options.dim)


def _buildable(name: str, params: dict[str, Any], backend: str, dim: int) -> Subject:
    """Build the norm once: what is wrong with the command shows here, what is wrong with the norm later."""
    from rmsrepro.norms import NormSpec
    from rmsrepro.norms.card import Subject
    from rmsrepro.norms.card.result import first_line

    try:
        used = NormSpec(name, params, backend).backend_used
        subject = Subject(name, params, used, dim)
        _ = subject.resolved
    except (ValueError, TypeError) as error:
        raise UserError(f"norm={name}: {error}") from error
    try:
        subject.build()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's class may raise anything, an exit included
        raise UserError(
            f"norm={name}: it cannot be built at dim={dim} ({first_line(error)}); dim=N measures it at "
            "another width"
        ) from error
    return subject
