#!/usr/bin/env python3
"""A sweep with planted failures that is killed on the way must end whole. See --help."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PLUGIN = '''\
"""A norm that breaks in training, and not when it is tried out on a few rows beforehand."""

import os
import signal

import torch
from torch import nn


class Faulty(nn.Module):
    def __init__(self, dim: int, *, fault: str = "error") -> None:
        super().__init__()
        self.weight, self.fault = nn.Parameter(torch.ones(dim)), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() // x.shape[-1] >= 100:
            break_down(self.fault)
        return x * self.weight


def break_down(fault: str) -> None:
    if fault == "memory":
        torch.empty(1 << 50)
    if fault == "python_memory":
        raise MemoryError
    if fault == "package":
        import no_such_package_anywhere
    if fault == "killed" and os.environ.get("PLANTED_WORKERS"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"planted: {fault}")
'''
FAULTS = ("memory", "python_memory", "package", "killed", "error")
NORMS = ("layernorm", "rmsnorm", "l2norm", "prmsnorm", "layernorm_nobias")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Runs a sweep of 40 tiny jobs of which 5 must fail, kills it three times (SIGKILL, "
        "SIGTERM, SIGINT), repeats the same command each time, and looks at the records: 35 completed, 5 "
        "failed, no run trained twice. Takes some minutes. Exit code 0 if all of that holds.",
    )
    parser.add_argument("--launcher", default="joblib", choices=("basic", "joblib"))
    parser.add_argument("--workers", type=int, default=2, help="worker processes of joblib (2)")
    parser.add_argument("--kills", default="KILL,TERM,INT", help="signals, in turn (KILL,TERM,INT)")
    parser.add_argument("--eps", type=int, default=7, help="values of eps: 5 good jobs for each (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (0)")
    parser.add_argument("--folder", type=Path, help="work here and keep it (else a temporary folder)")
    return parser.parse_args()


def command(options: argparse.Namespace) -> list[str]:
    """Return the sweep's command."""
    eps = ",".join(f"{number + 1}e-6" for number in range(options.eps))
    return [
        *(sys.executable, "-m", "rmsrepro", "sweep", "debug=fast", "model=gru", "model.d_model=16"),
        *("trainer.max_steps=30", "trainer.val_every=10", "trainer.num_threads=1", "backend=composite"),
        # A parameter applies to the norms that have it, and jobs that are the same are merged.
        f"norm={','.join(NORMS)},planted:Faulty",
        *(f"norm.eps={eps}", f"norm.fault={','.join(FAULTS)}", f"launcher={options.launcher}"),
        *([f"n_jobs={options.workers}"] if options.launcher == "joblib" else []),
    ]


def read(path: Path) -> dict[str, object]:
    """Return a record; empty where there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Trainings:
    """How often each completed run was written: a change after completion means that it was trained twice."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.first: dict[str, tuple[int, object]] = {}
        self.again: set[str] = set()

    def look(self) -> int:
        """Look at all records; return how many runs are completed."""
        for file in self.runs.glob("*/result.json"):
            record = read(file)
            if record.get("status") != "completed":
                if file.parent.name in self.first and record:
                    self.again.add(file.parent.name)
                continue
            mark = (file.stat().st_mtime_ns, record.get("finished"))
            if self.first.setdefault(file.parent.name, mark) != mark:
                self.again.add(file.parent.name)
        return len(self.first)


def attempt(
    words: list[str], folder: Path, trainings: Trainings, stop: tuple[int, signal.Signals] | None
) -> tuple[int, str]:
    """Run the command; with `stop` send a signal once so many runs are completed. Return code and output."""
    log = folder / "sweep.log"
    environment = surroundings(folder)
    if "launcher=basic" not in words:
        environment["PLANTED_WORKERS"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    told = -1
    while process.poll() is None:
        done = trainings.look()
        if done != told and sys.stderr.isatty():
            print(f"\r    {done} completed ", end="", file=sys.stderr, flush=True)
        told = done
        if stop is not None and done >= stop[0]:
            process.send_signal(stop[1])
            process.wait()
        time.sleep(0.1)
    trainings.look()
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return process.returncode, log.read_text(errors="replace")


def surroundings(folder: Path) -> dict[str, str]:
    """Return the environment of the programs: they find this checkout, and the planted norm."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def main() -> int:
    """Run the trial in its folder."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="rmsrepro-sweep-") as temporary:
        return trial(options, (options.folder or Path(temporary)).resolve())


def trial(options: argparse.Namespace, folder: Path) -> int:
    """Run, kill, repeat, and judge; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "outputs").exists():
        sys.exit(f"error: {folder / 'outputs'} is there already; name a new folder")
    (folder / "planted.py").write_text(PLUGIN)
    words, runs = command(options), folder / "outputs" / "runs"
    good, failed = len(NORMS) * options.eps, len(FAULTS)
    print(shlex.join(["rmsrepro", *words[3:]]), flush=True)
    kills = [signal.Signals[f"SIG{name}"] for name in options.kills.split(",") if name]
    source, trainings, problems = random.Random(options.seed), Trainings(runs), []
    for number, kind in enumerate(kills):
        first, last = number * good // len(kills), (number + 1) * good // len(kills) - 1
        code, _ = attempt(words, folder, trainings, (source.randint(first + 1, max(first + 1, last)), kind))
        done = len(trainings.first)
        print(f"  {kind.name} after {done} completed runs: exit code {code}", flush=True)
        if code not in (-kind, 128 + kind):
            problems.append(f"{kind.name}: exit code {code}")
    code, text = attempt(words, folder, trainings, None)
    print(f"  repeated: exit code {code}", flush=True)
    once, again = attempt(words, folder, trainings, None)
    print(f"  repeated once more: exit code {once}", flush=True)
    problems += [f"exit code {found} instead of 1" for found in (code, once) if found != 1]
    if f"{good} runs" not in again and f"{good} done already, {failed} to do" not in again:
        problems.append("the finished runs were not skipped")
    states = Counter(str(read(file).get("status")) for file in runs.glob("*/result.json"))
    if states != {"completed": good, "failed": failed}:
        problems.append(f"the records say {dict(states)}")
    if len(list(runs.iterdir())) != good + failed:
        problems.append(f"{len(list(runs.iterdir()))} run folders")
    problems += [f"trained twice: {run_id}" for run_id in sorted(trainings.again)]
    problems += [f"no metrics, or steps twice: {run.name}" for run in runs.iterdir() if not whole(run)]
    listed = set(re.findall(r"norm.fault=(\w+)", text.rpartition("completed")[2]))
    if listed != set(FAULTS):
        problems.append(f"the end of the sweep lists {sorted(listed)}")
    if "Traceback" in text:
        problems.append("a traceback was printed")
    report = subprocess.run(
        [sys.executable, "-m", "rmsrepro", "report"],
        cwd=folder,
        env=surroundings(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in report.stdout.splitlines() if line.startswith("runs: ")]
    line = lines[0] if lines else report.stderr[-300:]
    print(f"  report: {line}")
    if line != f"runs: {good} completed, {failed} failed":
        problems.append("the report says otherwise")
    page = (folder / "outputs" / "reports" / "all" / "index.html").read_text()
    if f"{good + failed} runs: {good} completed, {failed} failed" not in re.sub("<[^>]*>", "", page):
        problems.append("the report's page says otherwise")
    for reason in sorted({str(read(file).get("error")) for file in runs.glob("*/result.json")} - {"None"}):
        print(f"  reason: {reason}")
    for problem in problems:
        print(f"  WRONG: {problem}")
    twice = len(trainings.again)
    print(
        f"{states['completed']} completed, {states['failed']} failed, {twice or 'none'} twice "
        f"({len(kills)} kills)"
    )
    return 1 if problems else 0


def whole(run: Path) -> bool:
    """Whether a completed run has each step once."""
    if read(run / "result.json").get("status") != "completed":
        return True
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return bool(steps) and steps == sorted(set(steps)) and steps[-1] == 30


if __name__ == "__main__":
    sys.exit(main())
