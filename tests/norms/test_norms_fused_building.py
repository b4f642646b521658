"""How the fused kernels' libraries are built, kept and found, whatever the machine lacks or does."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.norms.backends.fused import building, compilers, compiling, keeping, programs
from rmsrepro.norms.backends.fused.compilers import KernelsUnavailable
from rmsrepro.norms.backends.fused.levels import FORCED, PORTABLE, best_level, known_levels
from rmsrepro.norms.backends.fused.library import Kernels
from tests.norms import tiny_kernels

REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(REAL is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, tiny sources and the portable level."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RMSREPRO_CACHE", str(folder))
    monkeypatch.setenv(FORCED, "portable")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling, "SOURCES", tiny_kernels.write_sources(tmp_path / "cpu"))
    tiny_kernels.forget()
    yield folder
    tiny_kernels.forget()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make CXX a script; `$REAL` in it is the true compiler, `$LOG` a file that is returned."""

    def install(script: str) -> Path:
        place, log = tmp_path / "fake-c++", tmp_path / "log"
        place.write_text(f"#!/bin/sh\nREAL={REAL}\nLOG={log}\n{script}\n", encoding="utf-8")
        place.chmod(0o755)
        monkeypatch.setenv("CXX", str(place))
        tiny_kernels.forget()
        return log

    return install


BROKEN = """\
case " $* " in *" -c "*) echo "$*" >> "$LOG"; echo "error: broken" >&2; exit 1;; esac
exec "$REAL" "$@"
"""
COUNTING = 'case " $* " in *" -c "*) echo "$*" >> "$LOG"; sleep 0.3;; esac\nexec "$REAL" "$@"'


def start(sources: Path = Path("cpu"), **environment: str) -> subprocess.Popen[str]:
    """Start another process that wants the library."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.norms.tiny_kernels", str(sources.absolute())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
    )


def answers(path: Path, level: str = "portable") -> list[int]:
    return [
        found.call(address, 1)
        for found in (Kernels(path, level), Kernels(path, level, fast=False))
        for address in (found.forward, found.backward)
    ]


def wait_for(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------- found and kept


def test_what_is_built_is_found(cache: Path, fake: Callable[[str], Path]) -> None:
    log, told = fake(COUNTING), list[str]()
    path, level = building.find_or_build(told.append)
    assert (level, told) == (PORTABLE, ["building the fused kernels for this processor, once"])
    assert path.is_relative_to(cache)
    assert path.name == "portable.so"
    assert answers(path) == [42, -40, 42, -40]
    assert {item.name for item in path.parent.iterdir()} == {"portable.so", "portable.json", "lock"}
    compiled = log.read_text()
    assert len(compiled.splitlines()) == 2
    assert building.find_or_build(told.append) == (path, level)
    assert building.build([level]) == path
    assert (len(told), log.read_text()) == (1, compiled)
    assert building.build([level], anew=True) == path
    assert len(log.read_text().splitlines()) == 4
    found = building.find([level])
    assert found is not None
    assert found[1].levels == ["portable"]
    assert found[1].size == path.stat().st_size


def test_a_library_of_all_levels_goes_before() -> None:
    told: list[str] = []
    alone = building.build([PORTABLE], tell=told.append)
    assert told == []
    everything = building.build(known_levels(), tell=told.append)
    assert everything.name == ("all.so" if len(known_levels()) > 1 else "portable.so")
    assert building.find_or_build(pytest.fail) == (everything, PORTABLE)
    assert alone.is_file()
    if len(known_levels()) > 1:
        assert sorted(message.split(":")[0] for message in told) == sorted(one.name for one in known_levels())
        some = building.build(known_levels()[1:])
        assert some == everything  # which holds them
    for level in known_levels():
        assert answers(everything, level.name) == [42, -40, 42, -40]


def test_some_levels_are_not_taken_for_all() -> None:
    if len(known_levels()) < 3:
        pytest.skip("this kind of processor has one level")
    path = building.build(known_levels()[-2:])
    assert path.name == "avx2+portable.so"
    assert building.find(known_levels()) is None


def test_another_source_is_another_library() -> None:
    first = building.build([PORTABLE])
    file = compiling.SOURCES / "kernels.cpp"
    file.write_text(file.read_text().replace("41", "42"))
    (compiling.SOURCES / ".#kernels.cpp").symlink_to("nobody@nowhere")  # what an editor leaves
    building._digest.cache_clear()
    second = building.build([PORTABLE])
    assert second.parent != first.parent
    assert answers(second)[0] == 43
    assert building.build([PORTABLE], extra_flags=["-DANY"]).parent not in (first.parent, second.parent)


def test_a_place_relative_to_the_directory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSREPRO_CACHE", "here")
    path = building.build([PORTABLE])
    monkeypatch.chdir("/")
    assert path == tmp_path / "here" / path.parent.name / path.name
    assert answers(path)[0] == 42


def test_sources_that_cannot_be_written_are_enough() -> None:
    before = {path.name: path.stat().st_mtime_ns for path in compiling.SOURCES.iterdir()}
    for path in (*compiling.SOURCES.iterdir(), compiling.SOURCES):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert answers(building.build([PORTABLE]))[0] == 42
        assert {path.name: path.stat().st_mtime_ns for path in compiling.SOURCES.iterdir()} == before
    finally:
        compiling.SOURCES.chmod(0o755)


def test_home_may_be_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMSREPRO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert building.cache_folder() == tmp_path / ".cache" / "rmsrepro"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert building.cache_folder() == tmp_path / "xdg" / "rmsrepro"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert building.cache_folder() == Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "rmsrepro")

    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(KernelsUnavailable, match=r"no home directory.*set RMSREPRO_CACHE"):
        building.find_or_build()


def test_the_home_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobodyknown/a")
    for name, value in (("RMSREPRO_CACHE", "~nobodyknown/x"), ("XDG_CACHE_HOME", "~nobodyknown/a")):
        if name == "RMSREPRO_CACHE":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv("RMSREPRO_CACHE")
        told = f"{name}={value}: ~nobodyknown is the home of no user that is known here; set RMSREPRO_CACHE"
        with pytest.raises(KernelsUnavailable) as raised:
            building.find_or_build()
        assert str(raised.value).startswith(told)
    assert list(tmp_path.glob("*nobody*")) == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RMSREPRO_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        KernelsUnavailable, match=r"cannot be written to .*/file/kernels-.* \(Not a directory\)"
    ):
        building.find_or_build(pytest.fail)  # there is nothing to announce
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    monkeypatch.setenv("RMSREPRO_CACHE", str(closed))
    if os.access(closed, os.W_OK):
        return  # root writes everywhere
    with pytest.raises(KernelsUnavailable, match=r"Permission denied.*set RMSREPRO_CACHE"):
        building.find_or_build()


# --------------------------------------------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": cut,
    "empty": lambda path: path.write_bytes(b""),
    "one bit changed": change,
    "without its record": lambda path: path.with_suffix(".json").unlink(),
    "with a broken record": lambda path: path.with_suffix(".json").write_text('{"levels": ['),
    "with another record": lambda path: path.with_suffix(".json").write_text('{"levels": []}'),
    "with a list for a record": lambda path: path.with_suffix(".json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew(damage: str) -> None:
    path, _ = building.find_or_build()
    DAMAGES[damage](path)
    assert building.find([PORTABLE]) is None
    told: list[str] = []
    assert building.find_or_build(told.append)[0] == path
    assert told == [f"building the fused kernels for this processor; {path} is damaged"]
    assert answers(path)[0] == 42
    assert building.find_or_build(pytest.fail)[0] == path


# --------------------------------------------------------------------------------- several processes at once


def test_of_four_processes_one_compiles(fake: Callable[[str], Path]) -> None:
    log = fake(COUNTING)
    started = [start() for _ in range(4)]
    ended = [one.communicate(timeout=120) for one in started]
    assert [one.returncode for one in started] == [0] * 4, ended
    (path,) = {out.strip() for out, _ in ended}
    assert answers(Path(path))[0] == 42
    assert len(log.read_text().splitlines()) == 2
    assert [item.name for item in Path(path).parent.glob("*-*")] == []


@pytest.fixture
def old(cache: Path) -> Callable[..., Path]:
    """Make a folder of other kernels that were used so many days ago."""

    def make(name: str, days: float) -> Path:
        folder = cache / name
        folder.mkdir(parents=True)
        for item in (folder / "portable.so", folder / "lock", folder):
            if item != folder:
                item.touch()
            os.utime(item, (time.time() - days * keeping.DAY_S,) * 2)
        return folder

    return make


def test_what_nobody_uses_goes_after_a_build(cache: Path, old: Callable[..., Path]) -> None:
    unused, used = old(f"kernels-{'a' * 16}", 31), old(f"kernels-{'b' * 16}", 29)
    killed, other = old(f"kernels-{'c' * 16}.unused-1", 0), old("kernels-of-mine", 99)
    (cache / f"kernels-{'d' * 16}").symlink_to(other)
    locked = old(f"kernels-{'e' * 16}", 31)
    with (locked / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        path = building.build([PORTABLE])
    assert [folder.exists() for folder in (unused, killed)] == [False, False]
    assert {item.name for item in cache.iterdir()} == {
        *(folder.name for folder in (used, other, locked, path.parent)),
        f"kernels-{'d' * 16}",
    }
    assert (other / "portable.so").is_file()


def test_a_use_keeps_a_folder(cache: Path) -> None:
    path = building.build([PORTABLE])
    lock = path.parent / "lock"
    for days, marked in ((0.5, False), (31, True)):
        then = time.time() - days * keeping.DAY_S
        for item in (*path.parent.iterdir(), path.parent):
            os.utime(item, (then, then))
        assert building.find_or_build(pytest.fail)[0] == path
        assert (time.time() - lock.stat().st_mtime < 60) is marked
    keeping.remove_unused(cache, but=cache)
    assert path.is_file()


def test_a_folder_that_goes_while_it_is_found_is_built_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = building.build([PORTABLE])
    for item in (*path.parent.iterdir(), path.parent):
        os.utime(item, (1, 1))
    find = building.find

    def find_and_lose(*arguments: Any) -> Any:
        found = find(*arguments)
        monkeypatch.setattr(building, "find", find)
        keeping.remove_unused(cache, but=cache)
        return found

    monkeypatch.setattr(building, "find", find_and_lose)
    told: list[str] = []
    assert building.find_or_build(told.append)[0] == path
    assert answers(path)[0] == 42
    assert len(told) == 1


@contextlib.contextmanager
def stuck(log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose compiler writes its id to `log` and does not end; both are gone afterwards."""
    one = start()
    try:
        wait_for(lambda: log.exists() and log.read_text().strip())
        yield one
    finally:
        one.kill()
        one.communicate()
        for line in log.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(line), signal.SIGKILL)


HANGING = 'case " $* " in *" -c "*) echo $$ >> "$LOG"; sleep 600;; esac\nexec "$REAL" "$@"'


def test_what_a_killed_process_leaves_is_no_library(cache: Path, fake: Callable[[str], Path]) -> None:
    with stuck(fake(HANGING)) as owner:
        waiting = start(CXX=str(REAL))
        assert waiting.stderr is not None
        said = [waiting.stderr.readline().strip() for _ in range(2)]
        assert said == [
            "building the fused kernels for this processor, once",
            "another process builds the fused kernels; waiting for it",
        ]
        assert [path.suffix for path in cache.rglob("*.so")] == []
        assert len(list(cache.glob("*/build-*"))) == 1
        owner.kill()
        owner.wait()
        out, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0
    assert answers(Path(out.strip()))[0] == 42
    assert list(cache.glob("*/build-*")) == []


def test_an_owner_that_never_ends_is_not_waited_for_forever(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stuck(fake(HANGING)):
        monkeypatch.setenv("CXX", str(REAL))
        monkeypatch.setattr(building, "WAIT_S", 0.2)
        assert answers(building.build([PORTABLE]))[0] == 42


def test_a_file_system_without_locks_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert answers(building.build([PORTABLE]))[0] == 42


# ------------------------------------------------------------------------------------------------ compilers


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo rubbish; exit 3", "does not run .*exit code 3"),
        ("exit 0", "does not run .*exit code 0"),
        ("echo version 1; exit 0", r"failed to build the kernels \(it wrote no file\)"),
        (
            'case " $* " in *" --version "*) echo 1;; *) echo "x: error: no such thing" >&2; exit 1;; esac',
            r"failed to build the kernels \(x: error: no such thing\); CXX names another compiler",
        ),
        (
            'for last; do :; done; echo 1; echo rubbish > "$last"',
            r"built kernels that cannot be loaded \(.*\); CXX names another compiler",
        ),
    ],
)
def test_a_compiler_that_fails_is_told(
    script: str, told: str, cache: Path, fake: Callable[[str], Path]
) -> None:
    fake(script)
    with pytest.raises(KernelsUnavailable, match=told) as caught:
        building.find_or_build()
    assert "\n" not in str(caught.value)
    assert list(cache.rglob("*.so")) == list(cache.rglob("build-*")) == []


@pytest.mark.parametrize("when", ["--version", "-c"])
def test_a_compiler_that_hangs_is_stopped(
    when: str, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child of the script keeps what it was given open.
    log = fake(f'case " $* " in *" {when} "*) sleep 600 & echo $! > "$LOG"; wait;; esac\nexec "$REAL" "$@"')
    monkeypatch.setattr(compilers, "LOOK_S", 1.0 if when == "--version" else 60.0)
    monkeypatch.setattr(compiling, "COMPILE_S", 1.0)
    with pytest.raises(KernelsUnavailable, match="did not end within 1 s and was stopped"):
        building.find_or_build()
    wait_for(lambda: not Path(f"/proc/{log.read_text().strip()}/exe").exists())


BAD_LIBRARY = """\
"$REAL" "$@" || exit 1
for last; do :; done
case "$last" in *.o) echo "$last" >> "$LOG";; *kernels.so) echo rubbish > "$last";; esac
"""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (BAD_LIBRARY, "built kernels that cannot be loaded"),
        (BROKEN, r"failed to build the kernels \(error: "),
    ],
)
def test_a_compiler_that_failed_is_not_tried_again(
    script: str, told: str, cache: Path, fake: Callable[[str], Path]
) -> None:
    log = fake(script)
    with pytest.raises(KernelsUnavailable, match=told) as first:
        building.find_or_build()
    tried = log.read_text()
    assert {item.suffix for item in cache.glob("*/*")} == {".failed", ""}
    for attempt in (lambda: building.find_or_build(pytest.fail), lambda: building.build([PORTABLE])):
        with pytest.raises(KernelsUnavailable) as caught:
            attempt()
        today = time.strftime("%Y-%m-%d")
        assert str(caught.value) == (
            f"{first.value}; so it was on {today}, and rmsrepro build-kernels tries again"
        )
        assert log.read_text() == tried
    for keys in ({"again": True}, {"anew": True}):
        with pytest.raises(KernelsUnavailable) as caught:
            building.build([PORTABLE], **keys)
        assert str(caught.value) == str(first.value)
        assert len(log.read_text()) > len(tried)
        tried = log.read_text()
    # Another compiler, though it has the same name.
    fake('exec "$REAL" "$@"')
    assert answers(building.find_or_build()[0])[0] == 42


def test_a_failure_is_forgotten_when_the_compiler_builds(
    cache: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake(f'if [ -e "$LOG" ]; then exec "$REAL" "$@"; fi\n{BROKEN.replace("LOG", "OTHER")}')
    monkeypatch.setenv("OTHER", str(log.with_name("other")))
    with pytest.raises(KernelsUnavailable):
        building.find_or_build()
    log.touch()
    with pytest.raises(KernelsUnavailable, match="tries again"):
        building.find_or_build()
    building.build([PORTABLE], again=True)
    assert list(cache.rglob("*.failed")) == []


@pytest.mark.parametrize("damage", ["", "[1]", '{"why": "x"}'])
def test_a_damaged_record_of_a_failure_is_none(damage: str, cache: Path, fake: Callable[[str], Path]) -> None:
    fake(BROKEN)
    with pytest.raises(KernelsUnavailable):
        building.find_or_build()
    (record,) = cache.rglob("*.failed")
    record.write_text(damage)
    with pytest.raises(KernelsUnavailable) as caught:
        building.find_or_build()
    assert "tries again" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            'case " $* " in *" -c "*) echo "error: No space left on device" >&2; exit 1;; esac',
            "No space left",
        ),
        ('case " $* " in *" -c "*) kill -9 $$;; esac', "no message"),
        ('case " $* " in *" -c "*) sleep 600;; esac', "did not end within 1 s"),
    ],
)
def test_what_may_pass_is_tried_again(
    script: str, told: str, cache: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(f'{script}\nexec "$REAL" "$@"')
    monkeypatch.setattr(compiling, "COMPILE_S", 1.0 if "within" in told else 60.0)
    for _ in range(2):
        with pytest.raises(KernelsUnavailable, match=told) as caught:
            building.find_or_build()
        assert "tries again" not in str(caught.value)
    assert list(cache.rglob("*.failed")) == []


def test_a_library_that_does_not_end_when_loaded_is_told(
    cache: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = compiling.SOURCES / "kernels.cpp"
    source.write_text(
        f"{source.read_text()}\n#include <unistd.h>\n[[gnu::constructor]] static void f() {{ sleep(600); }}\n"
    )
    assert compilers.toolchain()
    monkeypatch.setattr(compilers, "LOOK_S", 1.0)
    with pytest.raises(KernelsUnavailable, match=r"cannot be tried \(.* did not end within 1 s"):
        building.find_or_build()
    assert list(cache.rglob("*.failed")) == []


def test_cxx_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{shutil.which('env')} MORE=1 '{REAL}' -DMORE")
    assert compilers.toolchain().command[1:] == ("MORE=1", REAL, "-DMORE")
    assert answers(building.build([PORTABLE]))[0] == 42
    place = tmp_path / "a folder" / "c++"
    place.parent.mkdir()
    place.symlink_to(str(REAL))
    monkeypatch.setenv("CXX", str(place))
    assert compilers.toolchain().command == (str(place),)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("no-such-compiler", "CXX=no-such-compiler: no-such-compiler is no program; .*apt install g"),
        ("no-such-compiler -O3", "no-such-compiler is no program"),
        ("c++ 'open", "cannot be read"),
        ("/", "is no program"),
    ],
)
def test_a_wrong_cxx_is_told(wanted: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", wanted)
    with pytest.raises(KernelsUnavailable, match=told):
        building.find_or_build(pytest.fail)


def test_a_machine_without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = building.find_or_build()
    tiny_kernels.forget()
    monkeypatch.setenv("PATH", str(tmp_path))
    # What was built before stays good.
    assert building.find_or_build(pytest.fail)[0] == path
    shutil.rmtree(path.parent)
    with pytest.raises(
        KernelsUnavailable, match=r"no C\+\+ compiler \(.*\); install one \(Debian, Ubuntu: apt"
    ):
        building.find_or_build(pytest.fail)


NO_OPENMP = 'case " $* " in *" -fopenmp "*) echo "error: no -fopenmp" >&2; exit 1;; esac\nexec "$REAL" "$@"'
NO_LIBRARY = """\
"$REAL" "$@" || exit 1
for last; do :; done
case " $* " in *" -fopenmp "*kernels.so*) echo rubbish > "$LOG"; cp "$LOG" "$last";; esac
"""


@pytest.mark.parametrize("script", [NO_OPENMP, NO_LIBRARY])
def test_a_compiler_without_openmp(script: str, fake: Callable[[str], Path]) -> None:
    fake(script)
    assert answers(building.build([PORTABLE])) == [42, -40, 42, -40]
    found = building.find([PORTABLE])
    assert found is not None
    assert not found[1].openmp


def test_without_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda name: "/nonexistent")
    assert compilers.toolchain().python_headers is None
    path = building.build([PORTABLE])
    assert not hasattr(ctypes.CDLL(str(path)), "PyInit_rmsrepro_kernels")
    assert answers(path) == [42, -40, 42, -40]
    found = building.find([PORTABLE])
    assert found is not None
    assert not found[1].python_headers


def test_programs_end_with_what_ended_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "usable_processors", lambda: 2)

    def interrupt(index: int, done: programs.Done) -> None:
        raise KeyboardInterrupt

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        programs.run_all([["true"], ["sh", "-c", "sleep 600; true"]], limit_s=600, ended=interrupt)
    assert time.monotonic() - since < 60


def test_the_level_must_be_one_that_the_processor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED, "avx1024")
    with pytest.raises(
        ValueError, match="RMSREPRO_KERNEL_LEVEL=avx1024: the levels of this kind of processor are"
    ):
        building.find_or_build()
    monkeypatch.delenv(FORCED)
    assert best_level() in known_levels()
    if len(known_levels()) > 1:
        monkeypatch.setattr("rmsrepro.norms.backends.fused.levels.processor_flags", frozenset)
        assert best_level() == PORTABLE
        monkeypatch.setenv(FORCED, "avx2")
        with pytest.raises(ValueError, match="this processor lacks avx2, f16c, fma"):
            best_level()
