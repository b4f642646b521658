"""From training to use: train, eval, sample, translate, continue. Values, not existence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.running import LM, Ran, Trained, records, tree

Run = Callable[..., Ran]


class Stdin:
    """A standard input of given bytes."""

    def __init__(self, content: bytes) -> None:
        import io

        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


def figures(ran: Ran) -> dict[str, str]:
    """The name-value lines that eval prints."""
    assert ran.code == 0, ran.err
    return dict(line.split(maxsplit=1) for line in ran.out.splitlines()[1:])


# ------------------------------------------------------------------------------------------ train


def test_train_tells_where_everything_is(cli: Run) -> None:
    ran = cli("train", *LM, "norm=rmsnorm", "seed=4")
    assert ran.code == 0
    [(run_id, record)] = records().items()
    lines = ran.out.splitlines()
    assert f"records: outputs/runs/{run_id}" in lines
    assert f"checkpoint: outputs/runs/{run_id}/checkpoints/last.ckpt" in lines
    assert any(line.startswith("completed in ") for line in lines)
    assert f"val_loss {record['metrics']['val_loss']:.4g}" in ran.out
    assert (record["status"], record["steps"], record["seed"], record["norm"]) == (
        "completed",
        6,
        4,
        "rmsnorm",
    )
    # The same command again does nothing, and says so.
    before = tree()
    again = cli("train", *LM, "norm=rmsnorm", "seed=4")
    assert again.code == 0
    assert f"{run_id}: completed already, nothing to do" in again.out
    assert tree() == before


def test_show_prints_the_config_and_where_it_comes_from(cli: Run) -> None:
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/soft.yaml").write_text("name: rmsnorm\neps: 1e-4\n")
    ran = cli(
        "train", "show=true", "norm=soft", "model=gru", "debug=fast", "study=mine", "out_dir=my ${ folder"
    )
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert "# debug overlay: conf/debug/fast.yaml (built in)" in lines
    assert lines[lines.index("# conf/norm/soft.yaml") + 1] == "norm:"
    assert lines[lines.index("# conf/model/gru.yaml (built in)") + 1] == "model:"
    shown = yaml.safe_load(ran.out)
    assert shown["norm"] == {
        "name": "rmsnorm", "eps": 1e-4, "eps_position": "inside", "gain": True, "bias": False,
        "variant": "paper", "casting": "after_gain",
    }  # fmt: skip
    assert (shown["model"]["d_model"], shown["trainer"]["max_steps"]) == (64, 6)
    assert (shown["study"], shown["seed"], shown["out_dir"]) == ("mine", 1, "my ${ folder")
    assert tree() == {"conf", "conf/norm", "conf/norm/soft.yaml"}


def test_show_false_trains(cli: Run) -> None:
    assert cli("train", *LM, "show=false").code == 0
    assert len(records()) == 1


def test_a_file_that_is_not_read_is_noticed(cli: Run) -> None:
    Path("conf/norm").mkdir(parents=True)
    Path("conf/norm/rmsnorm.yaml").write_text("name: rmsnorm\neps: 9\n")
    ran = cli("train", "show=true", "norm=rmsnorm")
    assert ran.err == (
        "note: conf/norm/rmsnorm.yaml is not read: the built-in norm=rmsnorm goes first; rename yours\n"
    )
    assert yaml.safe_load(ran.out)["norm"]["eps"] == 1e-5


def test_rerun_keeps_the_earlier_run(cli: Run) -> None:
    assert cli("train", *LM).code == 0
    [(run_id, first)] = records().items()
    ran = cli("train", *LM, "rerun=true")
    assert ran.code == 0
    assert "nothing to do" not in ran.out
    assert records()[run_id]["metrics"] == first["metrics"]
    [kept] = Path("outputs/archive").iterdir()
    assert json.loads((kept / "result.json").read_text()) == first


def test_a_diverged_run_is_exit_1(cli: Run) -> None:
    ran = cli("train", *LM, "norm=none", "optim.lr=1e30", "optim.warmup_steps=0", "trainer.max_steps=60")
    assert ran.code == 1
    [record] = records().values()
    assert record["status"] == "diverged"
    assert record["error"] in ran.out


# ------------------------------------------------------------------------------- eval, sample


def test_eval_gives_the_recorded_figures(cli: Run, language_model: Trained) -> None:
    found = figures(cli("eval", f"ckpt={language_model.path}"))
    metrics = language_model.record["metrics"]
    names = ["loss", "perplexity", "bits_per_byte"]
    assert list(found) == [f"{split}_{name}" for split in ("val", "test") for name in names]
    for name, value in found.items():
        assert value == f"{metrics[name]:.4f}"
    assert list(figures(cli("eval", f"ckpt={language_model.checkpoint}", "split=test"))) == [
        f"test_{name}" for name in names
    ]
    # Another batch size is another way to the same figures.
    assert (
        figures(cli("eval", f"ckpt={language_model.path}", "data.batch_tokens=64", "split=val"))["val_loss"]
        == f"{metrics['val_loss']:.4f}"
    )


def test_eval_of_a_translator(cli: Run, translator: Trained) -> None:
    found = figures(cli("eval", f"ckpt={translator.path}"))
    record = translator.record
    for name in ("val_loss", "test_loss", "test_accuracy", "test_bleu", "test_chrf"):
        assert found[name] == f"{record['metrics'][name]:.4f}"
    assert found["test_bleu_signature"] == record["metric_notes"]["test_bleu_signature"]
    beam = figures(cli("eval", f"ckpt={translator.path}", "split=test", "task.beam_size=2"))
    assert beam["test_loss"] == found["test_loss"]


def test_eval_on_other_text(cli: Run, language_model: Trained) -> None:
    odd = Path("it's [my] text, ~x.txt")
    odd.write_text("The cat sat on the mat. " * 200)
    trained = cli("train", *LM, "data=text_files", f"data.train={odd}")
    assert trained.code == 0, trained.err
    [(run_id, record)] = records().items()
    assert record["config"]["data"]["train"] == str(odd)
    found = figures(cli("eval", f"ckpt=outputs/runs/{run_id}"))
    assert found["test_loss"] == f"{record['metrics']['test_loss']:.4f}"
    other = Path("other, text.txt")
    other.write_text("A dog ran. " * 400)
    changed = figures(cli("eval", f"ckpt=outputs/runs/{run_id}", f"data.train={other}"))
    assert changed["test_loss"] != found["test_loss"]
    odd.unlink()
    assert "no such file" in cli("eval", f"ckpt=outputs/runs/{run_id}").error


def test_sampling_follows_the_seed(cli: Run, language_model: Trained) -> None:
    def sample(*options: str) -> str:
        ran = cli("sample", f"ckpt={language_model.path}", *options)
        assert ran.code == 0, ran.err
        return ran.out

    first = sample("prompt=To be, or [not] ${x}", "num_tokens=30", "seed=1")
    assert first.startswith("To be, or [not] ${x}")
    assert len(first) == len("To be, or [not] ${x}") + 30 + 1
    assert sample("prompt=To be, or [not] ${x}", "num_tokens=30", "seed=1") == first
    assert sample("prompt=To be, or [not] ${x}", "num_tokens=30", "seed=2") != first
    assert sample("prompt=3.10", "num_tokens=0") == "3.10\n"
    assert sample("prompt='quoted'", "num_tokens=0") == "quoted\n"
    assert sample("prompt=true", "num_tokens=0") == "true\n"
    # The likeliest token needs no luck, and the window may be passed.
    greedy = sample("temperature=0", "num_tokens=60", "seed=1")
    assert greedy == sample("temperature=0", "num_tokens=60", "seed=2") == sample("top_k=1", "num_tokens=60")
    assert len(greedy) == 61


# ------------------------------------------------------------------------------------- translate


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"January 5\nTwo\n", 2),
        (b"January 5\n\n   \nHello\r\nTwo\n\n", 6),
        (b"no newline at the end", 1),
        (b"\xef\xbb\xbfJanuary 5\n", 1),
        ("a\u2028b\x0bc\x85d\n".encode(), 1),
        (b"", 0),
        (b"\n", 1),
    ],
)
def test_a_line_in_is_a_line_out(
    cli: Run, translator: Trained, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: int
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(content))
    ran = cli("translate", f"ckpt={translator.path}")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == lines
    translated = ran.out.split("\n")[:-1]
    source = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    assert [bool(line.strip()) for line in translated if not line] == [False] * translated.count("")
    for given, found in zip(source, translated, strict=False):
        if not given.strip():
            assert found == ""


def test_blank_lines_do_not_disturb_their_neighbours(
    cli: Run, translator: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(text: str, *options: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", Stdin(text.encode()))
        return cli("translate", f"ckpt={translator.path}", *options).out.split("\n")[:-1]

    alone = [translate(line)[0] for line in ("January 5", "twelve")]
    assert translate("January 5\n\ntwelve") == [alone[0], "", alone[1]]
    assert translate("twelve\nJanuary 5\n") == alone[::-1]
    assert translate("January 5", "beam_size=1") == alone[:1]


def test_input_that_is_no_text(cli: Run, translator: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"fine\ncaf\xe9\n"))
    assert cli("translate", f"ckpt={translator.path}").error == "standard input, line 2: not UTF-8 (byte 8)"
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input, which is closed" in cli("translate", f"ckpt={translator.path}").error
    monkeypatch.setattr("sys.stdin", Stdin(b"fine\n"))
    assert "beam_size=0: expected 1" in cli("translate", f"ckpt={translator.path}", "beam_size=0").error


# ------------------------------------------------------------------------ continuing (B33, B35)


def printed_checkpoint(ran: Ran) -> str:
    [line] = [line for line in ran.out.splitlines() if line.startswith("checkpoint: ")]
    return line.removeprefix("checkpoint: ")


def test_the_printed_checkpoint_works_as_pasted(cli: Run) -> None:
    first = cli("train", *LM, "trainer.max_steps=3")
    checkpoint = printed_checkpoint(first)
    folder = Path(checkpoint).parent
    assert all(item.is_file() for item in folder.iterdir())
    assert not any("=" in item.name or " " in item.name for item in folder.iterdir())
    assert checkpoint.split() == [checkpoint]
    assert torch.load(checkpoint, map_location="cpu")["global_step"] == 3  # the safe default
    assert "val_loss" in figures(cli("eval", f"ckpt={checkpoint}", "split=val"))
    longer = cli("train", *LM, f"ckpt={checkpoint}", "trainer.max_steps=6")
    assert longer.code == 0
    straight = cli("train", *LM, "trainer.max_steps=6", "out_dir=straight")
    found = torch.load(printed_checkpoint(longer))["state_dict"]
    expected = torch.load(printed_checkpoint(straight))["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    by_steps = {record["steps"]: record for record in records().values()}
    assert by_steps[6]["parent"] == by_steps[3]["run_id"]


@pytest.mark.parametrize("steps", [6, 4])
def test_nothing_left_to_do_is_said_plainly(cli: Run, language_model: Trained, steps: int) -> None:
    shutil.copytree(language_model.path, "run")
    before = {path: Path(path).read_bytes() for path in tree() if Path(path).is_file()}
    ran = cli("train", *LM, "norm=rmsnorm", "ckpt=run", f"trainer.max_steps={steps}")
    assert ran.code == 0
    assert "is at step 6 already" in ran.out
    assert "Nothing was done" in ran.out
    assert {path: Path(path).read_bytes() for path in tree() if Path(path).is_file()} == before


def test_continuing_inside_a_sweep(cli: Run, language_model: Trained) -> None:
    ran = cli("sweep", *LM, "norm=rmsnorm", f"ckpt={language_model.checkpoint}", "trainer.max_steps=7,8")
    assert ran.code == 0, ran.out
    found = {record["steps"]: record for record in records().values()}
    assert sorted(found) == [7, 8]
    assert {record["parent"] for record in found.values()} == {language_model.record["run_id"]}
