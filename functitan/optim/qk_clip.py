"""QK-clip: queries and keys are scaled down when attention logits grow (Kimi K2 report, arXiv:2507.20534, section 2.1).

With S_h the largest logit of head h before the softmax, over the whole batch, and gamma_h = min(1, tau / S_h), the
weights of the head's queries are scaled by gamma_h^alpha and those of its keys by gamma_h^(1 - alpha): logits are
linear in both, so the head's become gamma_h times what they were, and none exceeds tau on that batch.

With grouped heads a key is shared by several query heads. It takes the factor of the head of its group that is clipped
most, gamma_g^(1 - alpha) with gamma_g = min of gamma_h, and the query of head h takes gamma_h / gamma_g^(1 - alpha). So
every head's logits still become exactly gamma_h times what they were, and a head below tau keeps its own.

Where a head's columns are of several kinds each kind has a power of gamma_h of its own. Multi-head latent attention adds
q_C k_C of each head's own and q_R k_R, whose rotary key all heads share: q_C and k_C take sqrt(gamma_h), q_R takes
gamma_h, and k_R and the values stay.

Legend: L layers, D model, H query heads, G key heads, R = H / G, K head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functitan import tree
from functitan.errors import ArgumentError, listed, raise_batch, suggest
from functitan.optim.transform import GradientTransformation, PyTree

#: What the columns of each head of a weight consist of: widths, each with the power of gamma that scales it.
Parts = Sequence[tuple[int, float]]


@tree.dataclass
class QkClipState:
    """``max_logit``: the largest of the logits that the last update was given; 0-d float32."""

    max_logit: torch.Tensor


def qk_clip(
    tau: float | torch.Tensor = 100.0,
    *,
    alpha: float = 0.5,
    query: str = "wq",
    key: str = "wk",
    parts: Mapping[str, Parts] | None = None,
) -> GradientTransformation:
    """Change updates so that the parameters after them have queries and keys scaled down as QK-clip says.

    Chain it behind the rule, ``chain(rule, qk_clip())``, inside of masters and averages: a master is then scaled, and
    not only its rounded copy. Its ``update`` reads ``max_logits``::

        updates, state = rule.update(grads, state, params, max_logits={"layers": max_logits_LH})

    a tree with, where a layer's (or a stack of layers') subtree is in the parameters, the largest logits of the forward
    pass of ``grads``: (..., H) for queries (..., D, H * K) and keys (..., D, G * K), heads major. On a mesh the maximum
    over the batch joins all ranks. See :func:`functitan.nn.max_logits`; the forward pass of
    :mod:`functitan.nn.models.llama3` gives them.

    A model that normalises queries or keys after their projection needs no clip, and this one would do nothing to it.

    Args:
        tau: the largest logit that is left as it is.
        alpha: the query's share of a clip.
        query, key: the names of the weights in a layer's subtree.
        parts: in place of ``alpha``, ``query`` and ``key``, by the name of a weight (..., D, H * K) what the K columns
            of each head are. Multi-head latent attention with heads of 128 and 64 rotary columns has
            ``{"wq_b": ((128, 0.5), (64, 1.0)), "wkv_b": ((128, 0.5), (128, 0.0))}``. A product of two parts is scaled
            by the sum of their powers, which should be 1.

    Returns:
        A transformation with the state :class:`QkClipState` and the extra value ``max_logits``.

    Raises:
        ArgumentError: a ``tau`` that is not above 0, an ``alpha`` or a power outside of [0, 1], parts without a width;
            from ``update``, logits of layers without such weights, or whose heads do not fit them.

    >>> rule = qk_clip(2.0)
    >>> params = {"layers": {"wq": torch.ones(1, 1, 2), "wk": torch.ones(1, 1, 2), "wv": torch.ones(1, 1, 2)}}
    >>> zero = tree.map(torch.zeros_like, params)
    >>> updates, _ = rule.update(zero, rule.init(params), params, max_logits={"layers": torch.tensor([[8.0, 1.0]])})
    >>> updates["layers"]["wq"], updates["layers"]["wv"]
    (tensor([[[-0.5000,  0.0000]]]), tensor([[[0., 0.]]]))
    """
    problems = []
    if not isinstance(tau, torch.Tensor) and not tau > 0:
        problems.append(f"tau={tau}: every logit would be clipped away. Write one above 0, such as 100.0.")
    if not 0 <= alpha <= 1:
        problems.append(f"alpha={alpha}: it is the query's share of a clip, from 0 to 1.")
    if parts is not None:
        problems += _parts_problems(parts)
        if (alpha, query, key) != (0.5, "wq", "wk"):
            problems.append("parts say what is scaled and by which power; leave alpha, query and key out.")
    raise_batch(ArgumentError, problems, "the settings of qk_clip")

    def init(params: PyTree) -> QkClipState:
        leaves = tree.leaves(params)
        return QkClipState(torch.zeros((), dtype=torch.float32, device=leaves[0].device if leaves else None))

    def update(grads: PyTree, state: QkClipState, params: PyTree, *, max_logits: PyTree) -> tuple[PyTree, QkClipState]:
        tree.check_same_structure(grads, params, ("updates", "params"))
        rows = dict(tree.flatten_with_paths(params)[0])
        logits = dict(tree.flatten_with_paths(max_logits)[0])
        _check(logits, rows, (query, key) if parts is None else parts)
        factors: dict[str, torch.Tensor] = {}
        for path, s_LH in logits.items():
            if parts is not None:
                gamma_LH = _gamma(s_LH, tau)
                factors |= {_join(path, name): _over_parts(gamma_LH, own) for name, own in parts.items()}
                continue
            own_q, own_k = _join(path, query), _join(path, key)
            heads = s_LH.shape[-1]
            groups = _groups(heads, rows[own_q], rows[own_k])
            q_LH, k_LG = clip_factors(s_LH, groups, tau, alpha)
            factors[own_q], factors[own_k] = _over_heads(q_LH, rows[own_q]), _over_heads(k_LG, rows[own_k])

        def clipped(path: str, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            if path not in factors:
                return u
            # f (p + u) - p, so written that f = 1 leaves every bit of u.
            f = factors[path].to(torch.promote_types(u.dtype, p.dtype))
            return (f * u + (f - 1) * p).to(u.dtype)

        largest = torch.stack([s.amax() for s in logits.values()]).amax()
        return tree.map_with_path(clipped, grads, params), QkClipState(largest.to(torch.float32))

    return GradientTransformation(init, update, extra=frozenset({"max_logits"}))


def clip_factors(
    s_LH: torch.Tensor, groups: int, tau: float | torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries (..., H) and keys (..., G) are multiplied by, from the largest logits (..., H).

    >>> clip_factors(torch.tensor([400.0, 100.0, -5.0, 0.0]), 2, 100.0, 0.5)
    (tensor([0.5000, 2.0000, 1.0000, 1.0000]), tensor([0.5000, 1.0000]))
    """
    gamma_LGR = _gamma(s_LH, tau).unflatten(-1, (groups, -1))
    k_LG = gamma_LGR.amin(-1) ** (1 - alpha)
    return (gamma_LGR / k_LG[..., None]).flatten(-2), k_LG


def _gamma(s_LH: torch.Tensor, tau: float | torch.Tensor) -> torch.Tensor:
    bound = tau.to(s_LH.dtype) if isinstance(tau, torch.Tensor) else tau
    # The divisor is at least tau, so a largest logit of zero or below is no special case.
    return bound / s_LH.clamp(min=bound)


def _over_parts(gamma_LH: torch.Tensor, parts: Parts) -> torch.Tensor:
    """A power of each head's number for each column of its head: (..., 1, H * K)."""
    wide = [(gamma_LH**power)[..., None].expand(*gamma_LH.shape, width) for width, power in parts]
    return torch.cat(wide, -1).flatten(-2)[..., None, :]


def _over_heads(f_LH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A number per head for each column of its head: (..., 1, H * K)."""
    heads, columns = f_LH.shape[-1], weight.shape[-1]
    wide = f_LH[..., None].expand(*f_LH.shape, columns // heads)
    return wide.flatten(-2)[..., None, :]


def _groups(heads: int, q: torch.Tensor, k: torch.Tensor) -> int:
    """The key heads that the two shapes say."""
    return k.shape[-1] * heads // q.shape[-1]


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _parts_problems(parts: Mapping[str, Parts]) -> list[str]:
    problems = [] if parts else ["parts is empty; name the weights that are scaled, or leave it out."]
    for name, own in parts.items():
        if not own or any(width < 1 for width, _ in own):
            problems.append(f'parts["{name}"]={own}: write the width of each part of a head, at least 1.')
        if any(not 0 <= power <= 1 for _, power in own):
            problems.append(f'parts["{name}"]={own}: a power of gamma is from 0, for what stays, to 1.')
    return problems


def _check(
    logits: Mapping[str, Any], rows: Mapping[str, torch.Tensor], names: tuple[str, str] | Mapping[str, Parts]
) -> None:
    problems = []
    if not logits:
        problems.append("max_logits is empty. Give the largest logits of each layer, or leave qk_clip out.")
    for path, s in logits.items():
        at = f'max_logits of "{path}", {tuple(s.shape)}'
        missing = [name for name in names if _join(path, name) not in rows]
        if missing:
            asked = _join(path, missing[0])
            problems.append(f"{at}: there is no parameter {asked}; there are {listed(rows)}.{suggest(asked, rows)}")
            continue
        if not isinstance(names, tuple):
            for name, own in names.items():
                w, width = rows[_join(path, name)], sum(width for width, _ in own)
                if not s.ndim or s.shape[:-1] != w.shape[:-2] or w.shape[-1] != s.shape[-1] * width:
                    problems.append(
                        f"{at}, do not fit {name} {tuple(w.shape)}: they are (..., H) for (..., D, H * {width})."
                    )
            continue
        query, key = names
        q, k = rows[_join(path, query)], rows[_join(path, key)]
        shown = f"{query} {tuple(q.shape)} and {key} {tuple(k.shape)}"
        heads = s.shape[-1] if s.ndim else 0
        groups = _groups(heads, q, k)
        fits = heads and q.shape[-1] % heads == 0 and groups and groups * q.shape[-1] == k.shape[-1] * heads
        if not fits or heads % groups or s.shape[:-1] != q.shape[:-2] or q.shape[:-2] != k.shape[:-2]:
            problems.append(f"{at}, do not fit {shown}: they are (..., H) for (..., D, H * K) and (..., D, G * K).")
    raise_batch(ArgumentError, problems, "qk_clip")
