"""The endless training stream and the finite evaluation list, as plain iterables.

Lightning takes any iterable. A `torch.utils.data.DataLoader` would add a layer per batch and, at each
`iter`, draw from torch's global random state, which belongs to the dropout stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning.pytorch import LightningDataModule

from rmsrepro.config.paths import expanded
from rmsrepro.data.tokenizers import TextTokenizer

B = TypeVar("B")


class BatchStream(Generic[B]):
    """Batches start, start + 1, ... without end. Each `iter` begins at `start` again."""

    def __init__(self, batch_at: Callable[[int], B], start: int) -> None:
        self.start = start
        self.drawn = start
        """Number of the next batch of the latest iterator."""
        self._batch_at = batch_at

    def __iter__(self) -> Iterator[B]:
        self.drawn = self.start
        while True:
            number = self.drawn
            self.drawn = number + 1
            yield self._batch_at(number)


class BatchList(Generic[B]):
    """A fixed number of batches, each made when it is asked for."""

    def __init__(self, batch_at: Callable[[int], B], count: int) -> None:
        self._batch_at = batch_at
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[B]:
        return map(self._batch_at, range(self._count))


class Part(Generic[B]):
    """What process `rank` of `size` sees of a loader: its part of every batch.

    So all processes take the same number of steps, and the parts of a step make the batch of one process.
    """

    def __init__(self, whole: Iterable[Any], rank: int, size: int) -> None:
        self._whole, self._rank, self._size = whole, rank, size

    def __iter__(self) -> Iterator[B]:
        return (batch.part(self._rank, self._size) for batch in self._whole)


class PartOfList(Part[B]):
    """As `Part`, of a loader that has a length."""

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]


class ResumableData(LightningDataModule, Generic[B]):
    """What the data modules of all tasks share: everything is ready when it is built.

    Training batch i is a pure function of (configuration, seed, i). Load an earlier `state_dict`, or set
    `start_batch`, before `train_dataloader()` is called to go on from there.
    """

    tokenizer: TextTokenizer
    src_tokenizer: TextTokenizer
    tgt_tokenizer: TextTokenizer
    fingerprint: str
    """`rmsrepro.data.data_fingerprint` of the configuration."""

    def __init__(self, *, seed: int, accumulate: int) -> None:
        super().__init__()
        self.seed = seed
        self.accumulate = accumulate
        self.start_batch = 0
        self._start_update = 0
        self._stream: BatchStream[B] | None = None

    @abstractmethod
    def batch_at(self, number: int) -> B:
        """Return training batch `number` (from 0)."""

    @abstractmethod
    def epochs(self, num_batches: int) -> float:
        """Return how many passes over the training split the first `num_batches` batches are."""

    @abstractmethod
    def eval_batches(self, split: str) -> BatchList[B]:
        """Return the batches of a whole split ("train", "val" or "test"), in a fixed order."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return the content of data.json: counts, dropped and cut examples, versions, hashes."""

    @property
    def src_vocab(self) -> int:
        return self.src_tokenizer.vocab_size

    @property
    def tgt_vocab(self) -> int:
        return self.tgt_tokenizer.vocab_size

    @property
    def position(self) -> int:
        """Number of training batches used up.

        Under a trainer (`trainer`) its step counter decides, since Lightning fetches a batch ahead of the
        one in use.
        """
        if self.trainer is not None:
            return self.start_batch + (int(self.trainer.global_step) - self._start_update) * self.accumulate
        return self._stream.drawn if self._stream is not None else self.start_batch

    def state_dict(self) -> dict[str, Any]:
        """Return `batches` used up, and how many optimiser updates (`updates`) the trainer has made."""
        updates = int(self.trainer.global_step) if self.trainer is not None else self._start_update
        return {"batches": self.position, "updates": updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batches used up; with another `accumulate`, from the next whole update on."""
        self.start_batch = -(-int(state_dict["batches"]) // self.accumulate) * self.accumulate
        self._start_update = int(state_dict["updates"])

    def train_dataloader(self) -> BatchStream[B]:
        self._stream = BatchStream(self.batch_at, self.start_batch)
        return self._stream

    def val_dataloader(self) -> BatchList[B]:
        return self.eval_batches("val")

    def test_dataloader(self) -> BatchList[B]:
        return self.eval_batches("test")


def tokenizer_summary(tokenizers: Sequence[tuple[str, TextTokenizer]]) -> dict[str, Any]:
    """Describe vocabularies for data.json."""
    from importlib.metadata import version

    described: dict[str, Any] = {
        side: {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "hash": tokenizer.digest[:32]}
        for side, tokenizer in tokenizers
    }
    if any(tokenizer.kind == "bpe" for _, tokenizer in tokenizers):
        described["tokenizers_version"] = version("tokenizers")
    return described


def cache_folder(configured: str | None, given: Path) -> Path:
    """Return data.cache_dir when it is set, else the run's own cache folder."""
    return expanded(configured) if configured else given
