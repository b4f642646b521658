"""The work on one run folder, from data to result.json."""

from __future__ import annotations

import contextlib
import math
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console

from rmsrepro.config.paths import expanded
from rmsrepro.config.plain import plain, yaml_text
from rmsrepro.config.schema import Strategy, TrainConfig
from rmsrepro.runs.building import build, fit
from rmsrepro.runs.callbacks import RunCallback
from rmsrepro.runs.checkpoint_files import CheckpointFiles
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint
from rmsrepro.runs.clocks import Clocks
from rmsrepro.runs.contention import CONTENDED, Neighbours, is_contended
from rmsrepro.runs.deaths import DEATHS
from rmsrepro.runs.disk import explain_full
from rmsrepro.runs.environment import environment
from rmsrepro.runs.files import read_json, to_json, write_atomic
from rmsrepro.runs.identity import Identity
from rmsrepro.runs.interruption import Interruption
from rmsrepro.runs.mirror import numbers, unify
from rmsrepro.runs.processes import END_S, Followers, followers, threads_each
from rmsrepro.runs.progress import progress_view, speaker
from rmsrepro.runs.reasons import explain
from rmsrepro.runs.records import MetricsLog, read_metrics, write_csv
from rmsrepro.runs.result import FINISHED, RunResult, base_record, flags
from rmsrepro.runs.seeding import seed_dropout
from rmsrepro.runs.starting import starting_point
from rmsrepro.runs.trackers import Tracker, flatten, open_tracker
from rmsrepro.runs.trainer import make_trainer, quiet_lightning
from rmsrepro.tasks import Task, build_task, evaluate, norm_spec


def tokenizer_cache(config: TrainConfig) -> Path:
    """Return the folder that trained tokenizers are kept in."""
    return expanded(config.data.cache_dir or Path(config.out_dir) / "cache")


class Run:
    """The work on one run folder, from data to result.json."""

    def __init__(
        self,
        config: TrainConfig,
        identity: Identity,
        parent: Checkpoint | None,
        folder: Path,
        console: Console,
        interruption: Interruption,
        backend_note: str | None,
    ) -> None:
        self.config, self.identity, self.folder, self.console = config, identity, folder, console
        self.parent, self.interruption, self.backend_note = parent, interruption, backend_note
        self.clocks = Clocks()
        self._neighbours = Neighbours(folder)
        self.say = speaker(console)
        self.training_began = False
        self._callback: RunCallback | None = None
        self._log: MetricsLog | None = None
        self._tracker: Tracker | None = None
        self._parameters = 0
        self._step = 0

    # ------------------------------------------------------------------------- the run

    def execute(self) -> RunResult:
        """Prepare, train, score and record; raise whatever goes wrong."""
        config = self.config
        (self.folder / "error.txt").unlink(missing_ok=True)
        if (threads := threads_each(config.trainer)) is not None:
            torch.set_num_threads(threads)
        with followers(config.trainer) as others:
            module, data, device = self._train(others)
        if self._callback is not None and self._callback.diverged:
            return self._close("diverged", self._callback.diverged)
        self._score(module, data, device)
        return self._close("completed", None)

    def _train(self, others: Followers) -> tuple[Task, Any, torch.device]:
        """Train to the last step and validate there; return the model, its data and its device."""
        config, ranks = self.config, others.ranks
        start = starting_point(config, self.identity.run_id, self.folder, self.parent, self.say)
        if self.parent is not None and start is not self.parent:
            self.parent.hand_over()  # of no use any more
        module, data = build(
            config,
            cache_dir=tokenizer_cache(config),
            fingerprint=self.identity.content["data"],
            start=start,
            ranks=ranks,
        )
        self._parameters = sum(parameter.numel() for parameter in module.parameters())
        self._write_description(data)
        step = start.step if start else 0
        own = start if start is not self.parent else None
        if own is not None:  # its clocks go on from there
            before = (own.state, read_json(self.folder / "result.json") or {})
            self._neighbours.found |= any(map(is_contended, before))
        self._log = MetricsLog(
            self.folder / "metrics.jsonl",
            keep_to_step=step if own else None,
            pending=own.state["pending_row"] if own else None,
        )
        self._tracker = open_tracker(
            config,
            flatten(plain(config)),
            run_id=self.identity.run_id,
            backend=self._backend,
            say=self.say,
            goes_on=own is not None,
        )
        title, note = self.identity.run_id, self.backend_note
        self.say(
            f"{title}: {f'resumed at step {step}' if start else 'training'}, "
            f"{self._parameters:,} parameters, {self._backend} backend{f' ({note})' if note else ''}"
        )
        with progress_view(
            self.console, title, config.trainer.max_steps, enabled=config.trainer.progress
        ) as view:
            payload = self._payload(data)

            def running(step: int) -> dict[str, Any]:
                payload["flags"] = self._flags()
                return {"step": step, "max_steps": config.trainer.max_steps}

            self._callback = RunCallback(
                folder=self.folder,
                trainer_config=config.trainer,
                clocks=self.clocks,
                log=self._log,
                tracker=self._tracker,
                view=view,
                interruption=self.interruption,
                payload=payload,
                data=data,
                running=running,
                ranks=ranks,
            )
            if own:
                self._callback.load(own.state)
            seed_dropout(config.seed)
            self.training_began = True
            self._callback.beat(step)
            others.go(self._order(start, own is not None))
            with quiet_lightning():
                trainer = make_trainer(config, self._callback, ranks=ranks)
                if config.trainer.strategy is not Strategy.fsdp:  # which reads and writes in its own way
                    trainer.strategy.checkpoint_io = CheckpointFiles(start.hand_over() if start else None)
                data.trainer = trainer  # its counter of updates tells the position
                fit(trainer, module, data, start=start, ranks=ranks)
                self._step = trainer.global_step
                self.interruption.check()
                device = trainer.strategy.root_device
                if config.trainer.strategy is not Strategy.single:
                    # The others are done: this process scores the whole model by itself.
                    others.end(patience_s=END_S)
                    if not self._callback.diverged:
                        module = self._whole(module, data)
                    module.processes = 1
                self._finish_validation(trainer, module, data)
        return module, data, device

    def _order(self, start: Checkpoint | None, own: bool) -> dict[str, Any]:
        """What another process has to know to build the same run (see `rmsrepro.runs.follower`)."""
        return {
            "config": plain(self.config),
            "run_id": self.identity.run_id,
            "folder": str(self.folder),
            "cache_dir": str(tokenizer_cache(self.config)),
            "fingerprint": self.identity.content["data"],
            "ckpt": str(start.path) if start else None,
            "own": own,
        }

    def _whole(self, module: Task, data: Any) -> Task:
        """Return the whole model where each process had a part of it: from the checkpoint just written."""
        if self.config.trainer.strategy is not Strategy.fsdp:
            return module
        whole = build_task(self.config, data)
        whole.load_state_dict(load_checkpoint(self.folder).content["state_dict"])
        return whole

    def _finish_validation(self, trainer: L.Trainer, module: Task, data: Any) -> None:
        """Validate at the last step where the interval did not."""
        assert self._callback is not None
        if self._callback.diverged or self._callback.validated_step == self._step:
            return
        assert self._log is not None
        newest = self._log.pending or {}
        if newest.get("step") == self._step and "val_loss" in newest:
            return  # resumed from a checkpoint that was written after the last validation
        self.clocks.switch("eval")
        if self.config.trainer.strategy is Strategy.single:
            trainer.validate(module, dataloaders=data.val_dataloader(), verbose=False)
        else:
            module.validation_metrics = evaluate(module, data, "val", trainer.strategy.root_device)
        self.clocks.switch("other")
        self._callback.record(self._step, dict(module.validation_metrics))
        if not math.isfinite(module.validation_metrics.get("val_loss", 0.0)):
            self._callback.diverged = f"the validation loss is {module.validation_metrics['val_loss']}"

    def _score(self, module: Task, data: Any, device: torch.device) -> None:
        """The figures that are taken once, at the fixed last step: test loss, BLEU, chrF."""
        assert self._callback is not None
        self.clocks.switch("eval")
        scores: dict[str, Any] = dict(evaluate(module, data, "test", device))
        for split in ("val", "test"):
            scores |= module.final_scores(data, split)
        for split, lines in module.hypotheses.items():
            write_atomic(
                self.folder / f"hypotheses_{split}.txt", "".join(f"{_one_line(line)}\n" for line in lines)
            )
        self.clocks.switch("other")
        self._callback.record(self._step, scores)

    # ------------------------------------------------------------------------- records

    @property
    def _backend(self) -> str:
        return norm_spec(self.config).backend_used

    def _payload(self, data: Any) -> dict[str, Any]:
        return {
            "run_id": self.identity.run_id,
            "config": plain(self.config),
            "norm_source": self.identity.content["norm_source"],
            "src_vocab": data.src_vocab,
            "tgt_vocab": data.tgt_vocab,
            "tokenizers": {"src": data.src_tokenizer.to_json(), "tgt": data.tgt_tokenizer.to_json()},
            "bytes_per_token": {split: data.bytes_per_token(split) for split in ("val", "test")}
            if self.config.task.name == "lm"
            else {},
        }

    def _write_description(self, data: Any) -> None:
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "config.yaml", yaml_text(self.config))
        write_atomic(self.folder / "env.json", to_json(environment(self._backend)))
        write_atomic(self.folder / "data.json", to_json(data.summary()))

    def _close(self, status: str, error: str | None) -> RunResult:
        """Write the records of a run's end: metrics.csv, the tracker's summary, result.json.

        Signals wait until they are all written.
        """
        with self.interruption.held():
            return self._write_end(status, error)

    def _write_end(self, status: str, error: str | None) -> RunResult:
        with self.clocks.on("logging"):
            rows: list[dict[str, Any]] = []
            if self._log is not None:
                self._log.flush()
                rows = read_metrics(self._log.path)
            metrics = _newest(rows)
            if rows:
                write_csv(rows, self.folder / "metrics.csv")
            if self._tracker is not None:
                self._tracker.finish(status, numbers(metrics))
        record = self._record(status, metrics, error)
        write_atomic(self.folder / "result.json", to_json(record))
        for name in ("running.json", DEATHS):
            (self.folder / name).unlink(missing_ok=True)
        if self._tracker is not None and status in FINISHED:
            unify(self._tracker, self.folder, expanded(self.config.out_dir), self.say)
        return RunResult(
            self.identity.run_id,
            self.folder,
            status,
            error=error,
            metrics=metrics,
            seconds=record["clocks"]["total_s"],
        )

    def _record(self, status: str, metrics: dict[str, Any], error: str | None) -> dict[str, Any]:
        spec, callback = norm_spec(self.config), self._callback
        notes = {name: value for name, value in metrics.items() if isinstance(value, str)}
        return {
            **base_record(self.config, self.identity.run_id, self.identity.group),
            "status": status,
            "metrics": {name: value for name, value in metrics.items() if name not in notes},
            "metric_notes": notes,
            "clocks": self.clocks.record(),
            "warmup_steps": callback.warmup_steps if callback else 0,
            "warmup_s": callback.warmup_s if callback else 0.0,
            "steps": self._step,
            "tokens": callback.tokens if callback else 0,
            "n_parameters": self._parameters,
            "norm_params": dict(spec.resolved_params),
            "backend_used": spec.backend_used,
            "backend_note": self.backend_note,
            "data_hash": self.identity.content["data"],
            "parent": self.parent.run_id if self.parent else None,
            "error": error,
            "flags": [*flags(self.config), *self._flags()],
        }

    def _flags(self) -> list[str]:
        """What is to be known about the run's times; kept in checkpoints too."""
        return [CONTENDED] if self._neighbours.look() else []

    # --------------------------------------------------------------------- other ends

    def fail(self, error: Exception) -> RunResult:
        """Record an error as the run's end; the traceback lies in error.txt."""
        self.interruption.deferring = False
        self._count_steps()
        full = explain_full(error, self.folder)
        text = full or explain(error)
        if full is None:  # the traceback of a full disk tells no more
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomic(self.folder / "error.txt", "".join(traceback.format_exception(error)))
        try:
            return self._close("failed", text)
        except OSError as problem:  # a full disk takes the record of the failure as well
            with contextlib.suppress(OSError):
                (self.folder / "running.json").unlink(missing_ok=True)
            if full is None:
                text += f"; this could not be recorded ({explain_full(problem, self.folder) or problem})"
            return RunResult(self.identity.run_id, self.folder, "failed", error=text)

    def record_interruption(self) -> None:
        """Record an interrupted run; the same command goes on from its last checkpoint."""
        self.interruption.deferring = False
        if self._log is None:
            return
        self._count_steps()
        self._close("interrupted", "interrupted")
        self.say(f"{self.identity.run_id}: interrupted; the same command goes on from the last checkpoint")

    def _count_steps(self) -> None:
        """Count the updates of a run that broke off."""
        if self._callback is not None:
            self._step = max(self._step, self._callback.step)

    def discard(self) -> None:
        """Take back the descriptions of a run that never began; records of an earlier attempt stay."""
        if (self.folder / "result.json").exists():
            return
        for name in ("config.yaml", "env.json", "data.json"):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder / "checkpoints").rmdir()


def _newest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest value of every metric: none is taken from a better, earlier step."""
    merged: dict[str, Any] = {}
    for row in rows:
        merged |= row
    return {name: value for name, value in merged.items() if name not in ("step", "train_seconds", "tokens")}


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
