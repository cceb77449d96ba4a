"""Softmax: fused along a whole dim; along a split one its parts, of which only maxima and sums are joined."""

from __future__ import annotations

import torch

from functitan.sharding.op_rules.base import Call, Decompose, Rule, rule
from functitan.sharding.op_rules.labels import along

aten = torch.ops.aten


def _shifted(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    x = x.float() if half_to_float else x
    return x - torch.amax(x, dim, keepdim=True)


def _softmax_parts(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    e = torch.exp(_shifted(x, dim, half_to_float))
    return e / e.sum(dim, keepdim=True)


def _log_softmax_parts(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = _shifted(x, dim, half_to_float)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def _softmax_backward_parts(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    gy = g * y
    return (gy - y * gy.sum(dim, keepdim=True)).to(dtype)


def _log_softmax_backward_parts(g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return (g - torch.exp(y) * g.sum(dim, keepdim=True)).to(dtype)


_PARTS = {
    aten._softmax.default: _softmax_parts,
    aten._log_softmax.default: _log_softmax_parts,
    aten._softmax_backward_data.default: _softmax_backward_parts,
    aten._log_softmax_backward_data.default: _log_softmax_backward_parts,
}


@rule(*_PARTS)
def softmax(call: Call) -> Rule:
    return along(call, call.argument("dim"), otherwise=Decompose(_PARTS[call.op]))
