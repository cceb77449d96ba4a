"""Sharding rules of ops, one file per family."""

from functitan.sharding.op_rules import attention, factory, lookup, matmul, ours, pointwise, reduction, view
from functitan.sharding.op_rules.base import covered, find_rule, register_rule, rule

__all__ = [
    "attention",
    "covered",
    "factory",
    "find_rule",
    "lookup",
    "matmul",
    "ours",
    "pointwise",
    "reduction",
    "register_rule",
    "rule",
    "view",
]
