"""A Slurm of one machine, as far as submitit asks: sbatch with arrays, srun, sacct, scontrol requeue.

    python fake_slurm.py PROGRAM [argument ...]     with FAKE_SLURM=FOLDER for what it keeps

A job that ends while FOLDER/ID.requeue exists is started again, with one more in SLURM_RESTART_COUNT.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "sacct", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Put the programs into FOLDER/bin; return what to set in the environment."""
    (folder / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        file.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def sbatch(folder: Path, script: str) -> None:
    counter = folder / "counter"
    first = int(counter.read_text()) if counter.exists() else 100
    array = re.search(r"--array=0-(\d+)", Path(script).read_text())
    count = int(array[1]) + 1 if array else 1
    counter.write_text(str(first + count))
    for number in range(count):
        name = f"{first}_{number}" if array else str(first)
        (folder / f"{name}.state").write_text("RUNNING")
        environment = {
            **os.environ,
            "SLURM_JOB_ID": str(first + number),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        }
        if array:
            environment |= {"SLURM_ARRAY_JOB_ID": str(first), "SLURM_ARRAY_TASK_ID": str(number)}
        subprocess.Popen(
            [sys.executable, __file__, "watch", script, name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    print(f"Submitted batch job {first}")


def watch(folder: Path, script: str, name: str) -> None:
    restarts = 0
    while True:
        environment = {**os.environ, **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})}
        code = subprocess.call(["bash", script], env=environment)
        if not (folder / f"{name}.requeue").exists():
            break
        (folder / f"{name}.requeue").unlink()
        restarts += 1
    (folder / f"{name}.state").write_text("COMPLETED" if code == 0 else "FAILED")


def srun(folder: Path, *arguments: str) -> None:
    words, files = list(arguments), {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            files[option] = words.pop(0)
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    own = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    for option, number in (("--output", 1), ("--error", 2)):
        name = files[option].replace("%A_%a", own).replace("%j", own).replace("%t", "0")
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644), number)
    os.execvp(words[0], words)


def sacct(folder: Path, *_: str) -> None:
    print("JobID|State|NodeList")
    for file in folder.glob("*.state"):
        print(f"{file.stem}|{file.read_text()}|here")


def scontrol(folder: Path, verb: str, name: str) -> None:
    assert verb == "requeue"
    (folder / f"{name}.requeue").touch()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(os.environ["FAKE_SLURM"]), *sys.argv[2:])
