"""One training run from a resolved config to its records."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import OmegaConf
from rich.console import Console

from rmsrepro.config.compose import plain
from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import TrainConfig
from rmsrepro.data import build_data, data_fingerprint
from rmsrepro.runs.callbacks import RunCallback
from rmsrepro.runs.checkpoints import Checkpoint, load_checkpoint
from rmsrepro.runs.clocks import Clocks
from rmsrepro.runs.environment import environment, machine
from rmsrepro.runs.files import Locked, lock, read_json, to_json, write_atomic
from rmsrepro.runs.identity import Identity, identify
from rmsrepro.runs.interruption import Interrupted, Interruption, handling_signals
from rmsrepro.runs.progress import progress_view
from rmsrepro.runs.records import SCHEMA_VERSION, MetricsLog, read_metrics, write_csv
from rmsrepro.runs.seeding import seed_dropout, stream_seed
from rmsrepro.runs.trackers import Tracker, flatten, open_tracker
from rmsrepro.tasks import Task, build_task, evaluate, norm_spec

FINISHED = ("completed", "diverged")


@dataclass
class RunResult:
    """What became of a run: `status` as in result.json, or "busy" when another process is at work on it."""

    run_id: str
    path: Path
    status: str
    skipped: bool = False
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def runs_dir(out_dir: str | Path) -> Path:
    return Path(out_dir).expanduser() / "runs"


def tokenizer_cache(config: TrainConfig) -> Path:
    return Path(config.data.cache_dir or Path(config.out_dir) / "cache").expanduser()


def plan(config: TrainConfig) -> tuple[Identity, Checkpoint | None]:
    """Return who the run of a resolved config is, and the checkpoint that it starts from, if any.

    Raises:
        UserError: missing data or checkpoint, a norm that cannot be built, or a backend it has not.
    """
    parent = load_checkpoint(config.ckpt) if config.ckpt else None
    spec = norm_spec(config)
    try:
        spec.resolved_params  # noqa: B018 - raises for wrong parameters
        spec.build(max(1, config.model.d_model or 1))
    except (ValueError, TypeError) as error:
        raise UserError(f"norm={spec.name}: {error}") from error
    data_hash = data_fingerprint(config.data, config.task.name)
    if parent is not None:
        _check_continuation(config, parent)
    return identify(config, data_hash=data_hash, parent=parent.run_id if parent else None), parent


def _check_continuation(config: TrainConfig, parent: Checkpoint) -> None:
    before, now = plain(parent.config), plain(config)
    for part in ("norm", "model", "task", "placement", "sites"):
        if before[part] != now[part]:
            raise UserError(
                f"ckpt={parent.path}: it was trained with {part}={before[part]}, not {now[part]}; "
                "to go on training it, leave the model, norm and task as they were"
            )


def finished_result(folder: Path) -> dict[str, Any] | None:
    """Return the record of a run that needs no more work, else None."""
    record = read_json(folder / "result.json")
    return record if record is not None and record.get("status") in FINISHED else None


def train(config: TrainConfig, *, console: Console | None = None, report_errors: bool = False) -> RunResult:
    """Train one run, resume it, or find it finished.

    Args:
        config: resolved (`rmsrepro.config.resolve.resolve`).
        report_errors: True in a sweep: an error is recorded and returned as status `failed`; else a
            UserError raised before training begins passes on, having left nothing behind.

    Raises:
        UserError: see `report_errors`, and `plan`.
        Interrupted: after the checkpoint and the record were written.
    """
    console = console or Console()
    say = _speaker(console)
    identity, parent = plan(config)
    folder = runs_dir(config.out_dir) / identity.run_id
    done = finished_result(folder)
    if done is not None and not config.rerun:
        say(f"{identity.run_id}: {done['status']} already, nothing to do (rerun=true trains it anew)")
        return RunResult(identity.run_id, folder, done["status"], skipped=True, metrics=done.get("metrics", {}))
    if parent is not None and parent.step >= config.trainer.max_steps:
        say(
            f"ckpt={parent.path} is at step {parent.step} already: trainer.max_steps={config.trainer.max_steps} "
            f"asks for no further update. Nothing was done; set trainer.max_steps above {parent.step}."
        )
        return RunResult(parent.run_id, parent.path.parent.parent, "completed", skipped=True)
    existed = folder.exists()
    try:
        with lock(folder / "lock.json"), handling_signals() as interruption:
            if config.rerun and existed:
                _archive(folder)
            run = Run(config, identity, parent, folder, console, interruption)
            try:
                return run.execute()
            except UserError as error:
                if report_errors or run.training_began:
                    return run.fail(error)
                run.discard()
                raise
            except Interrupted:
                run.record_interruption()
                raise
            except Exception as error:
                return run.fail(error)
    except UserError:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    except Locked as busy:
        say(f"{identity.run_id}: another process (pid {busy.owner.get('pid')}) is at work on it; left to it")
        return RunResult(identity.run_id, folder, "busy", skipped=True)


def _speaker(console: Console) -> Callable[[str], None]:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    return say


def _archive(folder: Path) -> None:
    """Move the files of an earlier run of this identity aside; nothing is overwritten."""
    kept = folder.parent.parent / "archive" / f"{folder.name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    kept.mkdir(parents=True)
    for item in folder.iterdir():
        if item.name != "lock.json":
            item.rename(kept / item.name)


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
    ) -> None:
        self.config, self.identity, self.folder, self.console = config, identity, folder, console
        self.parent = parent
        self.interruption = interruption
        self.clocks = Clocks()
        self.say = _speaker(console)
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
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        start = self._starting_point()
        data = build_data(
            config.data,
            config.task.name,
            seed=stream_seed(config.seed, "data"),
            accumulate=config.trainer.accumulate,
            cache_dir=tokenizer_cache(config),
        )
        data.setup("fit")
        module = build_task(config, data)
        self._parameters = sum(parameter.numel() for parameter in module.parameters())
        self._write_description(data)
        step = start.step if start else 0
        data.start_batch = step * config.trainer.accumulate
        own = start is not None and start is not self.parent
        self._log = MetricsLog(self.folder / "metrics.jsonl", keep_to_step=step if own else None)
        self._tracker = open_tracker(
            config, flatten(plain(config)), run_id=self.identity.run_id, backend=self._backend, say=self.say
        )
        title = self.identity.run_id
        self.say(f"{title}: {'resumed at step ' + str(step) if start else 'training'}, {self._parameters:,} parameters")
        with progress_view(self.console, title, config.trainer.max_steps, enabled=config.trainer.progress) as view:
            self._callback = RunCallback(
                folder=self.folder,
                trainer_config=config.trainer,
                clocks=self.clocks,
                log=self._log,
                tracker=self._tracker,
                view=view,
                interruption=self.interruption,
                payload=self._payload(data),
                running=lambda step: {"step": step, "max_steps": config.trainer.max_steps},
            )
            if own and start is not None:
                self._callback.load(start.state)
            seed_dropout(config.seed)
            self.training_began = True
            with _quiet_lightning():
                trainer = self._trainer(self._callback)
                trainer.fit(
                    module, datamodule=data, ckpt_path=str(start.path) if start else None, weights_only=True
                )
                self._step = trainer.global_step
                self.interruption.check()
                self._finish_validation(trainer, module, data)
        if self._callback.diverged:
            return self._close("diverged", self._final_metrics(), self._callback.diverged)
        self._score(module, data)
        return self._close("completed", self._final_metrics(), None)

    def _starting_point(self) -> Checkpoint | None:
        """This run's own last checkpoint, else its parent's."""
        own = self.folder / "checkpoints" / "last.ckpt"
        if own.is_file():
            try:
                return load_checkpoint(own)
            except UserError as error:
                self.say(f"note: {error}; starting anew")
        return self.parent

    def _trainer(self, callback: RunCallback) -> L.Trainer:
        trainer = self.config.trainer
        every = (trainer.val_every or 1) * trainer.accumulate
        return L.Trainer(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            precision="bf16-mixed" if self.config.precision == "bf16-mixed" else "32-true",
            max_steps=trainer.max_steps,
            max_epochs=-1,
            accumulate_grad_batches=trainer.accumulate,
            val_check_interval=every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[callback],
        )

    def _finish_validation(self, trainer: L.Trainer, module: Task, data: Any) -> None:
        """Validate at the last step where the interval did not."""
        assert self._callback is not None
        if self._callback.diverged or self._callback.validated_step == self._step:
            return
        recorded = read_metrics(self.folder / "metrics.jsonl")
        if recorded and recorded[-1]["step"] == self._step and "val_loss" in recorded[-1]:
            return
        self.clocks.switch("eval")
        trainer.validate(module, datamodule=data, verbose=False)
        self.clocks.switch("other")
        self._callback.record(self._step, dict(module.validation_metrics))
        if not math.isfinite(module.validation_metrics.get("val_loss", 0.0)):
            self._callback.diverged = f"the validation loss is {module.validation_metrics['val_loss']}"

    def _score(self, module: Task, data: Any) -> None:
        """The figures that are taken once, at the fixed last step: test loss, BLEU, chrF."""
        assert self._callback is not None
        self.clocks.switch("eval")
        scores: dict[str, Any] = dict(evaluate(module, data, "test"))
        for split in ("val", "test"):
            scores |= module.final_scores(data, split)
        for split, lines in module.hypotheses.items():
            write_atomic(self.folder / f"hypotheses_{split}.txt", "".join(f"{_one_line(line)}\n" for line in lines))
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
            "src_vocab": data.src_vocab,
            "tgt_vocab": data.tgt_vocab,
            "tokenizers": {"src": data.src_tokenizer.to_json(), "tgt": data.tgt_tokenizer.to_json()},
            "bytes_per_token": {split: data.bytes_per_token(split) for split in ("val", "test")}
            if self.config.task.name == "lm"
            else {},
        }

    def _write_description(self, data: Any) -> None:
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain(self.config))))
        write_atomic(self.folder / "env.json", to_json(environment()))
        write_atomic(self.folder / "data.json", to_json(data.summary()))

    def _final_metrics(self) -> dict[str, Any]:
        """The newest value of every metric; none is taken from a better, earlier step but `step` columns."""
        assert self._log is not None
        self._log.flush()
        rows = read_metrics(self.folder / "metrics.jsonl")
        merged: dict[str, Any] = {}
        for row in rows:
            merged |= row
        return {name: value for name, value in merged.items() if name not in ("step", "train_seconds", "tokens")}

    def _close(self, status: str, metrics: dict[str, Any], error: str | None) -> RunResult:
        with self.clocks.on("logging"):
            rows = read_metrics(self.folder / "metrics.jsonl")
            if rows:
                write_csv(rows, self.folder / "metrics.csv")
            if self._tracker is not None:
                self._tracker.finish(status, {k: v for k, v in metrics.items() if isinstance(v, int | float)})
        record = self._record(status, metrics, error)
        write_atomic(self.folder / "result.json", to_json(record))
        (self.folder / "running.json").unlink(missing_ok=True)
        return RunResult(
            self.identity.run_id, self.folder, status, error=error, metrics=metrics, seconds=record["clocks"]["total_s"]
        )

    def _record(self, status: str, metrics: dict[str, Any], error: str | None) -> dict[str, Any]:
        config = self.config
        spec = norm_spec(config)
        callback = self._callback
        notes = {name: value for name, value in metrics.items() if isinstance(value, str)}
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.identity.run_id,
            "status": status,
            "config": plain(config),
            "metrics": {name: value for name, value in metrics.items() if name not in notes},
            "metric_notes": notes,
            "clocks": self.clocks.record(),
            "warmup_steps": callback.warmup_steps if callback else 0,
            "warmup_s": callback.warmup_s if callback else 0.0,
            "steps": self._step,
            "tokens": callback.tokens if callback else 0,
            "n_parameters": self._parameters,
            "norm": spec.name,
            "norm_params": dict(spec.resolved_params),
            "backend": config.backend.value,
            "backend_used": spec.backend_used,
            "model": config.model.name,
            "task": config.task.name,
            "data": config.data.name,
            "data_hash": self.identity.content["data"],
            "seed": config.seed,
            "parent": self.parent.run_id if self.parent else None,
            "error": error,
            "group": self.identity.group,
            "study": config.study_name,
            "experiment": config.experiment,
            "placement": config.placement.value,
            "sites": [site.value for site in config.sites],
            "precision": config.precision,
            "flags": _flags(config),
            "machine": {**machine(), "threads": torch.get_num_threads()},
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    # --------------------------------------------------------------------- other ends

    def fail(self, error: Exception) -> RunResult:
        """Record an error as the run's end; the traceback lies in error.txt."""
        self.interruption.deferring = False
        text = explain(error)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / "error.txt", "".join(traceback.format_exception(error)))
        metrics = self._final_metrics() if self._log is not None else {}
        return self._close("failed", metrics, text)

    def record_interruption(self) -> None:
        """Record an interrupted run; the same command goes on from its last checkpoint."""
        self.interruption.deferring = False
        if self._log is None:
            return
        if self._callback is not None:
            self._step = max((row["step"] for row in read_metrics(self._log.path)), default=0)
        self._close("interrupted", self._final_metrics(), "interrupted")
        self.say(f"{self.identity.run_id}: interrupted; the same command goes on from the last checkpoint")

    def discard(self) -> None:
        """Take back the descriptions of a run that never began; records of an earlier attempt stay."""
        if (self.folder / "result.json").exists():
            return
        for name in ("config.yaml", "env.json", "data.json"):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder / "checkpoints").rmdir()


def record_failure(config: TrainConfig, run_id: str, error: Exception) -> RunResult:
    """Record a job of a sweep that could not even be planned."""
    folder = runs_dir(config.out_dir) / run_id
    text = explain(error)
    record = {
        "schema_version": SCHEMA_VERSION, "run_id": run_id, "status": "failed", "config": plain(config), "metrics": {},
        "clocks": Clocks().record(), "steps": 0, "n_parameters": 0, "norm": config.norm["name"], "norm_params": {},
        "backend": config.backend.value, "backend_used": config.backend.value, "model": config.model.name,
        "task": config.task.name, "data": config.data.name, "seed": config.seed, "parent": None, "error": text,
        "group": run_id, "study": config.study_name, "experiment": config.experiment,
        "placement": config.placement.value, "sites": [site.value for site in config.sites],
        "precision": config.precision, "flags": [], "machine": machine(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    write_atomic(folder / "result.json", to_json(record))
    return RunResult(run_id, folder, "failed", error=text)


def explain(error: Exception) -> str:
    """Say what went wrong and, where it is known, what to do."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, UserError):
        return text
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in text.lower():
        return f"out of memory: {text.splitlines()[0]}; lower data.batch_tokens (and raise trainer.accumulate), or model.size"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _flags(config: TrainConfig) -> list[str]:
    flags = list(norm_spec(config).flags(config.model.d_model or 1))
    if config.placement.value == "none" and config.norm["name"] != "none" and config.model.name == "transformer":
        flags.append("placement=none: the model has no norm")
    return flags


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep Lightning's hints for other uses (workers, loggers, upgrades) out of a run's output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning(\.|$)")
            warnings.filterwarnings("ignore", message=r".*(does not have many workers|dataloader is not resumable).*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def with_backend(config: TrainConfig, backend: str) -> TrainConfig:
    """Return `config` with a backend that was settled for a whole sweep."""
    return replace(config, backend=type(config.backend)(backend))
