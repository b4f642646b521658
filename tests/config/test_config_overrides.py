"""Overrides before anything is composed: splitting, quoting of paths, choices, flags."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rmsrepro.config.errors import UserError
from rmsrepro.config.overrides import (
    RAW_KEYS,
    Override,
    as_typed,
    check_single,
    expand,
    quoted,
    split_override,
    take,
    truth,
    unquote,
)


def through_hydra(override: Override) -> str:
    """What a structured config holds after Hydra has applied `override`."""
    parsed = OverridesParser.create().parse_override(override.text)
    assert not parsed.is_sweep_override()
    config = OmegaConf.create({"x": None})
    OmegaConf.update(config, "x", parsed.value())
    value = OmegaConf.to_container(config, resolve=True)["x"]  # type: ignore[index, call-overload]
    assert isinstance(value, str)
    return value


PATHS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab/\\'\" ,[]{}()~$:=.%#&*?!\tü", max_size=20),
    st.lists(
        st.sampled_from(["\\", "'", '"', "${", "}", "a", " ", ",", "[", "]", "~", "$", "ä", "\u2028"]),
        max_size=12,
    ).map("".join),
)


@given(PATHS)
@example("")
@example("C:\\new folder\\")
@example("it's, [here] ~/x {y} \\${z} \\\\${w} ${oc.env:HOME}")
@example("\\\\'")
@example("ends with a backslash before a quote \\'")
@example("null")
@example("3.10")
@example("a\nb")
@example("${")
@example("\\${a}\\")
def test_a_quoted_value_means_exactly_itself(value: str) -> None:
    assert through_hydra(Override("x", quoted(value))) == value
    assert unquote(quoted(value)) == value


@given(PATHS.filter(lambda text: text not in ("null", "None")))
def test_a_path_is_taken_as_typed(value: str) -> None:
    for key in ("data.path", "out_dir", "ckpt", "data.train_src"):
        override = split_override(f"{key}={value}")
        assert override.key == key
        assert through_hydra(override) == as_typed(value)
        # And once more, as text: this is how a sweep hands a job to its worker.
        again = OverridesParser.create().parse_override(override.text)
        assert again.key_or_group == key
        assert not again.is_sweep_override()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("'my data'", "my data"),
        ('"my data"', "my data"),
        ("'a' and 'b'", "'a' and 'b'"),
        ("'", "'"),
        ("''", ""),
        ("'a\"", "'a\""),
        ("a'", "a'"),
        ("''a''", "''a''"),
        ('"it\'s"', "it's"),
    ],
)
def test_one_pair_of_quotes_round_a_path_is_taken_off(typed: str, meant: str) -> None:
    assert as_typed(typed) == meant
    assert through_hydra(split_override(f"data.path={typed}")) == meant


@pytest.mark.parametrize("typed", ["null", "None", "'null'"])
def test_a_path_can_be_unset(typed: str) -> None:
    assert split_override(f"data.path={typed}") == Override("data.path", "null")


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("data.path", True),
        ("data.cache_dir", True),
        ("data.train", True),
        ("data.val", True),
        ("data.test_tgt", True),
        ("data.val_src", True),
        ("ckpt", True),
        ("out_dir", True),
        ("any.thing.path", True),
        ("data.subset", False),
        ("data.train_rows", False),
        ("path", False),
        ("tracker.project", False),
        ("norm", False),
    ],
)
def test_which_keys_hold_paths(key: str, raw: bool) -> None:
    assert bool(RAW_KEYS.match(key)) is raw


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("norm=rmsnorm", "norm", "rmsnorm"),
        ("norm.eps=1e-6", "norm.eps", "1e-6"),
        ("a=", "a", ""),
        ("tracker.project=a=b", "tracker.project", "a=b"),
        ("hydra/launcher=joblib", "hydra/launcher", "joblib"),
        ("norm@x.y=rmsnorm", "norm@x.y", "rmsnorm"),
    ],
)
def test_split(text: str, key: str, value: str) -> None:
    assert split_override(text) == Override(key, value)
    assert split_override(text).text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm", "'norm' is not an override: write it as key=value"),
        ("", "'' is not an override"),
        ("--norm rmsnorm", "is not an override"),
        ("=3", "'' is not a key"),
        ("seed =3", "'seed ' is not a key"),
        ("3=3", "'3' is not a key"),
        ("a..b=3", "'a..b' is not a key"),
        ("a.=3", "'a.' is not a key"),
        (
            "+foo=1",
            "'+foo=1': the configuration is typed, so keys cannot be added or deleted; write foo=VALUE",
        ),
        ("++optim.lr=1", "write optim.lr=VALUE"),
        ("~optim", "write optim=VALUE"),
        ("~norm=rmsnorm", "write norm=VALUE"),
    ],
)
def test_what_is_no_override(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        split_override(text)
    assert message in str(caught.value)


def overrides(*texts: str) -> list[Override]:
    return [split_override(text) for text in texts]


def texts(jobs: list[list[Override]]) -> list[str]:
    return [" ".join(item.text for item in job) for job in jobs]


def test_choices_expand_in_the_order_of_the_command_line() -> None:
    jobs = expand(overrides("norm=layernorm,rmsnorm", "model=gru", "seed=range(1,4)"))
    assert texts(jobs) == [
        f"norm={norm} model=gru seed={seed}" for norm in ("layernorm", "rmsnorm") for seed in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=1,2,1", ["1", "2"]),
        ("seed=choice(1,2)", ["1", "2"]),
        ("norm=a:B,c:D", ["a:B", "c:D"]),
        ("sites=[gates_x],[gates_h,cand_h]", ["[gates_x]", "[gates_h,cand_h]"]),
        ("sites=[gates_x,gates_h]", ["[gates_x,gates_h]"]),
        ("tracker.project='a,b'", ["'a,b'"]),
        ("tracker.project='a b','c'", ["'a b'", "'c'"]),
        ("optim.lr=1e-3,1e-2", ["1e-3", "1e-2"]),
        ("seed=", [""]),
        ("data.path=a,b", ["'a,b'"]),
    ],
)
def test_one_key_expands(text: str, values: list[str]) -> None:
    jobs = expand(overrides(text))
    assert [unquote(job[0].value) for job in jobs] == [unquote(value) for value in values]
    assert {len(job) for job in jobs} == {1}


@pytest.mark.parametrize("text", ["a=(b", "a='b", "a=b=c", "a=[b", "a=ä"])
def test_an_unreadable_value_is_named(text: str) -> None:
    for action in (expand, check_single):
        with pytest.raises(UserError) as caught:
            action(overrides(text))
        assert str(caught.value).startswith(f"{text}: cannot read the value")
        assert "a='...'" in str(caught.value)


def test_nothing_is_expanded_from_nothing() -> None:
    assert expand([]) == [[]]


@pytest.mark.parametrize("text", ["seed=range(3,3)", "optim.lr=interval(0,1)"])
def test_a_sweep_without_a_list_of_values_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(overrides(text))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("text", ["norm=layernorm,rmsnorm", "seed=range(1,3)", "seed=choice(1)"])
def test_one_run_takes_one_value(text: str) -> None:
    with pytest.raises(UserError, match="train makes one run; for several values use rmsrepro sweep"):
        check_single(overrides("model=gru", text))


def test_one_run_takes_lists_and_paths() -> None:
    check_single(overrides("sites=[gates_x,gates_h]", "data.path=a,b [c]", "tracker.project='a,b'"))


def test_take_returns_the_last_value_and_the_rest_in_order() -> None:
    given_ = overrides("show=true", "norm=a", "show=false", "seed=1")
    assert take(given_, "show") == ("false", overrides("norm=a", "seed=1"))
    assert take(given_, "study") == (None, given_)
    assert take(overrides("show="), "show") == ("", [])


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("rmsnorm", "rmsnorm"),
        ("'a b'", "a b"),
        ('"a,b"', "a,b"),
        ("null", "null"),
        ("3", "3"),
        ("'3'", "3"),
        ("pkg.mod:Class", "pkg.mod:Class"),
        ("", ""),
        ("ä(", "ä("),
        (r"'a\${b}'", "a${b}"),
        (r"'a\\\${b}'", r"a\${b}"),
    ],
)
def test_unquote(value: str, meant: str) -> None:
    assert unquote(value) == meant


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on", "TRUE"])
def test_true_words(word: str) -> None:
    assert truth("show", word) is True


@pytest.mark.parametrize("word", ["false", "False", "0", "no", "off"])
def test_false_words(word: str) -> None:
    assert truth("show", word) is False


@pytest.mark.parametrize("word", ["", "maybe", "null", "2", "true "])
def test_other_words_are_neither(word: str) -> None:
    with pytest.raises(UserError, match=r"^show=.*: expected true or false$"):
        truth("show", word)


def test_an_import_string_expands_as_it_was_typed() -> None:
    [[one], [other]] = expand(overrides("norm=layernorm,odd:BadShape"))
    assert (one.text, other.text) == ("norm=layernorm", "norm=odd:BadShape")
