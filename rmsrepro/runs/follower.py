"""A process that trains a run together with the one that was started by the command.

It writes no record and heeds no signal: it does what the first process decides, and ends when that one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rmsrepro.runs.interruption import SIGNALS, Interrupted, Interruption

for _number in SIGNALS:
    signal.signal(_number, signal.SIG_IGN)

from rmsrepro.config.plain import from_plain  # noqa: E402
from rmsrepro.config.plugins import import_from_here, load_plugins  # noqa: E402
from rmsrepro.runs.building import build, fit  # noqa: E402
from rmsrepro.runs.callbacks import RunCallback  # noqa: E402
from rmsrepro.runs.checkpoints import load_checkpoint  # noqa: E402
from rmsrepro.runs.clocks import Clocks  # noqa: E402
from rmsrepro.runs.processes import Ranks, threads_each  # noqa: E402
from rmsrepro.runs.progress import Silent  # noqa: E402
from rmsrepro.runs.records import NoLog  # noqa: E402
from rmsrepro.runs.seeding import seed_dropout  # noqa: E402
from rmsrepro.runs.trackers import NoTracker  # noqa: E402
from rmsrepro.runs.trainer import make_trainer, quiet_lightning  # noqa: E402


class Deaf(Interruption):
    """Signals are the first process's business; what it decides is put into `pending`."""

    def install(self) -> dict[int, object]:
        return {}


def main(tell: int) -> None:
    """Read an order from the standard input and train; write a byte to `tell` when about to."""
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_end_with_the_first, name="first-process", daemon=True).start()
    with contextlib.suppress(Interrupted):
        follow(json.loads(line), tell)


def _end_with_the_first() -> None:
    sys.stdin.read()
    os._exit(1)


def follow(order: dict[str, Any], tell: int) -> None:
    """Train the run of an order (see `rmsrepro.runs.execution`) as process `rank` of `size`."""
    import torch

    config = from_plain(order["config"])
    ranks = Ranks(order["rank"], order["size"], order["port"])
    import_from_here()
    load_plugins(config.plugins)
    threads = threads_each(config.trainer)
    if threads is not None:
        torch.set_num_threads(threads)
    start = load_checkpoint(order["ckpt"]) if order["ckpt"] else None
    module, data = build(
        config,
        cache_dir=Path(order["cache_dir"]),
        fingerprint=order["fingerprint"],
        start=start,
        ranks=ranks,
    )
    callback = RunCallback(
        folder=Path(order["folder"]),
        trainer_config=config.trainer,
        clocks=Clocks(),
        log=NoLog(),
        tracker=NoTracker(),
        view=Silent(),
        interruption=Deaf(),
        payload={"run_id": order["run_id"]},
        running=lambda step: {},
        ranks=ranks,
    )
    if start and order["own"]:
        callback.load(start.state)
    seed_dropout(config.seed, ranks.rank)
    with quiet_lightning():
        trainer = make_trainer(config, callback, ranks=ranks)
        os.write(tell, b"1")
        fit(trainer, module, data, start=start, ranks=ranks)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
