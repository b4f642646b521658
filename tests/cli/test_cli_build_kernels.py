"""The verb build-kernels, on kernels that compile in no time; and that doctor builds none."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmsrepro.norms.backends.fused import compiling, library
from rmsrepro.norms.backends.fused.levels import FORCED, known_levels
from tests.cli.running import Ran, environment
from tests.norms import tiny_kernels

Run = Callable[..., Ran]
LEVELS = [level.name for level in known_levels()]


@pytest.fixture(autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tiny sources, an empty cache."""
    folder = tmp_path_factory.mktemp("kernels")
    monkeypatch.setenv("RMSREPRO_CACHE", str(folder / "cache"))
    monkeypatch.setenv(FORCED, "portable")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling, "SOURCES", tiny_kernels.write_sources(folder / "cpu"))
    tiny_kernels.forget()
    yield folder / "cpu"
    tiny_kernels.forget()
    library.why_unavailable.cache_clear()


@pytest.fixture
def _compiler() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("_compiler")
def test_all_levels_are_built_once(cli: Run) -> None:
    first = cli("build-kernels")
    assert (first.code, first.err) == (0, "")
    lines = first.out.splitlines()
    assert lines[0].startswith(f"compiling for {len(LEVELS)} levels with ")
    *told, place = lines[1 : -len(LEVELS)]
    if len(LEVELS) > 1:
        assert {line.split(": compiled after ")[0] for line in told} == set(LEVELS)
    path = Path(place.split(": ")[0])
    assert path.is_file()
    assert re.fullmatch(r"\d+ kB, in \d+\.\d s", place.split(": ")[1])
    listed = [f"  {name}{' (this processor uses it)' if name == 'portable' else ''}" for name in LEVELS]
    assert lines[-len(LEVELS) :] == listed
    again = cli("build-kernels")
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[0].startswith(f"{path}: ")
    assert again.out.splitlines()[0].endswith(" kB, there already; rerun=true builds it anew")
    assert again.out.splitlines()[1:] == listed
    built = path.stat().st_mtime_ns
    assert cli("build-kernels", "rerun=true").out.splitlines()[0] == lines[0]
    assert path.stat().st_mtime_ns > built
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["levels=avx2"], {}, "levels=avx2: build-kernels has no option levels (it has: rerun)"),
        (["rerun=perhaps"], {}, "rerun=perhaps: expected true or false"),
        ([], {"CXX": "no-such-compiler"}, "CXX=no-such-compiler: no-such-compiler is no program"),
        ([], {"PATH": ""}, "no C++ compiler (c++, g++, clang++); install one"),
        ([], {FORCED: "avx1024"}, "RMSREPRO_KERNEL_LEVEL=avx1024: the levels of this kind of processor are"),
        ([], {"RMSREPRO_CACHE": "/dev/null/cache"}, "the kernels cannot be written to /dev/null/cache"),
        (
            [],
            {"RMSREPRO_CACHE": "~nobodyknown/x"},
            "RMSREPRO_CACHE=~nobodyknown/x: ~nobodyknown is the home of",
        ),
    ],
)
def test_what_cannot_be_done_is_told(
    words: list[str], variables: dict[str, str], told: str, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "RMSREPRO_CACHE" in variables and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli("build-kernels", *words).error.startswith(told)


def test_nothing_of_torch_is_imported(sources: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rmsrepro.norms.backends.fused import compiling; "
        f"compiling.SOURCES = Path({str(sources)!r}); from rmsrepro.cli import main; "
        "code = main(['build-kernels']); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout.splitlines()[-1] in ("0 False", "2 False")


def told_by_doctor(cli: Run, word: str) -> str:
    ran = cli("doctor", "trial=false")
    assert (ran.code, ran.err) == (0, "")
    return " ".join(re.split(r"\n(?! )", ran.out.partition(f"\n{word} ")[2])[0].split())


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("below", ["file", "/proc"])
def test_doctor_says_that_kernels_cannot_be_kept(
    below: str, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if below == "/proc" and not Path(below).is_dir():
        pytest.skip("a system without /proc")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RMSREPRO_CACHE", str(tmp_path / below / "cache"))
    library.why_unavailable.cache_clear()
    told = told_by_doctor(cli, "kernels")
    assert told.startswith("backend=fused cannot run on the processor: the kernels cannot be written to ")
    assert told.endswith("; set RMSREPRO_CACHE to a folder that can be")
    assert "fused (all norms but" in (backends := told_by_doctor(cli, "backends"))
    assert "not here: the kernels cannot be written to" in backends
    assert (tmp_path / "file").read_bytes() == b""
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.usefixtures("_compiler")
def test_a_failure_is_told_by_doctor_and_tried_again_here(
    cli: Run, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (sources / "kernels.cpp").read_text()
    monkeypatch.setenv("CPATH", str(sources / "include"))
    (sources / "kernels.cpp").write_text(f"#include <needed.h>\n{good}")
    tiny_kernels.forget()
    library.why_unavailable.cache_clear()
    assert "needed.h" in (library.why_unavailable() or "")
    told = told_by_doctor(cli, "kernels")
    assert told.startswith("backend=fused cannot run on the processor: ")
    assert told.endswith(", and rmsrepro build-kernels tries again")
    assert "tries again" not in cli("build-kernels").error
    # What it lacked is installed: no command but this one can know.
    (sources / "include").mkdir()
    (sources / "include" / "needed.h").touch()
    assert told_by_doctor(cli, "kernels") == told
    assert cli("build-kernels").code == 0
    assert told_by_doctor(cli, "kernels").startswith("for portable, built (")


@pytest.mark.usefixtures("_compiler")
def test_doctor_says_what_is_built_and_builds_nothing(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels() -> str:
        return told_by_doctor(cli, "kernels")

    told = kernels()
    assert told.startswith("for portable, not built yet: the first use of backend=fused takes seconds (")
    assert not Path(os_cache()).exists()
    assert cli("build-kernels").code == 0
    told = kernels()
    assert told.startswith("for portable, built (")
    assert "all levels): " in told or len(LEVELS) == 1
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("RMSREPRO_CACHE", f"{os_cache()}-2")
    assert kernels().startswith("backend=fused cannot run on the processor: CXX=no-such-compiler: ")


def os_cache() -> str:
    return environment()["RMSREPRO_CACHE"]
