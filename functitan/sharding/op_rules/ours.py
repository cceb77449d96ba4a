"""Rules of functitan's own ops."""

from __future__ import annotations

from typing import Any

import torch

from functitan.ops import threefry as _threefry  # noqa: F401 (registers the op)
from functitan.sharding.op_rules.base import Call, Rule, parse, rule


@rule(torch.ops.functitan.threefry)
def threefry(call: Call) -> Rule:
    """Bits are pointwise in the global index; the key is whole."""
    return parse("_,...->...", call)
