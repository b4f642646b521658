"""The study of the paper's sizes: all of it composes, and each of its arms trains."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from rmsrepro.cli import main
from rmsrepro.paper import StudyJob, study_jobs
from rmsrepro.paper.study_files import built_in

STUDY = built_in("paper")
ARMS = [job for job in study_jobs(STUDY) if job.seed == 1]
WORDS = {"a red dog": "ein roter Hund", "the old house": "das alte Haus", "sees": "sieht", "and": "und"}
FEWER = ["data.max_len=12", "data.batch_tokens=96", "data.batch_sentences=8", "data.vocab_size=280"]
"""The batch of a processor instead of a GPU's. Everything that makes an arm stays as it is."""
QUICKER = ["trainer.max_steps=2", "trainer.val_every=2", "task.beam_size=1", "task.score_sentences=2"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with the set's files and columns, and a few pairs."""
    draw = random.Random(1)
    folder = tmp_path / "wmt14"
    folder.mkdir()
    for split, count in (("train", 200), ("validation", 6), ("test", 6)):
        chosen = [[draw.choice(list(WORDS)) for _ in range(draw.randint(1, 3))] for _ in range(count)]
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for words in chosen:
                pair = {"en": " ".join(words), "de": " ".join(WORDS[word] for word in words)}
                file.write(json.dumps({"translation": pair}) + "\n")
    return folder


def test_all_jobs_compose(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "study=paper", f"data.path={corpus}", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "30 runs: 0 done already, 30 to do" in out
    assert "invalid" not in out
    assert len(study_jobs(STUDY)) == 30
    for model, norms in (("gru", 6), ("transformer", 4)):
        assert out.count(f"translation-wmt14-{model}-") == norms * len(STUDY.seeds)


@pytest.mark.slow
@pytest.mark.parametrize("job", ARMS, ids=lambda job: f"{job.model}-{job.norm}")
def test_each_arm_trains_at_its_full_width_for_two_steps(job: StudyJob, corpus: Path) -> None:
    given = {text.split("=")[0]: text for text in (*job.overrides, *FEWER, *QUICKER)}
    assert main(["train", *given.values(), f"data.path={corpus}", "tracker=none"]) == 0
    (file,) = Path("outputs/runs").glob("*/result.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert (record["status"], record["steps"], record["study"]) == ("completed", 2, "paper")
    assert (record["model"], record["norm"], record["data"]) == (job.model, job.norm, "wmt14")
    assert (record["backend_used"], record["n_parameters"] > 20_000_000) == ("composite", True)
    config = record["config"]["model"]
    sizes = {"gru": ("d_embed", (1024, 512)), "transformer": ("d_ff", (512, 2048))}
    second, widths = sizes[job.model]
    assert (config["d_model"], config[second]) == widths
    if job.model == "transformer":
        assert (config["num_layers"], config["num_heads"]) == (6, 8)
        assert record["placement"] == ("none" if job.norm == "none" else "post")
    assert record["metrics"]["val_loss"] > 0
