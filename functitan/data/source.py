"""What a training run needs of its data: batches as a pure function of the step.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

#: "tokens" and "labels" (B, S) int64, where labels of -100 do not count; "segment_ids" (B, S) int64 tells
#: documents apart.
Batch = dict[str, torch.Tensor]


class Source(Protocol):
    """A source of batches, as plain CPU tensors of one shape.

    A run that stops at a step and goes on later reads the same batches as one that never stopped, because a
    batch depends on nothing but the source and the step.
    """

    @property
    def valid_ids(self) -> int:
        """Ids below this are text; generation is limited to them."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token on average: what makes losses comparable across tokenizers."""
        ...

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        ...

    def validation(self) -> Iterable[Batch]:
        """Held-out batches of the shape of :meth:`batch`, the same at every call; the last may be padded."""
        ...

    def prompt(self) -> torch.Tensor:
        """What a sample of text begins with, (S,) int64."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Ids as text."""
        ...
