"""Turn writes into values: a trace that holds in-place ops is traced again without them.

Only traces that need it pay for the second trace. Nodes keep the line and the direction of the nodes they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from functitan import _torch


def is_mutable(graph: fx.Graph) -> bool:
    """Whether a graph writes into one of its values."""
    return any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.nodes)


def functionalize(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], table: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """The same function without writes.

    Args:
        module: a trace.
        inputs: its fake inputs.
        table: the decompositions of the trace.
    """
    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
    # Constants are inputs of the second trace: functionalization follows only what it has wrapped.
    fakes = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in constants.values()]

    def run(*flat: torch.Tensor) -> Any:
        known = dict(zip(constants, flat[len(inputs) :], strict=True))
        return _Following(module, known).run(*flat[: len(inputs)])

    pure = torch.func.functionalize(run, remove="mutations")
    made = _torch.make_fx(pure, decomposition_table=table, _allow_non_fake_inputs=True)(*inputs, *fakes)
    places = [n for n in made.graph.nodes if n.op == "placeholder"][len(inputs) :]
    for place, (name, tensor) in zip(places, constants.items(), strict=True):
        name = f"_constant_{name}"  # the second trace may have constants of its own
        made.register_buffer(name, tensor)
        with made.graph.inserting_after(place):
            node = made.graph.get_attr(name)
        node.meta["val"] = place.meta["val"]
        place.replace_all_uses_with(node)
        made.graph.erase_node(place)
    return made


class _Following(fx.Interpreter):
    """Runs a trace under another trace, and hands each node's origin to the new nodes that it makes."""

    def __init__(self, module: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._constants = constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._constants[str(target)]

    def run_node(self, n: fx.Node) -> Any:
        before = _torch.last_traced_node()
        out = super().run_node(n)
        node = _torch.last_traced_node()
        while node is not None and node is not before and node.op != "root":
            for key in ("line", "backward"):
                if key in n.meta:
                    node.meta.setdefault(key, n.meta[key])
            node = node.prev
        return out
