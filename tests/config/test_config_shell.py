"""Commands that are told to the user: pasted into a shell, they mean what they say."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config.overrides import RAW_KEYS, split_override, unquote
from rmsrepro.config.shell import command, in_folder, typed, word, words

NAMES = [
    *("my runs", "it's", 'say "so"', "a=b", "$HOME", "${seed}", "$(id)", "`id`", "back\\slash", "a,b", "[1]"),
    *(
        "null",
        "'quoted'",
        '"quoted"',
        "'a' b 'c'",
        "~",
        "~root/x",
        "tab\there",
        "Umläute",
        "a;b&c|d",
        "#x",
        "*",
    ),
    *("-n", "{a: 1}", "a\\'b", "end\\", "1e3", "true", "two\nlines", "outputs/my runs/it's $HOME=${x}"),
]


def pasted(line: str) -> list[str]:
    """The arguments that a program gets when a line is pasted into a shell."""
    shown = subprocess.run(
        ["sh", "-c", f"rmsrepro() {{ printf '%s\\0' \"$@\"; }}; {line}"], capture_output=True, check=True
    )
    return shown.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["ckpt", "data.train", "study", "data.source_lang"])
def test_a_name_comes_through_the_shell(key: str, name: str) -> None:
    verb, argument = pasted(command("train", **{key: name}))
    assert verb == "train"
    item = split_override(argument)
    found = unquote(item.value)
    if RAW_KEYS.match(key):
        assert Path(found) == Path(name)
    else:
        assert found == name


@pytest.mark.parametrize("name", NAMES)
def test_overrides_of_a_job_come_through(name: str) -> None:
    overrides = [split_override(typed("data.train", name)), split_override("seed=1")]
    arguments = pasted(f"rmsrepro {words(overrides)}")
    assert [split_override(argument) for argument in arguments] == overrides


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "norm.p=null"), (True, "norm.p=true"), (0.25, "norm.p=0.25"), ("m:C", "norm.p=m:C"),
     (["a", "b c"], "'norm.p=[a,b c]'"), ("1e3", """'norm.p='"'"'1e3'"'"''""")],
)  # fmt: skip
def test_values(value: Any, text: str) -> None:
    assert word("norm.p", value) == text


def test_arguments_and_the_usual_folder() -> None:
    assert command("export", "wandb", "a b", **in_folder("outputs")) == "rmsrepro export wandb 'a b'"
    assert command("status", **in_folder("./outputs")) == "rmsrepro status"
    assert command("status", **in_folder(Path("my runs"))) == "rmsrepro status 'out_dir=my runs'"
    assert words([split_override("ckpt=null"), split_override("plugins=[a]")]) == "ckpt=null 'plugins=[a]'"
