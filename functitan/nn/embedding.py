"""Token embedding.

Legend: B batch, S sequence, V vocabulary, D model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(tokens_BS: torch.Tensor, table_VD: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The rows of ``table_VD`` that the tokens name.

    Args:
        tokens_BS: integer ids of any shape, each in [0, V).
        table_VD: the table (V, D).
        dtype: the dtype of the result; by default the table's.

    Returns:
        (*tokens.shape, D).

    >>> embedding(torch.tensor([[1, 0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
    tensor([[[1., 2.],
             [0., 0.]]])
    """
    return F.embedding(tokens_BS, table_VD if dtype is None else table_VD.to(dtype))
