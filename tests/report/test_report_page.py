"""The page: that it always builds, stands alone, stays small and runs nobody else's script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from rmsrepro.norms.params import BUILTIN_PARAMS
from rmsrepro.report import build_report, print_scorecard, watch_report
from rmsrepro.report.build import folder_name
from rmsrepro.report.cells import build_cells
from rmsrepro.report.curves import MEAN_POINTS, mean_curves, value_range
from rmsrepro.report.drawing import COLOURS, colour
from rmsrepro.report.figures import loss_figures
from rmsrepro.report.formatting import NORM_TITLES
from rmsrepro.report.load import load_records
from rmsrepro.report.page import embed

Made = Callable[..., Any]
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\u2028&lt;"


class Page(HTMLParser):
    """The elements, the scripts and the visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def figures(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.scripts[0])
        return data


@pytest.fixture
def full(tmp_path: Path, made: Made) -> Path:
    """Four norms, two models, two tasks, three seeds: 48 runs, some not whole, and a bench."""
    for model in ("gru", "transformer"):
        for task in ("lm", "translation"):
            for norm in ("layernorm", "rmsnorm", "prmsnorm", "none"):
                for seed in (1, 2, 3):
                    status = {("gru", "none", 2): "diverged", ("gru", "prmsnorm", 3): "failed"}
                    state = status.get((model, norm, seed), "completed")
                    made("run", tmp_path, norm, model, task, seed, status=state, val_loss=2 + 0.001 * seed)
    made(
        "bench", tmp_path, [made("comparison"), made("comparison", "prmsnorm", "transformer", trusted=False)]
    )
    return tmp_path


def _full_study(made: Made) -> Any:
    return made(
        "study",
        norms=["layernorm", "rmsnorm", "prmsnorm", "none"],
        models=["gru", "transformer"],
        tasks=["lm", "translation"],
    )


def test_a_page_of_no_runs_says_so(tmp_path: Path, made: Made) -> None:
    built = build_report(tmp_path)
    page = Page(built.page)
    assert built.page == tmp_path / "reports" / "all" / "index.html"
    assert "No runs were found." in page.text
    assert page.figures == {}
    assert list(pd.read_csv(built.results)["run_id"]) == []
    planned = build_report(tmp_path, study=made("study"))
    assert planned.page.parent.name == "quick"
    assert "incomplete (0 of 3)" in Page(planned.page).text


def test_a_page_of_failed_runs_names_their_errors(tmp_path: Path, made: Made) -> None:
    for seed in (1, 2):
        made("run", tmp_path, seed=seed, status="failed", error=f"out of memory {seed}", rows=[])
    page = Page(build_report(tmp_path).page)
    assert "out of memory 1" in page.text
    assert "out of memory 2" in page.text
    assert "2 failed" in page.text


def test_what_became_of_a_sweep_stands_in_one_line(tmp_path: Path, made: Made) -> None:
    for seed in range(40):
        status = "failed" if seed % 8 == 0 else "completed"
        made("run", tmp_path, seed=seed, status=status, error="planted" if status == "failed" else None)
    built = build_report(tmp_path)
    lines = [line.strip() for line in Page(built.page).text.splitlines()]
    assert lines.count("40 runs: 35 completed, 5 failed") == 1
    assert built.runs == "35 completed, 5 failed"


NO_TIMES = "No training time is quoted: all runs shared their machine with others (contended)."


def test_times_that_are_all_contended_are_left_out_and_it_is_said(tmp_path: Path, made: Made) -> None:
    flags = ["contended: other runs were at work", "k = 4 of 64 entries"]
    for norm in ("layernorm", "rmsnorm", "prmsnorm"):
        for seed in (1, 2, 3):
            made("run", tmp_path, norm, seed=seed, flags=flags)
    made("run", tmp_path, "rmsnorm", seed=4, status="running")
    text = Page(build_report(tmp_path, study=made("study")).page).text
    shown, _, method = text.rpartition("How it was measured")
    assert shown.count(NO_TIMES) == 3  # below the scorecard, at the time to target, at the runs
    rest = shown.replace(NO_TIMES, "")
    [caption] = re.findall(r".*contended.*", rest)  # of the plot that has them as an axis
    assert caption.strip() == "gru / lm, against training seconds, unpaired, contended"
    assert not re.search(r"training, unpaired|training time\b|a step in training", rest)
    assert "k = 4 of 64 entries" in shown
    assert "not quoted in tables" in method
    # Where some may be quoted, each of the others is marked.
    made("run", tmp_path, "l2norm")
    text = Page(build_report(tmp_path).page).text.rpartition("How it was measured")[0]
    assert NO_TIMES not in text
    assert "training, unpaired" in text
    assert text.count("contended: other runs were at work") == 9
    assert "contended a step" not in text


def test_a_page_of_one_run(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path)
    built = build_report(tmp_path)
    assert set(Page(built.page).figures) == {"loss-step-0", "loss-seconds-0"}
    assert built.scorecard.rows == ()


def test_a_study_page_has_every_section(full: Path, made: Made) -> None:
    built = build_report(full, study=_full_study(made))
    page = Page(built.page)
    identifiers = {attrs.get("id") for tag, attrs in page.elements if tag == "section"}
    assert identifiers == {
        *("scorecard", "claims", "quality", "time", "curves", "target", "runs", "machine", "method")
    }
    loss = {f"loss-{axis}-{place}" for axis in ("step", "seconds") for place in range(4)}
    assert set(page.figures) == loss | {"quality-0", "time-forest", "target-0"}
    assert "7 to 64 % less time than LayerNorm" in page.text
    assert "RMSNorm alone 6.9 to 40.8 %" in page.text
    assert "different (1 of 3 diverged)" in page.text
    assert "not trusted" in page.text
    assert "Example CPU 9000" in page.text
    assert "2.13.0" in page.text
    links = {str(attrs["href"])[1:] for tag, attrs in page.elements if tag == "a"}
    assert links == identifiers
    drawn = {attrs["data-figure"] for _, attrs in page.elements if "data-figure" in attrs}
    assert drawn == set(page.figures)


def test_the_page_asks_the_network_for_nothing(full: Path) -> None:
    path = build_report(full).page
    page = Page(path)
    for tag, attrs in page.elements:
        for key in ("src", "href", "srcset", "action", "poster"):
            assert re.match(r"#|data:", attrs.get(key) or "#"), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "@import" not in path.read_text()
    # plotly's own button that would send a chart to its maker stays away.
    assert "showSendToCloud: false" in page.scripts[-1]


def test_the_policy_names_exactly_the_two_scripts(full: Path) -> None:
    page = Page(build_report(full).page)
    policy = next(str(attrs["content"]) for _, attrs in page.elements if attrs.get("http-equiv"))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert sorted(re.findall(r"'sha256-([^']+)'", policy)) == sorted(digests)
    assert len(digests) == 2


def test_texts_from_records_stay_texts(tmp_path: Path, made: Made) -> None:
    for norm in ("layernorm", EVIL):
        for seed in (1, 2):
            made("run", tmp_path, norm, EVIL, "lm", seed, run_id=f"r{len(norm)}{seed}", flags=[EVIL])
    made("run", tmp_path, run_id="bad", status="failed", error=EVIL, machine={"host": EVIL}, data=EVIL)
    made("run", tmp_path, "rmsnorm", EVIL, seed=3, run_id="lone", status="diverged", study=EVIL)
    made(
        "bench", tmp_path, [made("comparison", EVIL, EVIL, flags=[EVIL])], machine={"host": EVIL}, study=EVIL
    )
    study = made("study", name=EVIL, title=EVIL, description=EVIL, norms=["layernorm", EVIL], models=[EVIL])
    study.learned, study.target = {f"{EVIL}/lm": 9.0}, {f"{EVIL}/lm": 2.4}
    ids = [folder.name for folder in (tmp_path / "runs").iterdir()]
    for built in (build_report(tmp_path), build_report(tmp_path, study=study, run_ids=ids)):
        page = Page(built.page)
        assert len(page.scripts) == 3
        assert {tag for tag, _ in page.elements} & {"img", "iframe", "object"} == set()
        assert not any(key.startswith("on") for _, attrs in page.elements for key in attrs)
        assert EVIL.split("\u2028")[0] in page.text
        raw = built.page.read_text(encoding="utf-8")
        block = raw.split('id="figure-data">')[1].split("</script>")[0]
        assert not re.search("[<>&\u2028\u2029]", block)
        # Inside plotly, whose labels are a small HTML, the text is escaped once more.
        assert "<script" not in json.dumps(page.figures)
        assert built.page.parent.parent == tmp_path / "reports"


def test_embedded_json_comes_back_as_it_was() -> None:
    value = {"a": [EVIL, 1.5, None]}
    assert json.loads(embed(value)) == value
    assert "<" not in embed(value)


@pytest.mark.parametrize(
    ("text", "name"),
    [("quick", "quick"), ("../../etc", "etc"), ("a/b c", "a-b-c"), ("...", "report"), ("ä" * 5, "report")],
)
def test_an_id_is_a_plain_folder(text: str, name: str) -> None:
    assert folder_name(text) == name


def test_five_hundred_runs_stay_under_ten_megabytes(tmp_path: Path, made: Made) -> None:
    rows = made("rows", 2.0, steps=4000)
    for seed in range(250):
        made("run", tmp_path, "layernorm", seed=seed, steps=4000, rows=rows)
        made("run", tmp_path, "rmsnorm", seed=seed, steps=4000, status="interrupted", rows=rows[:390])
    built = build_report(tmp_path)
    assert built.page.stat().st_size < 10e6
    (cell,) = built.scorecard.cells
    (curve,) = mean_curves(cell.arms[0], "train_loss")
    assert curve.n == 250
    assert len(curve.step) == MEAN_POINTS
    assert (curve.step[0], curve.step[-1]) == (10, 4000)
    assert len(pd.read_csv(built.results)) == 500


def test_a_mean_curve_is_over_the_same_seeds_at_every_step(tmp_path: Path, made: Made) -> None:
    for seed, losses in ((1, [4.0, 2.0, 1.0]), (2, [6.0, 3.0, 2.0])):
        rows = [
            {"step": 10 * place, "train_seconds": float(place * seed), "val_loss": loss}
            for place, loss in enumerate(losses, start=1)
        ]
        made("run", tmp_path, seed=seed, rows=rows[:-1] if seed == 1 else rows, val_loss=2.0)
    made("run", tmp_path, seed=3, status="diverged", rows=[{"step": 10, "train_seconds": 1, "val_loss": 1e9}])
    (cell,) = build_cells(load_records(tmp_path).runs, None)[0]
    (curve,) = mean_curves(cell.arms[0], "val_loss")
    assert curve.step.tolist() == [10, 20]
    assert curve.mean.tolist() == [5.0, 2.5]
    assert (curve.low.tolist(), curve.high.tolist()) == ([4.0, 2.0], [6.0, 3.0])
    assert curve.seconds.tolist() == [1.5, 3.0]
    low, high = value_range([curve], []) or (0.0, 0.0)
    assert low < 2.0
    assert 6.0 < high < 7.0
    traces = loss_figures([cell])[0][0].figure.data
    assert [(trace.name, trace.line.dash) for trace in traces if trace.name] == [
        ("LayerNorm", "solid"),
        ("LayerNorm, diverged", "dot"),
    ]


def test_curves_of_different_machines_are_not_averaged(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, seed=1, machine={"host": "one"})
    made("run", tmp_path, seed=2, machine={"host": "two"})
    (cell,) = build_cells(load_records(tmp_path).runs, None)[0]
    assert [(curve.machine, curve.n) for curve in mean_curves(cell.arms[0], "val_loss")] == [
        ("one", 1),
        ("two", 1),
    ]


def test_a_norm_keeps_its_colour() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(COLOURS) == set(NORM_TITLES) == set(BUILTIN_PARAMS)
    assert colour("rmsnorm") == "#D55E00"
    assert colour("my.module:Norm") == colour("my.module:Norm")


def test_results_hold_one_row_a_run_with_flat_keys(full: Path) -> None:
    (full / "runs" / "torn").mkdir()
    (full / "runs" / "torn" / "result.json").write_text("{")
    table = pd.read_csv(build_report(full).results, keep_default_na=False)
    assert len(table) == 49
    row = table[table["run_id"] == "transformer-lm-prmsnorm-s2"].iloc[0]
    assert (row["status"], row["norm"], row["config.norm.p"], row["config.model.d_model"]) == (
        "completed",
        "prmsnorm",
        "0.25",
        "64",
    )
    assert float(row["metrics.val_loss"]) == pytest.approx(2.002)
    assert float(row["clocks.train_s"]) == 15.0
    assert set(table["status"]) == {"completed", "failed", "diverged", "unreadable"}
    page = Page(full / "reports" / "all" / "index.html")
    assert "torn/result.json" in page.text


def test_a_report_is_rebuilt_in_place_and_whole(full: Path) -> None:
    first = build_report(full)
    second = build_report(full)
    assert first.page == second.page
    assert sorted(path.name for path in first.page.parent.iterdir()) == [
        *("across.csv", "claims.csv", "index.html", "results.csv")
    ]


def test_a_study_shows_its_own_runs_alone(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, seed=1)
    made("run", tmp_path, seed=2, config={"study_name": "other"})
    assert len(pd.read_csv(build_report(tmp_path, study=made("study")).results)) == 1
    chosen = build_report(tmp_path, study=made("study"), run_ids=["gru-lm-layernorm-s2"])
    assert list(pd.read_csv(chosen.results)["seed"]) == [2]


def test_watching_reloads_shows_partial_curves_and_stops_for_good(tmp_path: Path, made: Made) -> None:
    made("run", tmp_path, status="running")
    seen: list[str] = []

    def look(result: Any) -> None:
        seen.append(result.page.read_text())
        made("run", tmp_path, seed=1 + len(seen))

    built = watch_report(tmp_path, every_s=0.01, on_build=look, stop=lambda: len(seen) == 2)
    assert len(seen) == 2
    assert all('http-equiv="refresh" content="0.01"' in text for text in seen)
    assert "LayerNorm, running" in seen[0]
    assert 'http-equiv="refresh"' not in built.page.read_text()
    assert len(pd.read_csv(built.results)) == 3


def test_the_terminal_table_keeps_numbers_whole_at_80_columns(full: Path, made: Made) -> None:
    card = build_report(full, study=_full_study(made)).scorecard
    stream = StringIO()
    print_scorecard(card, Console(width=80, file=stream))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    for row in card.rows:
        assert row.difference_text in text
        if row.step_time is not None:
            assert row.step_time.text in text
    assert "different (1 of 3" in text
    assert "7 to 64 % less time" in text


def test_the_terminal_reads_no_markup(tmp_path: Path, made: Made) -> None:
    for seed in (1, 2):
        made("run", tmp_path, "layernorm", "[red]m[/red]", seed=seed, run_id=f"a{seed}")
        made("run", tmp_path, "[bold]n", "[red]m[/red]", seed=seed, run_id=f"b{seed}")
    stream = StringIO()
    print_scorecard(build_report(tmp_path).scorecard, Console(width=80, file=stream))
    assert "[red]m[/red] / lm" in stream.getvalue()
    assert "[bold]n" in stream.getvalue()


def test_infinite_and_missing_values_do_not_stop_a_page(tmp_path: Path, made: Made) -> None:
    rows = [{"step": 10, "train_seconds": None, "val_loss": "inf"}, {"step": 20, "val_loss": "nan"}]
    for norm in ("layernorm", "rmsnorm"):
        for seed in (1, 2):
            made("run", tmp_path, norm, seed=seed, rows=rows, val_loss=None, metrics={"val_loss": "nan"})
    strange = {"ratio_ci": None, "aa_ratio": "nan", "aa_ci": ["inf", None], "n_rounds": "many", "flags": None}
    made("bench", tmp_path, [made("comparison", **strange), made("comparison", "prmsnorm", ratio=1.0)])
    built = build_report(tmp_path, study=made("study", seeds=[1, 2]))
    assert built.scorecard.rows[0].verdict.text == "undecided (2 of 2 diverged in both arms)"
    assert built.scorecard.rows[0].step_time is not None
    assert built.scorecard.rows[0].step_time.text == "10.0 % [8.0, 12.0]"
    assert "nan" not in Page(built.page).text.split("How it was measured")[0].replace("nan_", "")


def test_the_page_tells_settings_of_a_norm_apart(tmp_path: Path, made: Made) -> None:
    for number, center in enumerate((True, False)):
        settings = {"norm": {"name": "mine:Huber", "center": center}, "optim": {"lr": 0.1 * number}}
        made("run", tmp_path, "mine:Huber", run_id=f"r{number}", config=settings)
    arms = [{"arm": "prmsnorm/composite", "norm": "prmsnorm", "norm_params": {}}]
    made("bench", tmp_path, [made("comparison", "prmsnorm")], arms=arms)
    made("run", tmp_path, "prmsnorm", config={"norm": {"name": "prmsnorm", "p": 0.5}})
    page = build_report(tmp_path).page.read_text()
    for shown in (
        "</span>mine:Huber (center=true)</td>",
        "</span>mine:Huber (center=false)</td>",
        "</span>prmsnorm (p=0.5)</td>",
        "</span>prmsnorm (p=0.0625)/composite",
    ):
        assert shown in page


def test_norms_that_wait_share_a_sentence(tmp_path: Path, made: Made) -> None:
    for norm in ("rmsnorm", "l2norm", "dyt"):
        made("run", tmp_path, norm)
    reading = build_report(tmp_path).scorecard.reading
    assert reading == (
        "RMSNorm, L2Norm and DyT have no finished pair with LayerNorm yet; "
        "the times of their steps were not benchmarked.",
    )


def test_the_terminal_breaks_no_word(tmp_path: Path, made: Made) -> None:
    for norm in ("layernorm", "examples.huber:HuberNorm"):
        made("run", tmp_path, norm, config={"norm": {"name": norm}})
    made("run", tmp_path, "layernorm", seed=2, config={"norm": {"name": "layernorm"}})
    made("bench", tmp_path, [made("comparison", "examples.huber:HuberNorm")])
    stream = StringIO()
    print_scorecard(build_report(tmp_path).scorecard, Console(width=80, file=stream))
    said = stream.getvalue()
    assert re.search(r"^examples\.huber:  .*1 of 2 seeds .* 10\.0 % \[8\.0, 12\.0\]\s*$", said, re.MULTILINE)
    assert re.search(r"^HuberNorm\s*$", said, re.MULTILINE)
