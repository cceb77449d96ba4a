"""Batches from a stream of documents: random windows for training, all windows in order for validation.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from functitan import random
from functitan.data.corpus import BYTES, SEPARATOR, Corpus, decode
from functitan.data.source import Batch
from functitan.errors import ConfigError

#: The label that does not count.
_PADDING = -100


def windows(stream: torch.Tensor, starts: torch.Tensor, seq: int) -> Batch:
    """Windows of a stream with next-token labels, documents kept apart.

    Args:
        stream: 1-D integer tokens; :data:`SEPARATOR` begins a document.
        starts: (B,) int64, at most ``len(stream) - seq - 1``.
        seq: S.

    Returns:
        "tokens", "labels" and "segment_ids", (B, S) int64. Segment ids count the documents of a row from 0 or
        1, so that a token attends to nothing before its document's separator.

    >>> batch = windows(torch.tensor([256, 7, 8, 256, 9, 5]), torch.tensor([1]), 4)
    >>> batch["tokens"], batch["labels"], batch["segment_ids"]
    (tensor([[  7,   8, 256,   9]]), tensor([[  8, 256,   9,   5]]), tensor([[0, 0, 1, 1]]))
    """
    index = starts.unsqueeze(-1) + torch.arange(seq + 1)
    rows = stream[index].to(torch.int64)
    tokens_BS = rows[:, :-1].contiguous()
    return {
        "tokens": tokens_BS,
        "labels": rows[:, 1:].contiguous(),
        "segment_ids": (tokens_BS == SEPARATOR).cumsum(-1),
    }


def sample_windows(stream: torch.Tensor, batch: int, seq: int, seed: int, step: int) -> Batch:
    """The batch of a step: windows that begin anywhere, a pure function of the seed and the step."""
    key = random.fold_in(random.fold_in(random.key(seed), "batch"), step)
    return windows(stream, random.randint(key, (batch,), 0, len(stream) - seq), seq)


def ordered_windows(stream: torch.Tensor, batch: int, seq: int, limit: int) -> Iterator[Batch]:
    """Windows that do not overlap, spread evenly over the stream, at most ``limit`` batches.

    All batches have one shape: a short last batch is filled up with rows whose labels do not count.
    """
    count = min((len(stream) - 1) // seq, limit * batch)
    # Evenly spread, so that a limit still reads from every part of the stream.
    starts = torch.arange(count) * ((len(stream) - 1 - seq) // max(count - 1, 1))
    for first in range(0, count, batch):
        chosen = starts[first : first + batch]
        filled = torch.cat([chosen, chosen.new_zeros(batch - len(chosen))])
        rows = windows(stream, filled, seq)
        rows["labels"][len(chosen) :] = _PADDING
        yield rows


@dataclass(frozen=True)
class CorpusSource:
    """A :class:`functitan.data.source.Source` over a corpus in memory.

    Attributes:
        corpus: the text.
        batch_size, seq: B and S of every batch.
        seed: of the training windows.
        validation_batches: at most so many batches are held out.
    """

    corpus: Corpus
    batch_size: int
    seq: int
    seed: int = 0
    validation_batches: int = 32

    def __post_init__(self) -> None:
        shortest = min(len(self.corpus.train), len(self.corpus.valid))
        if self.seq < 1 or self.batch_size < 1 or self.seq >= shortest:
            raise ConfigError(
                f"batches of {self.batch_size} x {self.seq} tokens were asked for; both must be at least 1, "
                f"and the sequence below the {shortest} tokens of the shorter stream. Set data.batch and "
                "data.seq."
            )

    @property
    def valid_ids(self) -> int:
        """The ids that are bytes."""
        return BYTES

    @property
    def bytes_per_token(self) -> float:
        """One: tokens are bytes (and one separator per file)."""
        return 1.0

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        return sample_windows(self.corpus.train, self.batch_size, self.seq, self.seed, step)

    def validation(self) -> Iterable[Batch]:
        """Windows of the held-out files."""
        return ordered_windows(self.corpus.valid, self.batch_size, self.seq, self.validation_batches)

    def prompt(self) -> torch.Tensor:
        """The beginning of a document."""
        return torch.tensor([SEPARATOR])

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes as text."""
        return decode(ids)
