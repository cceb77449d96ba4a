"""Sharding rules of ops, one file per family."""

from functitan.sharding.op_rules import (
    attention,
    complex,
    conv,
    factory,
    indexing,
    linalg,
    lookup,
    matmul,
    ordered,
    ours,
    pointwise,
    reduction,
    refused,
    shape,
    softmax,
    view,
)
from functitan.sharding.op_rules.base import covered, find_rule, register_rule, rule

__all__ = [
    "attention",
    "complex",
    "conv",
    "covered",
    "factory",
    "find_rule",
    "indexing",
    "linalg",
    "lookup",
    "matmul",
    "ordered",
    "ours",
    "pointwise",
    "reduction",
    "refused",
    "register_rule",
    "rule",
    "shape",
    "softmax",
    "view",
]
