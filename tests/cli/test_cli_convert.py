"""`rmsrepro convert`, what its result is good for, and checkpoints of one norm where another is asked for."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsrepro.cli import main
from rmsrepro.config.errors import UserError
from rmsrepro.config.schema import Backend
from rmsrepro.runs import conversion
from rmsrepro.runs.checkpoints import load_checkpoint, restore
from tests.cli.running import LM, TRANSLATION, Ran, Trained, records, tree

Run = Callable[..., Ran]
# A learning rate that moves gains and biases away from one and zero within six updates.
FAST = ["optim.lr=0.1", "optim.warmup_steps=0"]
LAYERNORM = [*LM, *FAST, "norm=layernorm"]
TRANSLATOR = [*TRANSLATION, *FAST, "norm=layernorm", "norm.eps=1e-4", "model.bias=false"]


def trained(folder: Path, *arguments: str) -> Trained:
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", *arguments, f"out_dir={folder / 'outputs'}"]) == 0
    finally:
        os.chdir(before)
    [(run_id, record)] = records(folder / "outputs").items()
    return Trained(folder / "outputs" / "runs" / run_id, record)


@pytest.fixture(scope="module")
def layernorm(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("layernorm"), *LAYERNORM)


@pytest.fixture(scope="module")
def layernorm_translator(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("layernorm-translator"), *TRANSLATOR)


def line(ran: Ran, start: str) -> str:
    assert ran.code == 0, ran.err
    [found] = [text for text in ran.out.splitlines() if text.startswith(start)]
    return found.removeprefix(start)


def convert(cli: Run, source: Trained, *options: str) -> Path:
    """Convert, and return the new folder."""
    return Path(line(cli("convert", f"ckpt={source.path}", *options), "checkpoint: ")).parent.parent


# ------------------------------------------------------------------------------------- converting


def test_convert_tells_what_it_found_and_where_it_is(cli: Run, layernorm: Trained) -> None:
    ran = cli("convert", f"ckpt={layernorm.path}", "to=rmsnorm")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == f"{layernorm.record['run_id']} at step 6: layernorm to rmsnorm"
    checkpoint = Path(line(ran, "checkpoint: "))
    folder = checkpoint.parent.parent
    assert folder.parent == Path("outputs/converted")
    assert tree(folder) == {"checkpoints", "checkpoints/last.ckpt", "config.yaml", "conversion.json"}
    assert shlex.split(str(checkpoint)) == [str(checkpoint)]
    assert "=" not in str(checkpoint)
    record = json.loads((folder / "conversion.json").read_text())
    found = record["comparison"]
    assert found["float64"]["largest"] <= 1e-12 * max(1, found["logits"])
    assert found["float32"]["largest"] <= 1e-5 * max(1, found["logits"])
    assert f"{found['float64']['largest']:.2g} in float64" in ran.out
    assert (record["from"]["run_id"], record["from"]["step"]) == (layernorm.record["run_id"], 6)
    # It is what it says, and no run.
    config = load_checkpoint(checkpoint).config
    assert (config.norm, config.model.tie_embeddings) == ({"name": "rmsnorm"}, False)
    assert records() == {}


def test_the_same_command_again_writes_nothing(cli: Run, layernorm: Trained) -> None:
    folder = convert(cli, layernorm)
    before = {path: (Path(path).stat().st_mtime_ns) for path in tree()}
    again = cli("convert", f"ckpt={layernorm.checkpoint}")
    assert "it is there already, and the same: nothing was written" in again.out
    assert line(again, "checkpoint: ") == str(folder / "checkpoints" / "last.ckpt")
    assert {path: (Path(path).stat().st_mtime_ns) for path in tree()} == before


@pytest.mark.parametrize("damage", ["weights", "cut", "gone"])
def test_a_folder_with_another_content_stays(cli: Run, layernorm: Trained, damage: str) -> None:
    file = convert(cli, layernorm) / "checkpoints" / "last.ckpt"
    if damage == "weights":
        content = torch.load(file)
        content["state_dict"]["model.output.bias"][0] += 1
        torch.save(content, file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
    before = tree()
    message = cli("convert", f"ckpt={layernorm.path}").error
    assert f"{file.parent.parent} exists and does not hold this conversion" in message
    assert tree() == before


@pytest.mark.parametrize("verb", ["convert", "eval", "sample"])
@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "none"])
def test_weights_that_do_not_fit_are_named(
    cli: Run, layernorm: Trained, tmp_path: Path, verb: str, damage: str
) -> None:
    content = torch.load(layernorm.path / "checkpoints" / "last.ckpt", weights_only=True)
    weights = content["state_dict"]
    name = next(name for name in weights if name.endswith("up.weight"))
    if damage == "missing":
        del weights[name]
    elif damage == "extra":
        weights["model.more"] = torch.zeros(3)
    elif damage == "shape":
        weights[name] = weights[name][:2]
    else:
        del content["state_dict"]
    torch.save(content, tmp_path / "damaged.ckpt")
    before = tree(Path.cwd())
    ran = cli(verb, f"ckpt={tmp_path / 'damaged.ckpt'}")
    assert ran.code == 2
    assert "Traceback" not in ran.err
    expected = "it holds no weights" if damage == "none" else "its weights do not fit the model"
    assert expected in ran.err
    if damage != "none":
        assert ("model.more" if damage == "extra" else name) in ran.err
    assert tree(Path.cwd()) == before


def test_other_weights_get_another_name(cli: Run, layernorm: Trained) -> None:
    content = torch.load(layernorm.checkpoint)
    content["state_dict"]["model.embedding.token_embedding.weight"][0] += 1
    torch.save(content, "moved.ckpt")
    folders = {convert(cli, layernorm)}
    folders.add(Path(line(cli("convert", "ckpt=moved.ckpt"), "checkpoint: ")).parent.parent)
    assert len(folders) == 2


def test_models_that_are_not_equal_leave_nothing(
    cli: Run, layernorm: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = conversion.convert_to_rmsnorm

    def wrong(*given: Any) -> Any:
        made = original(*given)
        made.state["stack.layers.1.feed_forward.down.bias"][3] += 1e-3
        return made

    monkeypatch.setattr(conversion, "convert_to_rmsnorm", wrong)
    ran = cli("convert", f"ckpt={layernorm.path}")
    assert (ran.code, ran.out) == (1, "")
    assert "in float64 the logits" in ran.err
    assert "nothing was written" in ran.err
    assert tree() == set()


def test_a_model_that_has_lost_its_numbers_is_not_converted(cli: Run, layernorm: Trained) -> None:
    content = torch.load(layernorm.checkpoint)
    content["state_dict"]["model.stack.layers.0.feed_forward.up.weight"][0, 0] = float("nan")
    torch.save(content, "nan.ckpt")
    assert cli("convert", "ckpt=nan.ckpt").code == 1
    assert tree() == {"nan.ckpt"}


# ------------------------------------------------------------------------------ using the result


def test_the_converted_language_model_is_used_like_any(cli: Run, layernorm: Trained) -> None:
    folder = convert(cli, layernorm)
    first, second = (cli("eval", f"ckpt={path}").out.splitlines() for path in (layernorm.path, folder))
    assert second[0] == f"{folder.name} at step 6"
    assert first[1:] == second[1:]
    for options in (["temperature=0"], ["seed=4", "prompt=The "], ["top_k=5", "num_tokens=70"]):
        texts = [cli("sample", f"ckpt={path}", *options).out for path in (layernorm.path, folder)]
        assert texts[0] == texts[1]


def test_the_converted_translator_is_used_like_any(
    cli: Run, layernorm_translator: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO()

        def isatty(self) -> bool:
            return False

    folder = convert(cli, layernorm_translator)
    config = load_checkpoint(folder).config
    assert config.norm == {"name": "rmsnorm", "eps": 1e-4}
    assert config.model.bias  # type: ignore[attr-defined]
    for beam_size in (1, 4):
        translations = []
        for path in (layernorm_translator.path, folder):
            Stdin.buffer = io.BytesIO(b"January 5\n\ntwo days ago\n12 kg\n")
            monkeypatch.setattr("sys.stdin", Stdin())
            translations.append(cli("translate", f"ckpt={path}", f"beam_size={beam_size}").out)
        assert translations[0] == translations[1]
        assert translations[0].count("\n") == 4
    first, second = (
        cli("eval", f"ckpt={path}", "split=test").out.splitlines()
        for path in (layernorm_translator.path, folder)
    )
    assert first[1:] == second[1:]


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_printed_command_trains_it_on(
    cli: Run, layernorm: Trained, layernorm_translator: Trained, task: str
) -> None:
    source = layernorm if task == "lm" else layernorm_translator
    ran = cli("convert", f"ckpt={source.path}", "out_dir=my folder")
    command = line(ran, "train it on, with a fresh optimiser: ")
    program, *arguments = shlex.split(command.replace("max_steps=N", "max_steps=8"))
    assert program == "rmsrepro"
    again = cli(*arguments, "tracker=none", "trainer.log_every=1")
    assert again.code == 0, again.err
    [(run_id, record)] = records().items()
    folder = Path(line(ran, "checkpoint: ")).parent.parent
    assert record["parent"] == folder.name
    assert (record["norm"], record["steps"], record["task"]) == ("rmsnorm", 8, task)
    assert record["config"]["optim"]["lr"] == 0.1
    # It begins where the original was: the loss of the next update is that of the original trained on.
    straight = cli(
        "train", *(LAYERNORM if task == "lm" else TRANSLATOR), f"ckpt={source.path}", "trainer.max_steps=8",
        "out_dir=straight",
    )  # fmt: skip
    assert straight.code == 0, straight.err
    losses = []
    for out_dir in ("outputs", "straight"):
        [file] = Path(out_dir).glob("runs/*/metrics.jsonl")
        row = json.loads(file.read_text().splitlines()[0])
        assert row["step"] == 7
        losses.append(row["train_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    content = torch.load(Path("outputs/runs") / run_id / "checkpoints" / "last.ckpt")
    # Two updates of this run, none of the source's.
    assert {float(one["step"]) for one in content["optimizer_states"][0]["state"].values()} == {2.0}
    assert content["global_step"] == 8


def test_a_converted_model_is_not_converted_again(cli: Run, layernorm: Trained) -> None:
    folder = convert(cli, layernorm)
    assert "norm=rmsnorm already" in cli("convert", f"ckpt={folder}").error


# ---------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_converted(
    cli: Run, layernorm: Trained, translator: Trained, language_model: Trained
) -> None:
    Path("file").touch()
    for arguments, message in (
        ([], "convert needs ckpt=RUN"),
        (["ckpt=nowhere"], "ckpt=nowhere: there is no such file"),
        (
            [f"ckpt={layernorm.path}", "to=rmsnrom"],
            "to=rmsnrom: there is no conversion to it; did you mean rmsnorm?",
        ),
        ([f"ckpt={layernorm.path}", "norm=rmsnorm"], "convert has no option norm"),
        ([f"ckpt={layernorm.path}", "out_dir="], "out_dir='': expected a folder"),
        ([f"ckpt={layernorm.path}", "out_dir=file"], "out_dir=file: cannot be written"),
        ([f"ckpt={translator.path}"], "model=gru: its norms stand inside the recurrence"),
        ([f"ckpt={language_model.path}"], "norm=rmsnorm already: there is nothing to convert"),
    ):
        assert message in cli("convert", *arguments).error
    assert cli("train", *LM, "norm=layernorm", "placement=post").code == 0
    [run_id] = records()
    message = cli("convert", f"ckpt=outputs/runs/{run_id}").error
    assert "placement=post" in message
    assert "placement=pre" in message
    assert not Path("outputs/converted").exists()


# ------------------------------------------------------------- a checkpoint where another norm is asked for


@pytest.mark.parametrize(
    ("options", "was", "wanted"),
    [
        (["norm=rmsnorm"], "norm=layernorm", "norm=rmsnorm"),
        (["norm=layernorm_nobias"], "norm=layernorm", "norm=layernorm_nobias"),
        (["norm=layernorm", "norm.eps=1e-3"], "norm.eps=1e-05", "norm.eps=0.001"),
        (
            ["norm=layernorm", "norm.eps_position=outside"],
            "norm.eps_position=inside",
            "norm.eps_position=outside",
        ),
        (["norm=layernorm", "placement=post"], "placement=pre", "placement=post"),
        (["norm=none"], "norm=layernorm", "norm=none"),
        (["norm=layernorm", "model.qk_norm=true"], "model.qk_norm=false", "model.qk_norm=true"),
    ],
)
def test_train_refuses_it(cli: Run, layernorm: Trained, options: list[str], was: str, wanted: str) -> None:
    message = cli("train", *LM, *FAST, f"ckpt={layernorm.path}", "trainer.max_steps=9", *options).error
    before, after = message.split(", not ")
    assert f"ckpt={layernorm.path}: it was trained with norm=layernorm" in before
    assert was in before.split()
    assert wanted in after.split(";")[0].split()
    command = f"rmsrepro convert ckpt={layernorm.path} to=rmsnorm"
    assert (command in message) == (options == ["norm=rmsnorm"])
    assert tree() == set()


def test_another_backend_is_the_same_norm(cli: Run, layernorm: Trained) -> None:
    assert layernorm.record["backend_used"] in ("fused", "torch")  # as the machine has it
    ran = cli("train", *LAYERNORM, "backend=composite", f"ckpt={layernorm.path}", "trainer.max_steps=7")
    assert ran.code == 0, ran.err


def test_a_sweep_fails_the_jobs_of_another_norm(cli: Run, layernorm: Trained) -> None:
    ran = cli("sweep", *LM, *FAST, "norm=layernorm,rmsnorm", f"ckpt={layernorm.path}", "trainer.max_steps=7")
    assert ran.code == 1
    assert "it was trained with norm=layernorm, not norm=rmsnorm" in ran.out
    by_norm = {record["norm"]: record for record in records().values()}
    assert by_norm["layernorm"]["status"] == "completed"
    assert by_norm["rmsnorm"]["status"] == "failed"


def test_verbs_that_use_a_model_refuse_another_norm(
    cli: Run, layernorm: Trained, translator: Trained
) -> None:
    convert_it = f"rmsrepro convert ckpt={layernorm.path} to=rmsnorm"
    for verb, run, option, told, advice in (
        ("eval", layernorm, "norm=rmsnorm", "norm=layernorm", convert_it),
        ("sample", layernorm, "norm=rmsnorm", "norm=layernorm", convert_it),
        ("translate", translator, "norm=rmsnorm", "norm=layernorm", "keep the norm"),
        ("eval", layernorm, "norm.eps=1e-3", "norm=layernorm norm.eps=1e-05", "keep the norm"),
        ("eval", layernorm, "placement=post", "norm=layernorm placement=pre", "keep the norm"),
        ("sample", layernorm, "norm=layernorm", "norm=layernorm", "leave it out"),
        (
            "translate",
            translator,
            "sites=[gates_x]",
            "sites=[cand_h,cand_x,gates_h,gates_x]",
            "keep the norm",
        ),
    ):
        message = cli(verb, f"ckpt={run.path}", option).error
        assert message.startswith(f"{option}: ckpt={run.path} was trained with norm=layernorm")
        assert told in message
        assert message.endswith(advice) or f"{advice}" in message.rsplit("; ", 1)[1]


def test_a_changed_config_does_not_make_it_another_norm(layernorm: Trained) -> None:
    def with_norm(**norm: Any) -> Any:
        checkpoint = load_checkpoint(layernorm.checkpoint)
        checkpoint.state["config"]["norm"] = norm
        return checkpoint

    for norm in (
        {"name": "layernorm_nobias"},
        {"name": "rmsnorm", "bias": True},
        {"name": "layernorm", "eps": 1},
    ):
        with pytest.raises(UserError, match=rf"trained with norm=layernorm.*, not norm={norm['name']}"):
            restore(with_norm(**norm))
    other = with_norm(name="layernorm")
    other.state["config"]["backend"] = Backend.composite.value
    restore(other)


def test_a_checkpoint_from_before_the_note_is_told_apart_too(cli: Run, layernorm: Trained) -> None:
    content = torch.load(layernorm.checkpoint)
    content["state_dict"]._metadata["model"].clear()
    torch.save(content, "old.ckpt")
    checkpoint = load_checkpoint("old.ckpt")
    restore(checkpoint)
    checkpoint.state["config"]["norm"] = {"name": "rmsnorm", "bias": True}
    with pytest.raises(UserError, match="trained with norm=layernorm, not norm=rmsnorm"):
        restore(checkpoint)
    assert "checkpoint: outputs/converted/" in cli("convert", "ckpt=old.ckpt").out


def test_a_run_does_not_resume_from_the_checkpoint_of_another(cli: Run, layernorm: Trained) -> None:
    assert cli("train", *LM, *FAST, "norm=rmsnorm", "norm.bias=true").code == 0
    [(run_id, _)] = records().items()
    folder = Path("outputs/runs") / run_id
    (folder / "result.json").unlink()
    shutil.copy(layernorm.checkpoint, folder / "checkpoints" / "last.ckpt")
    message = cli("train", *LM, *FAST, "norm=rmsnorm", "norm.bias=true").error
    assert f"is a checkpoint of {layernorm.record['run_id']}, trained with norm=layernorm" in message
    assert f"this run is {run_id} with norm=rmsnorm" in message
    assert (folder / "checkpoints" / "last.ckpt").read_bytes() == layernorm.checkpoint.read_bytes()
