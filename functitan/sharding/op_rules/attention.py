"""Attention: batch and heads split freely; query heads are the join of kv head and group; positions stay whole.

Legend: b batch, g kv heads, r query heads per kv head, v width of v. Positions and the width of q and k are whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from functitan.ops import attention as _attention  # noqa: F401 (registers the ops)
from functitan.ops import attention_logits as _logits  # noqa: F401
from functitan.sharding.op_rules.base import Call, Equation, Operand, Rule, parse, rule

_ops = torch.ops.functitan


def _bias(call: Call, bias: Any) -> str:
    """A dim of size 1 broadcasts; head dims of full size are query heads."""
    batch, heads = call.operands[bias.index].shape[:2]
    return ("_" if batch == 1 else "b") + ("_" if heads == 1 else "(gr)") + "__"


def _equation(call: Call, names: dict[str, str], outputs: str) -> Equation:
    """The labels of the tensor arguments that a call has, in order."""
    found = [(call.argument(name), labels) for name, labels in names.items()]
    texts = [
        _bias(call, value) if labels == "bias" else labels for value, labels in found if isinstance(value, Operand)
    ]
    return parse(",".join(texts) + "->" + outputs, call)


@rule(_ops.attention.default)
def attention(call: Call) -> Rule:
    names = {
        "q": "b(gr)__", "k": "bg__", "v": "bg_v", "q_segments": "b_", "kv_segments": "b_", "bias": "bias",
        "sink": "(gr)",
    }  # fmt: skip
    # The log-sum-exp does not read v.
    return replace(_equation(call, names, "b(gr)_v,b(gr)_"), apart=frozenset({(1, "v")}))


@rule(_ops.attention_max_logits.default)
def attention_max_logits(call: Call) -> Rule:
    names = {"q": "b(gr)__", "k": "bg__", "q_segments": "b_", "kv_segments": "b_", "bias": "bias"}
    return _equation(call, names, "b(gr)")


@rule(_ops.attention_backward.default)
def attention_backward(call: Call) -> Rule:
    """dq and dk add up over the parts of v; dk and dv over the query heads of a group."""
    # The gradient of the log-sum-exp enters every part of v alike, and would be counted once per part.
    v = "_" if isinstance(call.argument("grad_lse"), Operand) else "v"
    names = {
        "grad_out": f"b(gr)_{v}", "grad_lse": "b(gr)_", "q": "b(gr)__", "k": "bg__", "v": f"bg_{v}",
        "q_segments": "b_", "kv_segments": "b_", "bias": "bias", "out": f"b(gr)_{v}", "lse": "b(gr)_",
    }  # fmt: skip
    return _equation(call, names, f"b(gr)__,bg__,bg_{v}")
