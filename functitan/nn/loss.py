"""Cross entropy as a sum and a count.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import torch

#: Labels of this value do not count; the same number as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


def cross_entropy(
    logits_BSV: torch.Tensor, labels_BS: torch.Tensor, ignore_index: int = IGNORE_INDEX
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed negative log-likelihood of the labels, and how many labels counted.

    A loss is ``sum / count`` divided once, by the count of the whole batch: a mean of means would weigh a
    sample by where it happens to be. Nothing here needs a row of logits in one place: the maximum and the two
    sums are reductions over the vocabulary, and the label's logit is a masked sum instead of a lookup, so
    that logits sharded over the vocabulary are never gathered (Narayanan et al. 2021, arXiv:2104.04473,
    section 5).

    Args:
        logits_BSV: scores (..., V), float; accumulated in at least float32.
        labels_BS: integer labels (...), in [0, V) or ``ignore_index``.
        ignore_index: the label that does not count.

    Returns:
        The sum, 0-d, float32 (float64 for float64 logits), and the count, 0-d, int64.

    >>> total, count = cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 3, -100]]))
    >>> total / count, count
    (tensor(1.3863), tensor(2))
    """
    wide_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    # The maximum only keeps exp in range; the value, and so the gradient, does not depend on it.
    shifted_BSV = wide_BSV - wide_BSV.detach().amax(-1, keepdim=True)
    log_normaliser_BS = torch.log(torch.exp(shifted_BSV).sum(-1))
    ids_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
    is_label_BSV = ids_V == labels_BS.unsqueeze(-1)
    label_logit_BS = torch.where(is_label_BSV, shifted_BSV, 0.0).sum(-1)
    counts_BS = labels_BS != ignore_index
    loss_BS = torch.where(counts_BS, log_normaliser_BS - label_logit_BS, 0.0)
    return loss_BS.sum(), counts_BS.sum()
