"""Composing through Hydra: defaults, choices, types, and one exact message for each mistake."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmsrepro.config import schema
from rmsrepro.config.compose import Composer, to_train_config
from rmsrepro.config.errors import UserError, nearest
from rmsrepro.config.overrides import split_override
from rmsrepro.config.plain import from_plain, plain
from rmsrepro.config.schema import Placement, Site, TrainConfig
from rmsrepro.norms import list_norms

Compose = Callable[..., TrainConfig]
Refused = Callable[..., str]


def test_the_defaults(compose: Compose) -> None:
    config = compose()
    assert config.norm == {"name": "layernorm"}
    assert config.model == schema.TransformerConfig()
    assert config.task == schema.LMConfig()
    assert config.data == schema.PydocConfig()
    assert config.optim == schema.OptimConfig()
    assert config.trainer == schema.TrainerConfig()
    assert config.tracker == schema.TrackerConfig()
    assert config.placement is Placement.pre
    assert config.sites == list(Site)
    assert (config.seed, config.precision, config.out_dir) == (1, "32", "outputs")
    assert (config.experiment, config.ckpt, config.study_name, config.rerun) == (None, None, None, False)


@pytest.mark.parametrize(
    ("text", "read", "expected"),
    [
        ("norm.eps=1e-6", lambda c: c.norm, {"name": "layernorm", "eps": 1e-6}),
        ("norm.gain=false", lambda c: c.norm["gain"], False),
        ("norm.eps_position=outside", lambda c: c.norm["eps_position"], "outside"),
        ("placement=res_post", lambda c: c.placement, Placement.res_post),
        ("sites=[gates_x,cand_h]", lambda c: c.sites, [Site.gates_x, Site.cand_h]),
        ("backend=composite", lambda c: c.backend, schema.Backend.composite),
        ("optim.lr=1e-2", lambda c: c.optim.lr, 0.01),
        ("optim.lr=1", lambda c: c.optim.lr, 1.0),
        ("optim.betas=[0.8,0.9]", lambda c: c.optim.betas, [0.8, 0.9]),
        ("optim.clip_norm=null", lambda c: c.optim.clip_norm, None),
        ("optim.schedule=cosine", lambda c: c.optim.schedule, schema.Schedule.cosine),
        ("data.tokenizer=bpe", lambda c: c.data.tokenizer, schema.Tokenizer.bpe),
        ("tracker=none", lambda c: c.tracker.name, schema.TrackerName.none),
        ("tracker.mode=online", lambda c: c.tracker.mode, schema.WandbMode.online),
        ("precision=bf16-mixed", lambda c: c.precision, "bf16-mixed"),
        ("precision=32", lambda c: c.precision, "32"),
        ("study_name='a b'", lambda c: c.study_name, "a b"),
        ("rerun=true", lambda c: c.rerun, True),
        ("seed=1_000", lambda c: c.seed, 1000),
        ("out_dir=a b,[c] ~d", lambda c: c.out_dir, "a b,[c] ~d"),
        ("out_dir=${x}", lambda c: c.out_dir, "${x}"),
        ("trainer=cpu", lambda c: c.trainer.accelerator, "cpu"),
        ("debug=fast", lambda c: (c.trainer.max_steps, c.tracker.name.value), (6, "none")),
        ("experiment=shakespeare_char", lambda c: (c.data.name, c.model.d_model), ("tinyshakespeare", 128)),
        ("data=wikitext", lambda c: (c.data.tokenizer.value, c.data.subset), ("bpe", "wikitext-103-raw-v1")),
        ("optim.weight_decay=${optim.lr}", lambda c: c.optim.weight_decay, 3e-3),
    ],
)
def test_a_value_arrives(compose: Compose, text: str, read: Callable[[Any], Any], expected: Any) -> None:
    assert read(compose(text)) == expected


def test_an_explicit_value_goes_before_an_overlay_wherever_it_stands(compose: Compose) -> None:
    for texts in (
        ("experiment=shakespeare_char", "model.d_model=32", "trainer.max_steps=7"),
        ("model.d_model=32", "trainer.max_steps=7", "experiment=shakespeare_char"),
    ):
        config = compose(*texts)
        assert (config.model.d_model, config.trainer.max_steps, config.optim.lr) == (32, 7, 4e-3)
    assert compose("debug=fast", "experiment=shakespeare_char").trainer.max_steps == 6


def test_an_overlay_that_another_choice_does_not_fit(refused: Refused) -> None:
    message = refused("experiment=multi30k_gru", "model=transformer")
    assert message.startswith("model.d_embed: there is no such key")
    assert message.endswith("(in conf/experiment/multi30k_gru.yaml (built in))")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "norm=rmsnrom",
            "norm=rmsnrom: there is no such norm; did you mean rmsnorm, prmsnorm, crmsnorm? (norm is one of: "
            + ", ".join(sorted(list_norms())),
        ),
        (
            "model=gur",
            "model=gur: there is no such model; did you mean gru? (model is one of: gru, transformer)",
        ),
        ("task=translate", "did you mean translation? (task is one of: lm, translation)"),
        ("data=pydocs", "data=pydocs: there is no such data; did you mean pydoc? (data is one of: cldr, "),
        ("model=null", "model=null: there is no such model"),
        ("norm=RMSNorm", "norm=RMSNorm: there is no such norm; did you mean rmsnorm"),
        ("norm=hubernorm", "(a norm of your own: plugins=[module] or norm=module:Class)"),
        ("norm=null", "norm=null: there is no such norm; did you mean none? (norm is one of: "),
        ("norm=", "norm=: there is no such norm"),
        ("norm=[rmsnorm]", "there is no such norm; did you mean rmsnorm"),
        (
            "tracker=tensorboard",
            "tracker=tensorboard: there is no such tracker (tracker is one of: none, wandb)",
        ),
        ("experiment=nothing", "experiment=nothing: there is no such experiment"),
        ("norm.name=rmsnorm", "norm.name=rmsnorm: the name follows from the choice; write norm=rmsnorm"),
        ("data.name=cldr", "the name follows from the choice; write data=cldr"),
    ],
)
def test_choices(refused: Refused, text: str, message: str) -> None:
    found = refused(text)
    assert message in found
    assert found.startswith(text.split("=")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nrom=rmsnorm", "there is no key nrom; did you mean norm?"),
        ("sed=1", "there is no key sed; did you mean seed?"),
        ("lr=1", "there is no key lr; did you mean optim.lr?"),
        ("max_steps=1", "there is no key max_steps; did you mean trainer.max_steps?"),
        ("max_step=1", "there is no key max_step; did you mean max_steps"),
        ("xyzzy=1", "there is no key xyzzy (rmsrepro train show=true lists all keys)"),
        (
            "optim.lrr=1",
            "there is no key optim.lrr; did you mean optim.lr, optim.eps, optim.clip_norm? (keys there: "
            "optim.lr, optim.betas, optim.eps, optim.weight_decay, optim.schedule, optim.warmup_steps, "
            "optim.final_lr_fraction, optim.clip_norm)",
        ),
        ("tracker.mod=offline", "there is no key tracker.mod with tracker=wandb; did you mean tracker.mode"),
        ("norm.epsilon=1", "there is no key norm.epsilon with norm=layernorm; did you mean norm.eps"),
        ("data.path=x", "there is no key data.path with data=pydoc"),
        ("task.beam_size=4", "there is no key task.beam_size with task=lm"),
        ("bench.processes=3", "there is no key bench.processes: how to time is a matter of rmsrepro bench"),
        ("hydra.run.dir=x", "there is no key hydra.run.dir"),
        ("hydra/launcher=joblib", "there is no key hydra/launcher"),
        ("schema/train=x", "there is no key schema/train"),
        ("defaults=x", "there is no key defaults"),
        ("norm@optim=rmsnorm", "there is no key norm@optim"),
    ],
)
def test_unknown_keys(refused: Refused, text: str, message: str) -> None:
    found = refused(text)
    assert found.startswith(f"{text.split('=')[0]}=")
    assert message in found


def test_keys_follow_the_chosen_model(refused: Refused, compose: Compose) -> None:
    message = refused("model=gru", "model.num_heads=4")
    assert message.startswith("model.num_heads=4: there is no key model.num_heads with model=gru")
    assert "model.d_embed" in message
    assert compose("model=gru", "model.d_embed=8").model.d_embed == 8  # type: ignore[attr-defined]
    # The order of the command line does not matter.
    assert compose("model.d_embed=8", "model=gru").model.d_embed == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lr=abc", "optim.lr=abc: expected a number"),
        ("optim.lr=", "optim.lr=: expected a number"),
        ("optim.lr=true", "optim.lr=True: expected a number"),
        ("optim.lr={a:1}", "optim.lr={'a': 1}: expected a number"),
        ("norm.eps=abc", "norm.eps=abc: expected a number"),
        ("norm.eps=null", "norm.eps=null: it cannot be null"),
        ("norm.eps=[1]", "norm.eps=[1]: expected a number"),
        ("norm.gain=perhaps", "norm.gain=perhaps: expected true or false"),
        ("seed=abc", "seed=abc: expected a whole number"),
        ("seed=1.5", "seed=1.5: expected a whole number"),
        ("seed=true", "seed=True: expected a whole number"),
        ("seed=null", "seed=null: it cannot be null"),
        ("trainer.max_steps=1e3", "trainer.max_steps=1000.0: expected a whole number"),
        ("out_dir=null", "out_dir=null: it cannot be null"),
        ("rerun=maybe", "rerun=maybe: expected true or false"),
        ("sites=gates_x", "sites: expected a list, as in sites=[a,b]"),
        ("sites=[null]", "sites[0]=null: it cannot be null"),
        (
            "sites=[gates_x,gates_y]",
            "sites[1]=gates_y: not a valid value; did you mean gates_x, gates_h? (one of: gates_x, gates_h, "
            "cand_x, cand_h)",
        ),
        ("optim.betas=0.9", "optim.betas: expected a list, as in optim.betas=[a,b]"),
        ("optim.betas=[[1],2]", "optim.betas: expected a list without lists or keys inside"),
        ("sites=[[]]", "sites: expected a list without lists or keys inside, as in sites=[a,b]"),
        ("optim.betas=[a,b]", "optim.betas[0]=a: expected a number"),
        ("plugins=mymod", "plugins: expected a list, as in plugins=[a,b]"),
        ("study_name=[a]", "study: expected text"),
        (
            "backend=trch",
            "backend=trch: not a valid value; did you mean torch? (one of: auto, composite, torch, compiled, "
            "fused)",
        ),
        ("model.size=huge", "model.size=huge: not a valid value (one of: tiny, small, paper)"),
        ("optim.schedule=Cosine", "optim.schedule=Cosine: not a valid value; did you mean cosine?"),
        ("tracker.name=foo", "tracker.name=foo: not a valid value (one of: none, wandb)"),
        ("optim=3", "optim=3: there is no such optim"),
        ("optim.lr=???", "a value is missing: optim.lr; give it as optim.lr=VALUE"),
        ("optim.lr=${nokey}", "optim.lr: Interpolation key 'nokey' not found"),
        ("optim.lr=${oc.env:RMSREPRO_NO_SUCH}", "Environment variable 'RMSREPRO_NO_SUCH' not found"),
        ("seed=${optim.lr}", "seed"),
    ],
)
def test_types(refused: Refused, text: str, message: str) -> None:
    assert message in refused(text)


def test_required_values(refused: Refused) -> None:
    message = refused("data=parallel_files", "task=translation")
    assert message == "a value is missing: data.train_src, data.train_tgt; give it as data.train_src=VALUE"
    assert "data.train_tgt" not in refused("data=text_files")


def test_a_group_of_keys_is_no_value(compose: Compose) -> None:
    with (
        Composer({}) as opened,
        pytest.raises(UserError, match=r"^optim\.betas\.x=1: there is no key optim\.betas\.x"),
    ):
        opened.raw([split_override("optim.betas.x=1")])


# ------------------------------------------------------------------------------- norms of all sorts


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


@dataclasses.dataclass
class Odd:
    """Parameters of a norm from elsewhere, with types that OmegaConf cannot check."""

    alpha: float = 0.5
    colour: Colour = Colour.red
    either: int | str = 3
    anything: Any = None
    device: None = None
    many: list[int] | None = None
    eps: str = "small"


def test_parameters_of_any_type_can_be_given() -> None:
    from rmsrepro.norms import norm_info

    norms = {"layernorm": norm_info("layernorm").params_class, "odd": Odd}

    def norm_of(*texts: str) -> dict[str, Any]:
        with Composer(norms) as opened:
            found: dict[str, Any] = to_train_config(opened.raw([split_override(text) for text in texts])).norm
            return found

    assert norm_of("norm=odd") == {"name": "odd"}
    assert norm_of("norm=odd", "norm.alpha=2", "norm.colour=blue", "norm.either=x") == {
        "name": "odd", "alpha": 2.0, "colour": "blue", "either": "x",
    }  # fmt: skip
    assert norm_of("norm=odd", "norm.device=cpu", "norm.anything=[1,2]") == {
        "name": "odd", "device": "cpu", "anything": [1, 2],
    }  # fmt: skip
    # Two norms that disagree about a type: the norm itself checks it later.
    assert norm_of("norm=odd", "norm.eps=tiny")["eps"] == "tiny"
    with pytest.raises(UserError, match=r"^norm\.colour=green: not a valid value \(one of: red, blue\)"):
        norm_of("norm=odd", "norm.colour=green")


# ------------------------------------------------------------------------------- the user's own files


def write(path: str, text: str) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_users_files_join_the_built_in_ones(compose: Compose, refused: Refused) -> None:
    write("conf/norm/soft.yaml", "name: rmsnorm\neps: 1e-4\n")
    write(
        "conf/experiment/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /model: gru\n  - override /norm: soft\n"
        "optim:\n  lr: 0.02\ntrainer:\n  max_steps: 7\n",
    )
    write("conf/model/two_heads.yaml", "defaults:\n  - /schema/model/transformer@_here_\nnum_heads: 2\n")
    write("conf/optim/slow.yaml", "lr: 1e-5\n")
    assert compose("norm=soft").norm == {"name": "rmsnorm", "eps": 1e-4}
    assert compose("norm=soft", "norm.eps=1e-3").norm["eps"] == 1e-3
    mine = compose("experiment=mine")
    assert (mine.model.name, mine.norm["name"], mine.norm["eps"]) == ("gru", "rmsnorm", 1e-4)
    assert (mine.optim.lr, mine.trainer.max_steps) == (0.02, 7)
    assert compose("experiment=mine", "norm=layernorm", "optim.lr=1").norm == {"name": "layernorm"}
    assert compose("model=two_heads").model.num_heads == 2  # type: ignore[attr-defined]
    assert compose("optim=slow").optim.lr == 1e-5
    assert f": {', '.join(sorted([*list_norms(), 'soft']))})" in refused("norm=sotf")
    assert "did you mean soft?" in refused("norm=sotf")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("norm/x", "name: rmsnorm\nepss: 1\n", "norm.epss: there is no such key; did you mean eps?"),
        ("norm/x", "name: rmsnorm\n eps: [", "cannot be read as YAML: "),
        ("norm/x", "- a\n", "expected"),
        (
            "experiment/x",
            "# @package _global_\noptim:\n  lrr: 1\n",
            "optim.lrr: there is no such key; did you mean lr?",
        ),
        ("experiment/x", "# @package _global_\noptim:\n  lr: fast\n", "optim.lr=fast: expected a number"),
        ("experiment/x", "# @package _global_\nfoo: 1\n", "foo: there is no such key"),
        (
            "experiment/x",
            "# @package _global_\noptim: 3\n",
            "expected keys of its own, each with a value (Merge error: int is not",
        ),
        ("experiment/x", "# @package _global_\ndefaults:\n  - override /model: gruu\n", "model/gruu"),
        ("experiment/x", "optim:\n  lr: 1\n", "an overlay starts with the line '# @package _global_'"),
        ("model/x", "name: transformer\nnum_heads: 2\n", "model.num_heads: there is no such key"),
    ],
)
def test_a_mistake_in_a_file_of_the_user_is_located(
    refused: Refused, file: str, text: str, message: str
) -> None:
    write(f"conf/{file}.yaml", text)
    found = refused(f"{file.split('/')[0]}=x")
    assert message in found
    assert found.endswith(f"(in conf/{file}.yaml)")


def test_of_several_files_the_one_at_fault_is_named(refused: Refused) -> None:
    write("conf/norm/x.yaml", "name: rmsnorm\neps: [1,\n")
    assert refused("debug=fast", "norm=x").endswith("(in conf/norm/x.yaml)")


def test_only_parameters_of_the_chosen_norm_are_offered(refused: Refused) -> None:
    assert refused("norm=dyt", "norm.alfa=1") == (
        "norm.alfa=1: there is no key norm.alfa with norm=dyt; did you mean norm.alpha, norm.gain, "
        "norm.bias? (keys there: norm.alpha, norm.bias, norm.gain)"
    )


def test_a_file_in_another_encoding_is_located(refused: Refused) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/x.yaml").write_bytes(b"# @package _global_\n# caf\xe9\nseed: 3\n")
    assert refused("experiment=x") == "cannot be read: it is not UTF-8 text (in conf/experiment/x.yaml)"


def test_windows_line_ends_are_fine(compose: Compose) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/x.yaml").write_bytes(b"# @package _global_\r\noptim:\r\n  lr: 0.5\r\n")
    assert compose("experiment=x").optim.lr == 0.5


def test_a_conf_folder_may_lie_anywhere(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "it's [my] dir, ~x {y} $z"
    odd.mkdir()
    monkeypatch.chdir(odd)
    write("conf/norm/soft.yaml", "name: rmsnorm\neps: 1e-4\n")
    assert compose("norm=soft").norm["eps"] == 1e-4


# ------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    "texts",
    [
        (),
        ("model=gru", "sites=[gates_x]", "norm=prmsnorm", "norm.p=0.5"),
        ("task=translation", "data=cldr", "task.beam_size=3", "optim.clip_norm=null"),
        ("task=translation", "data=parallel_files", "data.train_src=a,b", "data.train_tgt=${c}"),
        ("data=text_files", "data.train=it's [here]", "placement=sandwich", "tracker.mode=disabled"),
    ],
)
def test_a_config_survives_as_plain_values(compose: Compose, texts: tuple[str, ...]) -> None:
    config = compose(*texts)
    content = json.loads(json.dumps(plain(config)))
    assert from_plain(content) == config
    assert plain(from_plain(content)) == content


def test_plain_values_are_of_json_types(compose: Compose) -> None:
    content = plain(compose("model=gru", "norm.eps=1e-6"))
    assert content["norm"] == {"name": "layernorm", "eps": 1e-6}
    assert content["placement"] == "pre"
    assert content["sites"] == ["gates_x", "gates_h", "cand_x", "cand_h"]
    assert content["model"] == {
        "name": "gru", "size": "tiny", "d_model": None, "num_layers": None, "dropout": None,
        "tie_embeddings": True, "d_embed": None, "start_state": "mean", "builtin": False,
    }  # fmt: skip


def test_records_of_other_versions_are_read(compose: Compose) -> None:
    content = plain(compose())
    older = {key: value for key, value in content.items() if key != "precision"}
    older["optim"] = {"lr": 0.5}
    assert from_plain(older).precision == "32"
    assert from_plain(older).optim == schema.OptimConfig(lr=0.5)
    newer = {**content, "gadget": 1, "model": {**content["model"], "gadget": 2}}
    assert from_plain(newer) == from_plain(content)
    with pytest.raises(UserError, match="model=mlp: there is no such model"):
        from_plain({**content, "model": {"name": "mlp"}})


def test_nearest_names_a_few_or_nothing() -> None:
    assert nearest("rmsnrm", ["rmsnorm", "layernorm"]) == "; did you mean rmsnorm?"
    assert nearest("xyz", ["rmsnorm", "layernorm"]) == ""
    assert nearest("a", []) == ""
    assert nearest("aaa", ["aaa1", "aaa2", "aaa3", "aaa4"]).count(",") == 2


def test_files_tell_where_each_part_is_from() -> None:
    write("conf/optim/slow.yaml", "lr: 1e-5\n")
    write("conf/norm/rmsnorm.yaml", "name: rmsnorm\neps: 9\n")
    overrides = [split_override(text) for text in ("optim=slow", "norm=rmsnorm", "debug=fast")]
    with Composer({}) as opened:
        files = opened.files(overrides)
        # A file with a built-in one's name is not the one that is read, and is not said to be.
        assert "eps" not in opened.raw(overrides).norm or opened.raw(overrides).norm.eps is None
    assert files["optim"] == "conf/optim/slow.yaml"
    assert files["norm"] == "conf/norm/rmsnorm.yaml (built in)"
    assert files["debug"] == "conf/debug/fast.yaml (built in)"
    assert files["model"] == "conf/model/transformer.yaml (built in)"
    assert "experiment" not in files
