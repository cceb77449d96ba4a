"""Who may attend to whom: causality, windows, segments and biases as one value, and as one mask.

Legend: B batch, H query heads, S query positions, T key positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Mask:
    """The masking arguments of one attention call; a key is attended when every given condition allows it.

    Attributes:
        q_segments, kv_segments: integers (B, S) and (B, T); a query sees the keys of its own segment.
        bias: four dims broadcastable to (B, H, S, T); bool (True attends) or floating (added to the logits).
        causal: query i sees keys 0..i, counted from the start of both (the convention of torch's
            ``is_causal``).
        window: query i sees keys j > i - window.
    """

    q_segments: torch.Tensor | None = None
    kv_segments: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None

    def without_causal(self) -> Mask:
        """The rest of the mask, for a kernel that does causality itself."""
        return replace(self, causal=False)

    def allowed(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """A bool mask broadcastable to (B, H, S, T), True where a key may be attended; None when all may.

        It has the dims of its conditions only: (1, 1, S, T) from positions, (B, 1, S, T) with segments. A
        floating bias is no condition, except that its entries of minus infinity act as one when they are
        added.

        >>> Mask(causal=True, window=2).allowed(3, 3, torch.device("cpu"))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
        """
        found: torch.Tensor | None = None
        if self.causal or self.window is not None:
            ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
            near = ahead <= 0 if self.causal else None
            if self.window is not None:
                late = ahead > -self.window
                near = late if near is None else near & late
            found = near[None, None]  # type: ignore[index]
        if self.q_segments is not None and self.kv_segments is not None:
            same = self.q_segments[:, None, :, None] == self.kv_segments[:, None, None, :]
            found = same if found is None else found & same
        if self.bias is not None and self.bias.dtype == torch.bool:
            found = self.bias if found is None else found & self.bias
        return found

    def additive(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask as a term of the logits: a floating tensor broadcastable to (B, H, S, T), or None for no
        term.

        >>> Mask(causal=True).additive(2, 2, torch.device("cpu"), torch.float32)[0, 0]
        tensor([[0., -inf],
                [0., 0.]])
        """
        allowed = self.allowed(queries, keys, device)
        term = None
        if self.bias is not None and self.bias.dtype != torch.bool:
            term = self.bias.to(dtype)
        if allowed is None:
            return term
        if term is None:
            return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -math.inf)
        return torch.where(allowed, term, -math.inf)
