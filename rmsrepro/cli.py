"""The command line: `rmsrepro VERB [key=value ...]`.

Thin on purpose: it reads the verb and its own options, and hands over. Nothing heavy is imported before
a verb needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsrepro.config.errors import StrayEnd, UserError, check_text, for_screen, nearest

OVERVIEW = """\
rmsrepro: does RMSNorm train as well as LayerNorm, and what time does it save?

usage: rmsrepro VERB [key=value ...]        rmsrepro VERB --help

  train      one training run            rmsrepro train norm=rmsnorm model=gru
  eval       loss, scores of a model     rmsrepro eval ckpt=outputs/runs/RUN
  translate  lines of text from a pipe   rmsrepro translate ckpt=RUN < file
  sample     text from a language model  rmsrepro sample ckpt=RUN prompt="To be"
  convert    LayerNorm to equal RMSNorm  rmsrepro convert ckpt=RUN to=rmsnorm
  sweep      many runs, resumable        rmsrepro sweep norm=layernorm,rmsnorm
  status     what is done, running, left rmsrepro status watch=true
  bench      paired timing of norms      rmsrepro bench norm=layernorm,rmsnorm
  reproduce  runs + timing + report      rmsrepro reproduce study=quick
  export     a wandb mirror of the runs  rmsrepro export wandb
  report     the page, from the records  rmsrepro report
  norms      norms and their parameters  rmsrepro norms norm=prmsnorm
  check-norm a norm's card, measured     rmsrepro check-norm rmsnorm
  inspect    which norms a model has     rmsrepro inspect package.module:factory
  doctor     what can be measured here   rmsrepro doctor
  build-kernels  fused, ahead of time    rmsrepro build-kernels

Everything is written to ./outputs (out_dir=DIR to change it). All keys of a
training run, with the file each value comes from: rmsrepro train show=true
exit codes: 0 done, 1 something failed, 2 wrong command, 130/143 interrupted"""

HELP = {
    "train": """\
usage: rmsrepro train [key=value ...]

One training run. The same command again does nothing when it is finished, and
goes on when it is not.

  norm=layernorm|rmsnorm|prmsnorm|...   rmsrepro norms lists them
  norm.eps=1e-6 norm.p=0.25             parameters of the norm
  model=transformer|gru                 model.size=tiny|small|paper
  task=lm           data=pydoc|tinyshakespeare|wikitext|text_files
  task=translation  data=cldr|multi30k|wmt14|parallel_files
                    data.path=FOLDER    for text_files and parallel_files
  placement=pre|post|sandwich|res_post  sites=[gates_x,cand_x] in a GRU
  backend=auto|fused|torch|compiled|composite    precision=32|bf16-mixed
  optim.lr=3e-3 trainer.max_steps=300 model.d_model=128 seed=1
  experiment=NAME    a ready set of values (conf/experiment)
  show=true          print the composed config and where its parts come from
  ckpt=PATH trainer.max_steps=N   continue a checkpoint as a new run
  rerun=true         train again although it is finished
  tracker=none       no wandb mirror (by default offline: no account needed)
  trainer=ddp trainer.devices=2   two processes, each with a part of a batch""",
    "eval": """\
usage: rmsrepro eval ckpt=RUN [split=val|test|both] [key=value ...]

Loss and, for translation, BLEU and chrF of a trained model on its data. RUN is
a run's folder or a .ckpt file. Keys of data and task (data.path=...,
task.beam_size=5) are taken as overrides of the trained config.""",
    "translate": """\
usage: rmsrepro translate ckpt=RUN [beam_size=5] [length_penalty=1.0] < source

Reads one sentence a line from the standard input and writes one translation a
line.""",
    "sample": """\
usage: rmsrepro sample ckpt=RUN [prompt=TEXT] [num_tokens=200]
                       [temperature=1.0] [top_k=K] [seed=0]

Writes text with a trained language model. temperature=0 takes the likeliest
token each time.""",
    "convert": """\
usage: rmsrepro convert RUN [to=rmsnorm] [out_dir=DIR]      or ckpt=RUN

Writes an equal RMSNorm model of a trained pre-norm LayerNorm Transformer,
compares the logits of both in float64 and float32, and prints the new
checkpoint. Fails (1), and writes nothing, when they differ by more than
rounding. RUN is a run's folder or a .ckpt file.""",
    "sweep": """\
usage: rmsrepro sweep study=NAME [key=value ...]
       rmsrepro sweep norm=a,b model=gru,transformer seed=1,2,3

Every combination of the values, finished runs skipped. All jobs are composed
before the first starts.

  dry_run=true                list the jobs and what is left, and stop
  launcher=basic|joblib       one after another, or n_jobs=N worker processes
  launcher=submitit_local     a process a job, n_jobs=N at a time
  launcher=submitit_slurm     a job array in Slurm: launcher.partition=NAME ...
  on_error=continue|stop      what to do after a job has failed
  tune=true                   equal trials of learning rate, warm-up and weight
                              decay for every norm, then its best with fresh
                              seeds: tuning.points=8 tuning.lr=[1e-3,3e-2]
                              tuning.final_seeds=[1,2,3]""",
    "status": """\
usage: rmsrepro status [watch=true] [out_dir=DIR]

Runs that are done, running, failed and left, and the time to go. Of sweeps
and tunings: which is at work, which was abandoned, what is left of it, and its
command.

  forget=ID          give up an abandoned one (its runs stay);
                     forget=abandoned: all such""",
    "bench": """\
usage: rmsrepro bench [bench=step] [norm=layernorm,rmsnorm]
                      [backend=composite,torch,compiled,fused] [key=value ...]

Times each norm against LayerNorm: interleaved rounds in several fresh
processes, LayerNorm twice as a control. The keys of train say what is timed
(model, task, data, precision, ...).

  bench=step            a whole training step; bench.framework=true adds it
                        inside Lightning's Trainer
  bench=model           forward and backward: bench.modes=[fwd,fwd_bwd];
                        model=package.module:factory times a model of your own,
                        factory(norm) -> module, inputs
  bench=layer           one norm by itself: bench.shapes=[80x1024]
                        bench.dtypes=[float32,bfloat16]
  bench.processes=8     fresh processes (the unit of the interval)
  bench.budget_s=120    seconds in all
  bench.precision=0.02  half-width aimed at""",
    "reproduce": """\
usage: rmsrepro reproduce study=smoke|quick|... [key=value ...]

Trains the study's runs (finished ones are skipped), times a step with each
norm, builds the page and prints the scorecard.""",
    "report": """\
usage: rmsrepro report [study=NAME] [out_dir=DIR] [watch=true]

Builds one self-contained HTML page, and results.csv beside it, from whatever
records exist.""",
    "export": """\
usage: rmsrepro export wandb [RUN ...] [out_dir=DIR]

Makes the offline mirror of each run (or of those named, by id or folder) from
its records: also of runs that were trained with tracker=none. It takes the
place of the earlier ones of the run, in out_dir/wandb. No account, no network;
wandb sync uploads them.""",
    "norms": """\
usage: rmsrepro norms [NAME] [plugins=[module,...]]      or norm=NAME

The norms with their parameters and defaults; with NAME all about one of them:
its source, backends and what each parameter means. NAME is a norm,
pkg.module:Class, or a file of conf/norm.""",
    "check-norm": """\
usage: rmsrepro check-norm NAME|pkg.module:Class [norm.eps=1e-6 ...]
                           [key=value ...]

Measures a norm's properties: agreement with float64, gradients, dtypes, zero
rows, shapes, torch.compile and torch.export, saving, invariances (the paper's
table 1), cost, where settings of eps part. Prints the card and writes it to
outputs/cards/NAME.json, or with parameters to NAME-eps_1e-06.json. Fails (1)
when a check does.

  dim=64                    width
  backend=composite         or fused, torch, compiled, auto
  plugins=[module,...]      modules that register norms
  out_dir=DIR               where outputs go
  show=true                 print what would be measured, and stop""",
    "inspect": """\
usage: rmsrepro inspect package.module:NAME [norm=rmsnorm norm.eps=1e-6 ...]
                        [key=value ...]

Reads any torch.nn.Module and says, by probing copies of its submodules with
inputs, which of them normalise: which subtract a mean, carry a bias, where eps
stands. NAME is a module, a class or a function that returns a module, or a
module and inputs: then it is run, too, and what is normalised outside of any
norm shows. Writes outputs/inspections/package.module.NAME.json.

  norm=NAME norm.eps=1e-6   the norm that the model should have: what differs is
                            named, exit code 1; a function with an argument is
                            called with it (norm.build(dim))
  plugins=[module,...]      modules that register norms
  out_dir=DIR               where outputs go""",
    "doctor": """\
usage: rmsrepro doctor [trial_s=10] [trial=false]

What this machine can measure: cores, load, frequency, memory, compiler,
kernels, threads, GPU, backends, the clock, and by a short trial of LayerNorm
against itself how small a difference a bench can tell. Writes nothing.

  trial_s=10    seconds of the trial       trial=false   without it""",
    "build-kernels": """\
usage: rmsrepro build-kernels [rerun=true]

Compiles the kernels of backend=fused for every level of vector instructions
that this kind of processor may have, into one library: for an image or a home
directory that several machines use. Without it, the first use compiles those
of the machine's own processor, in seconds. The library lies in RMSREPRO_CACHE,
else in ~/.cache/rmsrepro. CXX names the compiler.

  rerun=true    build it anew although it is there""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    from rmsrepro.runs.interruption import Interrupted, ending_on_sigterm

    try:
        check_text(arguments)
        with ending_on_sigterm():
            return _answer(arguments)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except UserError as error:
        print(for_screen(f"error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        # None of ours comes here: a user's norm or model may have one wherever it is called.
        print(for_screen(f"error: {StrayEnd(error)}"), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # What the system refused: a folder that cannot be read or written, a name that is too long, no room.
        from rmsrepro.runs.disk import explain_full

        full = explain_full(error, Path.cwd(), "then give the same command again")
        place = f"{error.filename}: " if error.filename else ""
        print(for_screen(f"error: {full or f'{place}{error.strerror or error}'}"), file=sys.stderr)
        return 1 if full or error.errno in (errno.EIO, errno.ENOMEM) else 2
    except (MemoryError, RuntimeError, ImportError) as error:
        from rmsrepro.runs.reasons import known_reason

        reason = known_reason(error)
        if reason is None:
            raise
        print(for_screen(f"error: {reason}"), file=sys.stderr)
        return 1


def _print_anything() -> None:
    """Show what the outputs' encoding lacks, such as a lone surrogate in a record, as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="backslashreplace")


def _answer(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in ("-h", "--help", "help") and arguments[1:]:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW, flush=True)
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        from rmsrepro import __version__

        print(__version__)
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in HELP:
        raise UserError(
            f"there is no verb {verb!r}{nearest(verb, HELP)} (one of: {', '.join(HELP)}; "
            "rmsrepro --help tells what they do)"
        )
    if any(item in ("-h", "--help") for item in rest):
        print(HELP[verb], flush=True)
        return 0
    return _run(verb, rest)


_FIRST_WORD = {"check-norm": "norm", "convert": "ckpt", "inspect": "target", "norms": "norm"}
"""The key that a verb's first word is the value of, where it is no key=value itself."""


def _with_keys(verb: str, arguments: Sequence[str]) -> list[str]:
    """Write the first word of a verb that begins with one as key=value."""
    key, words = _FIRST_WORD.get(verb), list(arguments)
    if verb == "export":
        bare = [word for word in words if "=" not in word and word[:1] not in "+~"]
        # The last part of a path: ids have no commas.
        runs = [f"runs={','.join(word.rstrip('/').split('/')[-1] for word in bare[1:])}"] if bare[1:] else []
        return [*(f"to={word}" for word in bare[:1]), *runs, *(word for word in words if word not in bare)]
    if key is not None and words and "=" not in words[0] and words[0][:1] not in "+~":
        words[0] = f"{key}={words[0]}"
    return words


def _run(verb: str, arguments: Sequence[str]) -> int:
    from rmsrepro.config.overrides import split_override

    overrides = [split_override(item) for item in _with_keys(verb, arguments)]
    from rmsrepro.verbs import find

    return find(verb)(overrides)


if __name__ == "__main__":
    sys.exit(main())
