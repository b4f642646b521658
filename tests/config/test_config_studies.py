"""Study files: read, narrowed from the command line, and refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import Override, split_override
from rmsrepro.config.paths import group_choices, packaged_conf_dir
from rmsrepro.config.study import StudyConfig, cell_name, higher_is_better
from rmsrepro.paper.studies import study_jobs
from rmsrepro.verbs.reporting import _timings
from rmsrepro.verbs.studies import load_study, read_study, restricted, split_all

OWN = """\
name: own
norms: [layernorm, rmsnorm, prmsnorm]
models: [gru, transformer]
tasks: [lm, translation]
seeds: [1, 2]
primary: {lm: val_loss, translation: test_bleu}
secondary: {translation: [test_chrf]}
margin: {val_loss: 0.05, test_bleu: 0.5}
learned: {gru/lm: 2.0, transformer/translation: 20}
target: {gru/lm: 2.2}
overrides: [debug=fast]
norm_overrides: {prmsnorm: [norm.p=0.25]}
task_overrides: {lm: [data=pydoc], translation: [data=cldr, data.num_train=100]}
cell_overrides: {gru/lm: [optim.lr=1e-2]}
bench: {cells: [gru/lm, transformer/translation]}
"""


def write(name: str, text: str | bytes) -> Path:
    file = Path(f"conf/study/{name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.fixture
def own() -> StudyConfig:
    write("own", OWN)
    return load_study("own")


def narrowed(study: StudyConfig, *texts: str) -> tuple[StudyConfig, list[Override]]:
    return restricted(study, [split_override(text) for text in texts])


@pytest.mark.parametrize("name", sorted(path.stem for path in (packaged_conf_dir() / "study").glob("*.yaml")))
def test_every_built_in_study_is_sound(name: str) -> None:
    study = load_study(name)
    assert study.name == name
    assert study.baseline == "layernorm"
    assert study.title
    jobs = study_jobs(study)
    assert len(jobs) == sum(len(study.norms_of(cell)) for cell in study.cells()) * len(study.seeds)
    assert len({job.overrides for job in jobs}) == len(jobs)
    if study.verdict:
        assert set(study.learned) == set(study.cells())


def test_the_quick_study_is_what_was_agreed() -> None:
    study = load_study("quick")
    trained = {cell: study.norms_of(cell) for cell in study.cells()}
    assert set(map(tuple, trained.values())) == {("none", "layernorm", "rmsnorm", "prmsnorm")}
    assert set(study.norms) - {norm for norms in trained.values() for norm in norms} == {
        *("prmsnorm_p06", "prmsnorm_p50")  # timed as single layers
    }
    timed = {(timing.level, backend) for timing in study.timings() for backend in timing.backends}
    assert timed == {(level, backend) for level in ("layer", "model") for backend in ("composite", "torch")}
    assert (study.models, study.tasks) == (["gru", "transformer"], ["lm", "translation"])
    assert study.seeds == [1, 2, 3]
    assert (study.backend, study.verdict) == ("composite", True)
    assert (study.jobs.n_jobs, study.jobs.num_threads) == (2, 1)


def test_the_smoke_study_is_what_was_agreed() -> None:
    study = load_study("smoke")
    assert (study.norms, study.models, study.tasks) == (
        ["layernorm", "rmsnorm"],
        ["gru", "transformer"],
        ["lm"],
    )
    assert (study.seeds, study.verdict) == ([1], False)


def test_a_study_of_the_user(own: StudyConfig) -> None:
    assert own.cells() == ["gru/lm", "gru/translation", "transformer/lm", "transformer/translation"]
    assert own.primary_metric("lm") == "val_loss"
    assert own.margin == {"val_loss": 0.05, "test_bleu": 0.5}
    assert "own" in group_choices("study")
    with pytest.raises(
        UserError, match=r"^study=onw: there is no such study; did you mean own\? \(study is one of: "
    ):
        load_study("onw")


def test_a_study_of_the_user_goes_before_a_built_in_one() -> None:
    write("smoke", OWN.replace("name: own", "name: smoke"))
    assert load_study("smoke").norms == ["layernorm", "rmsnorm", "prmsnorm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norms: [layernorm", "study/own.yaml: cannot be read as YAML: "),
        ("nams: x", "study/own.yaml: nams: there is no such key; did you mean name, norms, claims?"),
        (OWN + "bench: {cell: []}", "study/own.yaml: "),
        (OWN.replace("[1, 2]", "[a]"), "study/own.yaml: seeds[0]=a: expected a whole number"),
        (OWN.replace("0.05", "tiny"), "study/own.yaml: margin.val_loss=tiny: expected a number"),
        ("- a", "study/own.yaml: "),
        ("", "study/own.yaml: name: a value is missing"),
        (b"name: caf\xe9", "study/own.yaml: cannot be read: it is not UTF-8 text"),
        (OWN.replace("[layernorm, ", "["), "study 'own': the baseline 'layernorm' is not among its norms"),
        (OWN.replace("[1, 2]", "[]"), "study 'own': seeds is empty; name at least one."),
        (OWN.replace("[1, 2]", "[1, 1]"), "study 'own': seeds names 1 more than once."),
        (OWN.replace("0.05", "-1"), "study 'own': margin.val_loss is -1.0; it must be a positive number."),
        (OWN.replace("{val_loss: 0.05, ", "{"), "its primary metric 'val_loss' of task 'lm' has no margin"),
        (
            OWN.replace("target: {gru/lm:", "target: {gru/ml:"),
            "study 'own': target names 'gru/ml', which the study does not have; did you mean gru/lm",
        ),
    ],
)
def test_a_damaged_study_is_located(text: str | bytes, message: str) -> None:
    file = write("own", text)
    with pytest.raises(UserError) as caught:
        read_study(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_of_a_study_are_split_with_its_name() -> None:
    assert split_all(["a=1", "data.path=x,y"], "own") == [Override("a", "1"), Override("data.path", "'x,y'")]
    with pytest.raises(UserError, match=r"^study 'own': '\+foo=3': the configuration is typed"):
        split_all(["a=1", "+foo=3"], "own")


# --------------------------------------------------------------------------------------- narrowing


def test_an_untouched_study_stays_itself(own: StudyConfig) -> None:
    assert narrowed(own) == (own, [])


@pytest.mark.parametrize(
    "text",
    ["out_dir=x", "tracker=none", "tracker.mode=online", "rerun=true", "trainer.num_threads=1", "plugins=[a]",
     "data.cache_dir=x", "data.path=x", "trainer.progress=false"],
)  # fmt: skip
def test_what_changes_no_figure_leaves_the_study_its_name(own: StudyConfig, text: str) -> None:
    assert narrowed(own, text) == (own, [split_override(text)])


def test_a_narrowed_study_is_named_so(own: StudyConfig) -> None:
    study, rest = narrowed(own, "norm=rmsnorm", "model=gru", "task=lm", "seed=2,3", "out_dir=x")
    assert rest == [split_override("out_dir=x")]
    assert (study.name, study.title) == ("own_modified", "own (modified)")
    assert study.norms == ["layernorm", "rmsnorm"]  # the baseline always stays
    assert (study.models, study.tasks, study.seeds) == (["gru"], ["lm"], [2, 3])
    assert (study.primary, study.secondary) == ({"lm": "val_loss"}, {})
    assert (study.learned, study.target) == ({"gru/lm": 2.0}, {"gru/lm": 2.2})
    assert (study.norm_overrides, study.cell_overrides) == ({}, {"gru/lm": ["optim.lr=1e-2"]})
    assert study.task_overrides == {"lm": ["data=pydoc"]}
    assert study.bench.cells == ["gru/lm"]
    assert [job.norm for job in study_jobs(study)] == ["layernorm", "rmsnorm"] * 2


LEVELLED = (
    OWN.replace("prmsnorm]", "prmsnorm, prmsnorm_p50]")
    + """\
norm_variants: {prmsnorm_p50: {name: prmsnorm, p: 0.5}}
norm_cells: {prmsnorm_p50: [gru/translation]}
benches:
  - {level: layer, norms: [rmsnorm, prmsnorm_p50], backends: [composite, torch]}
  - {level: model, cells: [gru/translation, transformer/translation]}
claims:
  - {claims: [t3py-*rmsnorm-time], relation: faithful, by: {cell: gru/translation}, why: so}
  - {claims: [t4-rmsnorm-time], relation: proxy, by: {cell: transformer/translation}, why: smaller}
"""
)


def test_a_narrowed_study_keeps_the_timings_and_claims_that_are_left() -> None:
    write("own", LEVELLED)
    own = load_study("own")
    study, _ = narrowed(own, "norm=rmsnorm", "model=gru")
    assert (study.norms, study.norm_variants, study.norm_cells) == (["layernorm", "rmsnorm"], {}, {})
    assert [(one.level, one.cells, one.norms) for one in study.timings()] == [
        ("step", ["gru/lm"], []),
        ("layer", [], ["rmsnorm"]),
        ("model", ["gru/translation"], []),
    ]
    assert [(one.claims, one.relation.value) for one in study.claims] == [(["t3py-rmsnorm-time"], "faithful")]
    other, _ = narrowed(own, "optim.lr=0.5")
    assert [(one.claims[0], one.relation.value) for one in other.claims] == [
        ("t3py-rmsnorm-time", "proxy"),
        ("t3py-prmsnorm-time", "proxy"),
        ("t4-rmsnorm-time", "proxy"),
    ]
    assert {one.why for one in other.claims} == {"changed on the command line", "smaller"}
    untouched, _ = narrowed(own, "out_dir=x", "bench.budget_s=3")
    assert untouched == own


def test_a_changed_value_reaches_every_job(own: StudyConfig) -> None:
    study, rest = narrowed(own, "optim.lr=0.5")
    assert (study.name, rest) == ("own_modified", [split_override("optim.lr=0.5")])
    assert study.norms == own.norms


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed=-1", "seed=-1: expected whole numbers"),
        ("seed=a,b", "seed=a,b: expected whole numbers"),
        ("optim.lr=1,2", "optim.lr=1,2: a study takes one value of it; only norm, model, task and seed"),
        ("optim.lr=(", "optim.lr=(: cannot read the value"),
    ],
)
def test_what_a_study_cannot_be_narrowed_to(own: StudyConfig, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        narrowed(own, text)
    assert message in str(caught.value)


def test_names_and_directions() -> None:
    assert cell_name("gru", "lm") == "gru/lm"
    assert [higher_is_better(name) for name in ("val_loss", "test_bleu", "val_chrF", "val_accuracy")] == [
        False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["quick", "smoke", "small", "multi30k", "paper"])
def test_every_timing_of_a_built_in_study_composes(name: str) -> None:
    study = load_study(name)
    timings = _timings(study, [])
    assert [job.label for job, _ in timings] == [
        f"{timing.title} {cell}".rstrip() for timing in study.timings() for cell in timing.cells or [""]
    ]
    for job, prepared in timings:
        assert prepared.settings.name == job.level
        assert {norm["name"] for norm in prepared.norms} >= {"layernorm", "rmsnorm"}
        if job.cell:
            assert f"{prepared.base.model.name}/{prepared.base.task.name}" == job.cell
