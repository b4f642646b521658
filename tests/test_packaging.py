"""The wheel and the sdist hold what a user needs, and an installed wheel works from any directory."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import rmsrepro

# Kinds of file that the package reads while it runs, beside its modules.
PACKAGE_DATA = ("*.py", "*.yaml", "*.html", "*.j2", "*.css", "*.js", "*.json", "*.cpp", "*.hpp", "py.typed")


@pytest.fixture(scope="module")
def built(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    # Without isolation, so that nothing is downloaded: hatchling is among the dev dependencies.
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(repo_root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def files_below(root: Path, folder: str, patterns: tuple[str, ...]) -> set[str]:
    found = {path for pattern in patterns for path in (root / folder).rglob(pattern)}
    return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}


def test_wheel_holds_the_package_and_its_configuration(built: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        conf = {name: wheel.read(f"rmsrepro/{name}") for name in files_below(repo_root, "conf", ("*.*",))}
    assert conf, "conf/ is empty"
    for name, content in conf.items():
        assert content == (repo_root / name).read_bytes(), name
    expected = files_below(repo_root, "rmsrepro", PACKAGE_DATA) | {f"rmsrepro/{name}" for name in conf}
    assert "rmsrepro/norms/backends/fused/cpu/binding.cpp" in expected
    assert expected - held == set()
    assert {name.split("/")[0] for name in held} == {"rmsrepro"}


def test_wheel_metadata(built: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        entry_points = configparser.ConfigParser()
        entry_points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert dict(entry_points["console_scripts"]) == {"rmsrepro": "rmsrepro.cli:main"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Version"] == rmsrepro.__version__
    assert f"\nversion: {rmsrepro.__version__}\n" in (repo_root / "CITATION.cff").read_text(encoding="utf-8")


def test_sdist_is_complete(built: Path, repo_root: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    expected = {
        *files_below(repo_root, "conf", ("*.*",)),
        *files_below(repo_root, "rmsrepro", PACKAGE_DATA),
        *files_below(repo_root, "tests", ("*.py",)),
        *files_below(repo_root, "scripts", ("*",)),
        *(
            "pyproject.toml",
            "constraints.txt",
            "README.md",
            "LICENSE",
            "CHANGELOG.md",
            "CITATION.cff",
            ".ci/run",
        ),
    }
    assert expected - held == set()


def pins(root: Path) -> dict[str, Version]:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found = {}
    for requirement in requirements:
        (pin,) = requirement.specifier
        assert pin.operator == "==", str(requirement)
        assert requirement.url is None, str(requirement)
        found[re.sub(r"[-_.]+", "-", requirement.name).lower()] = Version(pin.version)
    return found


def test_constraints_pin_every_direct_dependency_within_its_range(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins(repo_root)
    for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(line)
        version = pinned[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert version in requirement.specifier, f"{line} against {version}"
        # A local label such as +cpu would refuse the other builds of the same release.
        assert version.local is None, f"{requirement.name}=={version}"


def test_scripts_explain_themselves_without_installing(repo_root: Path, tmp_path: Path) -> None:
    # With no Python on the PATH, an attempt to install would fail.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat"):
        (tools / name).symlink_to(_which(name))
    for script, words in (("test", "--all"), ("reproduce", "study=quick")):
        for option in ("--help", "-h"):
            result = _script(repo_root, script, option, env={"PATH": str(tools)})
            assert (result.returncode, result.stderr) == (0, "")
            assert words in result.stdout


def test_scripts_say_when_there_is_no_python(repo_root: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat"):
        (tools / name).symlink_to(_which(name))
    old = tools / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # what every Python older than 3.11 answers to the version check
    old.chmod(0o755)
    # A copy elsewhere, so that the checkout's own .venv plays no part.
    copy = tmp_path / "checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("lib.sh", "reproduce"):
        (copy / "scripts" / name).write_bytes((repo_root / "scripts" / name).read_bytes())
    result = _script(copy, "reproduce", env={"PATH": str(tools)})
    assert result.returncode == 1
    assert "error: no Python 3.11 or newer found" in result.stderr
    assert not (copy / ".venv").exists()


def test_scripts_refuse_an_old_active_environment(repo_root: Path, tmp_path: Path) -> None:
    old = tmp_path / "env" / "bin" / "python"
    old.parent.mkdir(parents=True)
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(tmp_path / "env")}
    result = _script(repo_root, "reproduce", env=environment)
    assert result.returncode == 1
    assert "Python 3.9.2, 3.11 or newer is needed" in result.stderr


def _which(name: str) -> Path:
    found = shutil.which(name)
    assert found is not None, name
    return Path(found).resolve()


def _script(root: Path, name: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_which("bash"), str(root / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        stdin=subprocess.DEVNULL,
    )


def test_installed_wheel_works_from_another_directory(built: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        check=True,
        env=environment,
    )
    # The dependencies are those of the environment that runs this test. On PYTHONPATH no .pth file is read,
    # so an editable install of the checkout does not show through.
    environment["PYTHONPATH"] = str(Path(numpy.__file__).parents[1])
    work = tmp_path / "elsewhere"
    work.mkdir()

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [str(venv / "bin" / "rmsrepro"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=work,
            env=environment,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = subprocess.run(
        [str(python), "-c", "import rmsrepro; print(rmsrepro.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=work,
        env=environment,
    ).stdout.strip()
    assert Path(where).is_relative_to(venv)
    assert "reproduce" in run("--help")
    norms = run("norms")
    for name in ("none", "layernorm", "rmsnorm", "prmsnorm", "batchnorm", "weightnorm", "gemma_rmsnorm"):
        assert re.search(rf"\b{name}\b", norms), f"{name} is missing from: {norms}"
    # Composing needs the packaged conf/.
    assert "rmsnorm" in run("train", "norm=rmsnorm", "model=gru", "task=lm", "data=pydoc", "show=true")
    assert list(work.iterdir()) == []
