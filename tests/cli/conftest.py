"""The command line in this process (`cli`, fast) and as a program of its own (`program`)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rmsrepro.cli import main
from tests.cli.running import LM, TRANSLATION, Ran, Start, Trained, command, environment, records


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in this process: `cli("train", "norm=rmsnorm")`."""

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ran(code, out, err)

    return run


@pytest.fixture
def program() -> Callable[..., Ran]:
    """Run a command as a program: `program("train", "norm=rmsnorm", env={"HOME": ""})`."""

    def run(
        *arguments: str,
        env: Mapping[str, str | None] | None = None,
        stdin: str | bytes | None = "",
        timeout: float = 300,
    ) -> Ran:
        done = subprocess.run(
            command(*arguments),
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=environment(env),
            timeout=timeout,
            check=False,
        )
        ran = Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in ran.out + ran.err, ran.err
        return ran

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command in a session of its own, so that a signal can go to all of it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, env: Mapping[str, str | None] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(env),
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _trained(factory: pytest.TempPathFactory, name: str, arguments: list[str]) -> Trained:
    folder = factory.mktemp(name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", *arguments, f"out_dir={folder / 'outputs'}"]) == 0
    finally:
        os.chdir(before)
    [(run_id, record)] = records(folder / "outputs").items()
    return Trained(folder / "outputs" / "runs" / run_id, record)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _trained(tmp_path_factory, "language-model", [*LM, "norm=rmsnorm"])


@pytest.fixture(scope="session")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _trained(tmp_path_factory, "translator", [*TRANSLATION, "model=gru", "norm=layernorm"])
