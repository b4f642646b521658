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
    """The input's side of both gates, W x + b: one norm over 2 d."""
    gates_h = "gates_h"
    """The state's side of both gates, U h: one norm over 2 d."""
    cand_x = "cand_x"
    """The input's side of the candidate: a norm over d."""
    cand_h = "cand_h"
    """The state's side of the candidate: a norm over d."""


class Backend(Enum):
    """Which implementation of a norm runs."""

    auto = "auto"
    """The fastest that all norms of the command have; the record says which (`backend_used`)."""
    composite = "composite"
    """Primitive tensor operations, as the paper's own code; takes every norm."""
    torch = "torch"
    """`F.layer_norm` and `F.rms_norm`: layernorm, layernorm_nobias, and rmsnorm with eps inside the root."""
    compiled = "compiled"
    """Inductor over the composite norms; takes every norm, and seconds at each one's first call. Needs a C++
    compiler. `auto` never takes it."""
    fused = "fused"
    """This package's own kernels, for all norms but batchnorm, weightnorm, crmsnorm and dyt."""


class Size(Enum):
    tiny = "tiny"
    small = "small"
    paper = "paper"


class Positions(Enum):
    learned = "learned"
    """A table of `data.max_len` vectors, added to the embeddings."""
    rotary = "rotary"
    """Queries and keys are turned by angles that grow with the position; no table, no limit."""


class FeedForward(Enum):
    gelu = "gelu"
    """down(gelu(up(x)))"""
    swiglu = "swiglu"
    """down(silu(gate(x)) * up(x)), gate and up each d_ff wide."""


class StartState(Enum):
    """How RNNSearch starts its decoder."""

    mean = "mean"
    """From the mean of the source's annotations."""
    last = "last"
    """From the last state of each direction."""


class Tokenizer(Enum):
    char = "char"
    """One token a character of the training text; others are unknown."""
    byte = "byte"
    """One token a UTF-8 byte; nothing to train, nothing unknown."""
    bpe = "bpe"
    """Byte-level byte-pair encoding, trained on the training split."""


class Schedule(Enum):
    inverse_sqrt = "inverse_sqrt"
    """After the warm-up, peak * sqrt(warmup_steps / step)."""
    cosine = "cosine"
    """After the warm-up, half a cosine down to `final_lr_fraction` of the peak at the last step."""
    constant = "constant"
    """After the warm-up, the peak."""


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
    """Preset of the widths and depths below; values given explicitly win."""
    d_model: int | None = None
    """Width of the hidden states (the GRU's state size)."""
    num_layers: int | None = None
    """Layers of the stack. Translation: of the Transformer's encoder and decoder each; RNNSearch has 1."""
    dropout: float | None = None
    """Dropout probability on embeddings, branches and outputs."""
    tie_embeddings: bool = True
    """Use the (target) embedding matrix as the output projection."""


@dataclass
class TransformerConfig(ModelConfig):
    """Decoder-only for task=lm, encoder-decoder (num_layers each) for task=translation."""

    name: str = "transformer"
    num_heads: int | None = None
    """Attention heads; they must divide d_model."""
    d_ff: int | None = None
    """Inner width of the feed-forward part."""
    positions: Positions = Positions.learned
    """How positions enter."""
    ffn: FeedForward = FeedForward.gelu
    """The position-wise part."""
    bias: bool = True
    """Whether linear maps carry a bias."""
    qk_norm: bool = False
    """Normalise queries and keys, head by head, with the run's norm; nothing for none and weightnorm."""
    output_bias: bool = False
    """Whether the logits have a bias. `rmsrepro convert` needs one for the bias of a final LayerNorm."""
    empty_source: bool = False
    """Translation: an empty source reads as a vector of its own; else, as everywhere else, as zeros."""


@dataclass
class GRUConfig(ModelConfig):
    """Stacked GRU for task=lm, RNNSearch (bidirectional encoder, attention) for task=translation."""

    name: str = "gru"
    d_embed: int | None = None
    """Width of the embeddings."""
    start_state: StartState = StartState.mean
    """task=translation: how the decoder starts."""
    builtin: bool = False
    """task=lm, norm=none only: run torch.nn.GRU instead of our own loop (an extra, labelled arm)."""


@dataclass
class ImportedModelConfig(ModelConfig):
    """A model of the user's own, by its import string; it brings its inputs, so there is no task and no data.

    Only `rmsrepro bench bench=model` takes one: `model=package.module:factory`.
    """

    name: str = "???"


# ------------------------------------------------------------------------------------------ data


@dataclass
class DataConfig:
    """What every data source has."""

    name: str = "???"
    tokenizer: Tokenizer = Tokenizer.char
    """How text becomes tokens. Vocabularies come from the training split only."""
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
    """How text becomes tokens."""
    subset: str = "wikitext-103-raw-v1"
    """wikitext-2-raw-v1, wikitext-103-raw-v1, or without `raw`."""


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
    """Language to translate from: a column of the set; a label for plain files."""
    target_lang: str = "de"
    """Language to translate into."""
    shared_vocab: bool = False
    """One vocabulary for both languages."""
    max_train_pairs: int | None = None
    """Use only the first pairs of the training set."""


@dataclass
class CldrConfig(TranslationDataConfig):
    """Dates, times, numbers, amounts, units and names, written from Babel's CLDR data."""

    name: str = "cldr"
    num_train: int = 20000
    """Training pairs to write."""
    num_val: int = 500
    """Validation pairs to write."""
    num_test: int = 500
    """Test pairs to write; none of their sources is in the training set."""
    corpus_seed: int = 1
    """Seed of the corpus, apart from the run's seed: all runs see the same corpus."""


@dataclass
class Multi30kConfig(TranslationDataConfig):
    name: str = "multi30k"
    tokenizer: Tokenizer = Tokenizer.bpe
    """How text becomes tokens."""
    path: str | None = None
    """A local folder with train.*, validation.* and test.*; None: the Hub, through `datasets`."""


@dataclass
class Wmt14Config(TranslationDataConfig):
    name: str = "wmt14"
    tokenizer: Tokenizer = Tokenizer.bpe
    """How text becomes tokens."""
    path: str | None = None
    """A local folder with train.*, validation.* and test.*; None: the Hub, through `datasets`."""


@dataclass
class ParallelFilesConfig(TranslationDataConfig):
    """The user's own parallel corpus: plain text, one sentence a line, line i translates line i."""

    name: str = "parallel_files"
    tokenizer: Tokenizer = Tokenizer.bpe
    """How text becomes tokens."""
    train_src: str = "???"
    """Source sentences to train on (UTF-8, may be gzipped)."""
    train_tgt: str = "???"
    """Their translations, line by line."""
    val_src: str | None = None
    """Validation sources; None: 5 % of the training pairs are cut off."""
    val_tgt: str | None = None
    """Their translations."""
    test_src: str | None = None
    """Test sources; None: the last 5 % of the training pairs are cut off."""
    test_tgt: str | None = None
    """Their translations."""


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
    """Share of the target distribution spread evenly over the vocabulary, in training only."""
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
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's own epsilon; not the norm's."""
    weight_decay: float = 0.01
    """On matrices only: never on a norm's parameters, never on a bias."""
    schedule: Schedule = Schedule.inverse_sqrt
    """The learning rate after the warm-up."""
    warmup_steps: int = 100
    """Updates over which the rate rises linearly to the peak; 0: none."""
    final_lr_fraction: float = 0.1
    """cosine: the last step's rate as a fraction of the peak."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""


class Strategy(Enum):
    """How many processes train one run, and what each of them holds."""

    single = "single"
    """One process, one device."""
    ddp = "ddp"
    """`devices` processes, each with the whole model and its part of every batch (DDPStrategy)."""
    fsdp = "fsdp"
    """`devices` processes, one a GPU, each with its part of the model and of every batch (FSDPStrategy)."""


@dataclass
class TrainerConfig:
    max_steps: int = 300
    """Optimiser updates."""
    accumulate: int = 1
    """Batches an update."""
    val_every: int | None = None
    """Validate every so many updates (and always at the end); None: about ten times a run."""
    log_every: int = 10
    """Record a training row every so many updates."""
    checkpoint_every: int | None = None
    """Save every so many updates; None: at each validation."""
    num_threads: int | None = None
    """Threads of torch on the CPU, in each process; None: leave torch's choice."""
    accelerator: str = "auto"
    """auto, cpu or gpu."""
    strategy: Strategy = Strategy.single
    """How many processes train the run; set by trainer=ddp and trainer=fsdp."""
    devices: int = 1
    """Processes of trainer=ddp and trainer=fsdp, one a device; without them a run uses one device: 1."""
    divergence_factor: float = 3.0
    """Diverged when the training loss stays above this multiple of the first loss for 20 updates."""
    progress: bool = True
    """Show a progress bar (on a terminal) or lines (elsewhere)."""


@dataclass
class TrackerConfig:
    """A view of the records; the records in the run folder are the truth."""

    name: TrackerName = TrackerName.wandb
    """none or wandb."""
    project: str = "rmsrepro"
    """wandb's project."""
    entity: str | None = None
    """wandb's team or user; null: the account's default."""
    mode: WandbMode = WandbMode.offline
    """WANDB_MODE in the environment wins."""


@dataclass
class TrainConfig:
    """Everything that one training run is made from."""

    norm: Any = "???"
    """A norm's name and parameters (NormConfig, made from the registry)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What it is trained for."""
    data: DataConfig = field(default_factory=DataConfig)
    """On what."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """By which updates."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """For how long, and how it is watched."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Which view mirrors the records."""
    placement: Placement = Placement.pre
    """Transformer only."""
    sites: list[Site] = field(default_factory=lambda: list(Site))
    """GRU only: which of the four places are normalised."""
    backend: Backend = Backend.auto
    """Which implementation of the norm runs."""
    precision: str = "32"
    """32 | bf16-mixed"""
    seed: int = 1
    """Feeds three separate streams: initial weights, data order, dropout."""
    out_dir: str = "outputs"
    """Where everything is written."""
    plugins: list[str] = field(default_factory=list)
    """Python modules imported before composing, which register norms."""
    study_name: str | None = None
    """The study this run belongs to (written as `study=NAME` on the command line)."""
    experiment: str | None = None
    """A ready set of values, a file of conf/experiment."""
    ckpt: str | None = None
    """Continue from this checkpoint as a new run with `parent`."""
    rerun: bool = False
    """Train again although a finished run of the same identity exists."""
