"""The typed configuration: one dataclass a group, read after `OmegaConf.to_object`.

Nothing here imports torch, Hydra or another part of the package, so that every part may import it.
A field that is None is filled by `rmsrepro.config.resolve` (a size preset, the number of cores, ...)
or means "not set", as its docstring says. The text under a field is its documentation: `rmsrepro
train show=true` and `docs/configuration.md` are written from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Placement(Enum):
    """Where a Transformer's norms sit around the residual branch f."""

    pre = "pre"
    """x + f(n(x)), and a final norm."""
    post = "post"
    """n(x + f(x))."""
    sandwich = "sandwich"
    """x + n2(f(n1(x))), and a final norm."""
    res_post = "res_post"
    """x + n(f(x))."""
    none = "none"
    """x + f(x): no norm anywhere."""


class Site(Enum):
    """A place inside a GRU step that can be normalised."""

    gates_x = "gates_x"
    gates_h = "gates_h"
    cand_x = "cand_x"
    cand_h = "cand_h"


class Backend(Enum):
    """Which implementation of a norm runs."""

    auto = "auto"
    composite = "composite"
    torch = "torch"


class Size(Enum):
    tiny = "tiny"
    small = "small"
    paper = "paper"


class Positions(Enum):
    learned = "learned"
    rotary = "rotary"


class FeedForward(Enum):
    gelu = "gelu"
    swiglu = "swiglu"


class StartState(Enum):
    """How RNNSearch starts its decoder."""

    mean = "mean"
    last = "last"


class Tokenizer(Enum):
    char = "char"
    byte = "byte"
    bpe = "bpe"


class Schedule(Enum):
    inverse_sqrt = "inverse_sqrt"
    cosine = "cosine"
    constant = "constant"


class TrackerName(Enum):
    none = "none"
    wandb = "wandb"


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


# ---------------------------------------------------------------------------------------- models


@dataclass
class ModelConfig:
    """What every model has. Fields left None are taken from the preset of `size`."""

    name: str = "???"
    size: Size = Size.tiny
    d_model: int | None = None
    """Width of the hidden states (the GRU's state size)."""
    num_layers: int | None = None
    dropout: float | None = None
    """Dropout probability on embeddings, branches and outputs."""
    tie_embeddings: bool = True
    """Use the (target) embedding matrix as the output projection."""


@dataclass
class TransformerConfig(ModelConfig):
    """Decoder-only for task=lm, encoder-decoder (num_layers each) for task=translation."""

    name: str = "transformer"
    num_heads: int | None = None
    d_ff: int | None = None
    """Inner width of the feed-forward part."""
    positions: Positions = Positions.learned
    ffn: FeedForward = FeedForward.gelu
    bias: bool = True
    """Whether linear maps carry a bias."""


@dataclass
class GRUConfig(ModelConfig):
    """Stacked GRU for task=lm, RNNSearch (bidirectional encoder, attention) for task=translation."""

    name: str = "gru"
    d_embed: int | None = None
    """Width of the embeddings."""
    start_state: StartState = StartState.mean
    builtin: bool = False
    """task=lm, norm=none only: run torch.nn.GRU instead of our own loop (an extra, labelled arm)."""


# ------------------------------------------------------------------------------------------ data


@dataclass
class DataConfig:
    """What every data source has."""

    name: str = "???"
    tokenizer: Tokenizer = Tokenizer.char
    vocab_size: int = 4096
    """Upper bound of a BPE vocabulary (char and byte ignore it)."""
    max_len: int = 64
    """lm: tokens in a window; translation: most tokens of a sentence, begin and end marks included."""
    batch_tokens: int = 1024
    """Token budget of a batch. lm: windows * max_len; translation: rows * longest row, either side."""
    batch_sentences: int | None = None
    """translation: at most so many sentence pairs in a batch."""
    cache_dir: str | None = None
    """Where trained tokenizers are kept; default: outputs/cache beside the runs."""


@dataclass
class PydocConfig(DataConfig):
    """The help topics of Python's standard library: about 465 kB of English, no download."""

    name: str = "pydoc"


@dataclass
class PathDataConfig(DataConfig):
    path: str | None = None
    """A local folder (or file) with the set's columns; None: the Hub, through `datasets`."""


@dataclass
class TinyShakespeareConfig(PathDataConfig):
    name: str = "tinyshakespeare"


@dataclass
class WikitextConfig(PathDataConfig):
    name: str = "wikitext"
    tokenizer: Tokenizer = Tokenizer.bpe
    subset: str = "wikitext-103-raw-v1"


@dataclass
class TextFilesConfig(DataConfig):
    """The user's own text."""

    name: str = "text_files"
    train: str = "???"
    """A UTF-8 text file (may be gzipped)."""
    val: str | None = None
    """None: the last 5 % of the training text before the test part."""
    test: str | None = None
    """None: the last 5 % of the training text."""


@dataclass
class TranslationDataConfig(DataConfig):
    source_lang: str = "en"
    target_lang: str = "de"
    shared_vocab: bool = False
    """One vocabulary for both languages."""
    max_train_pairs: int | None = None
    """Use only the first pairs of the training set."""


@dataclass
class CldrConfig(TranslationDataConfig):
    """Dates, times, numbers, amounts, units and names, written from Babel's CLDR data."""

    name: str = "cldr"
    num_train: int = 20000
    num_val: int = 500
    num_test: int = 500
    corpus_seed: int = 1
    """Seed of the corpus, apart from the run's seed: all runs see the same corpus."""


@dataclass
class Multi30kConfig(TranslationDataConfig):
    name: str = "multi30k"
    tokenizer: Tokenizer = Tokenizer.bpe
    path: str | None = None


@dataclass
class Wmt14Config(TranslationDataConfig):
    name: str = "wmt14"
    tokenizer: Tokenizer = Tokenizer.bpe
    path: str | None = None


@dataclass
class ParallelFilesConfig(TranslationDataConfig):
    """The user's own parallel corpus: plain text, one sentence a line, line i translates line i."""

    name: str = "parallel_files"
    tokenizer: Tokenizer = Tokenizer.bpe
    train_src: str = "???"
    train_tgt: str = "???"
    val_src: str | None = None
    val_tgt: str | None = None
    test_src: str | None = None
    test_tgt: str | None = None


# ----------------------------------------------------------------------------------------- tasks


@dataclass
class TaskConfig:
    name: str = "???"


@dataclass
class LMConfig(TaskConfig):
    """Next-token prediction."""

    name: str = "lm"


@dataclass
class TranslationConfig(TaskConfig):
    name: str = "translation"
    label_smoothing: float = 0.1
    beam_size: int = 1
    """Beam of the final scoring; 1 is greedy search."""
    length_penalty: float = 1.0
    """Hypotheses are ranked by log-probability / length**length_penalty."""
    max_decode_len: int | None = None
    """Most tokens of a hypothesis; None: data.max_len."""
    score_sentences: int | None = None
    """Score at most the first so many sentences of a split (labelled n/N); None: all."""


# -------------------------------------------------------------------------------------- training


@dataclass
class OptimConfig:
    """AdamW with a warm-up and a schedule."""

    lr: float = 3e-3
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    eps: float = 1e-8
    weight_decay: float = 0.01
    """On matrices only: never on a norm's parameters, never on a bias."""
    schedule: Schedule = Schedule.inverse_sqrt
    warmup_steps: int = 100
    final_lr_fraction: float = 0.1
    """cosine: the last step's rate as a fraction of the peak."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""


@dataclass
class TrainerConfig:
    max_steps: int = 300
    """Optimiser updates."""
    accumulate: int = 1
    """Batches an update."""
    val_every: int | None = None
    """Validate every so many updates (and always at the end); None: about ten times a run."""
    log_every: int = 10
    checkpoint_every: int | None = None
    """Save every so many updates; None: at each validation."""
    num_threads: int | None = None
    """Threads of torch on the CPU; None: leave torch's choice."""
    accelerator: str = "auto"
    """auto, cpu or gpu."""
    devices: int = 1
    divergence_factor: float = 3.0
    """Diverged when the training loss stays above this multiple of the first loss for 20 updates."""
    progress: bool = True


@dataclass
class TrackerConfig:
    """A view of the records; the records in the run folder are the truth."""

    name: TrackerName = TrackerName.wandb
    project: str = "rmsrepro"
    entity: str | None = None
    mode: WandbMode = WandbMode.offline
    """WANDB_MODE in the environment wins."""


@dataclass
class SweepConfig:
    launcher: str = "basic"
    """basic: one job after another in this process; joblib: n_jobs warm workers."""
    n_jobs: int = 1
    on_error: str = "continue"
    """continue | stop"""


@dataclass
class TrainConfig:
    """Everything that one training run is made from."""

    norm: Any = "???"
    """A norm's name and parameters (NormConfig, made from the registry)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    placement: Placement = Placement.pre
    """Transformer only."""
    sites: list[Site] = field(default_factory=lambda: list(Site))
    """GRU only: which of the four places are normalised."""
    backend: Backend = Backend.auto
    precision: str = "32"
    """32 | bf16-mixed"""
    seed: int = 1
    """Feeds three separate streams: initial weights, data order, dropout."""
    out_dir: str = "outputs"
    plugins: list[str] = field(default_factory=list)
    """Python modules imported before composing, which register norms."""
    study_name: str | None = None
    """The study this run belongs to (written as `study=NAME` on the command line)."""
    experiment: str | None = None
    ckpt: str | None = None
    """Continue from this checkpoint as a new run with `parent`."""
    rerun: bool = False
    """Train again although a finished run of the same identity exists."""
