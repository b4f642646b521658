"""Any verb, any key, any value: it is done, or one message tells why not. Never a traceback.

`RMSREPRO_FUZZ=5000` in the environment makes that many examples of each test, at random.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.fuzzing import (
    EXAMPLES,
    Check,
    Place,
    commands,
    overrides,
    stand_ins,
    verbs,
)
from tests.cli.running import Trained

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def wild(ordinary: int) -> settings:
    """Few examples, always the same; or as many as the environment asks for."""
    return settings(
        max_examples=EXAMPLES or ordinary,
        derandomize=not EXAMPLES,
        deadline=None,
        suppress_health_check=QUIET,
        database=None,
    )


@pytest.fixture(scope="module")
def check(
    tmp_path_factory: pytest.TempPathFactory, language_model: Trained, translator: Trained
) -> Iterator[Check]:
    place = Place(tmp_path_factory.mktemp("wild"))
    place.trained("LM", language_model.path)
    place.trained("MT", translator.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place.top / "home"))
        patch.setenv("COLUMNS", "80")
        stand_ins(patch, place)
        yield place.check


@wild(30)
@given(overrides)
@example("norm=prmsnorm")
@example("optim.lr=${x}")
@example("out_dir=${")
@example("plugins=a,b")
@example("norm=torch.nn:LayerNorm")
@example("norm=os.path:join")
@example("model.d_model=99999999999999999999")
@example("plugins=['']")
@example("seed=\n")
@example("sites=[[]]")
def test_one_override(check: Check, text: str) -> None:
    if "--help" not in text:
        check("train", [text, "show=true"])


@wild(50)
@given(commands())
@example(("status", ["every_s=${..lr}"]))
@example(("build-kernels", ["rerun=${oc.decode:x}"]))
@example(("build-kernels", ["rerun=???"]))
@example(("sample", ["ckpt=~nobody"]))
@example(("train", ["out_dir=a\0b"]))
@example(("report", ["out_dir=\udcff"]))
@example(("sweep", ["debug=fast", "tune=true", "tuning.points=2", "tuning.lr=[1,${x}]"]))
@example(("sweep", ["debug=fast", "tune=true", "tuning.points=2", "model.d_model=16"]))
@example(("train", [f"data.path={'x' * 300}", "data=wikitext"]))
@example(("reproduce", [f"study={'x' * 300}"]))
def test_a_right_command_with_something_wild(check: Check, command: tuple[str, list[str]]) -> None:
    check(*command)


@wild(60)
@given(verbs, st.lists(overrides, max_size=3))
def test_any_verb(check: Check, verb: str, texts: list[str]) -> None:
    check(verb, texts)
