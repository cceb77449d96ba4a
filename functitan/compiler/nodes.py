"""Small helpers over fx graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from functitan import _torch
from functitan.compiler.source import at
from functitan.errors import TraceError

_EFFECTS = ("functitan::debug_print", "functitan::debug_print_where")


def value(node: fx.Node) -> Any:
    """The fake value of a node: a tensor, or a tuple or list of tensors."""
    return node.meta.get("val")


def args(node: fx.Node) -> Any:
    """The arguments of a node; their type in torch is a union that no code here wants to take apart."""
    return node.args


def mapped(node: fx.Node, f: Callable[[fx.Node], Any]) -> Any:
    """The positional and keyword arguments of a node with every node in them replaced, by anything."""
    return map_arg((node.args, node.kwargs), f)  # type: ignore[arg-type]


def is_call(node: fx.Node, *packets: Any) -> bool:
    """Whether a node calls one of these op packets or overloads."""
    if node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", node.target)
    return any(node.target is p or packet is p for p in packets)


def has_effect(node: fx.Node) -> bool:
    """Whether a node is kept although nothing reads it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.name in _EFFECTS or schema.is_mutable)


def drop_dead(graph: fx.Graph) -> None:
    """Remove calls that nothing reads and that have no effect."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)


def lift_constants(module: fx.GraphModule) -> None:
    """Give every get_attr node its tensor as ``meta["constant"]``, so that the graph stands without the module."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            target: Any = module
            for part in str(node.target).split("."):
                target = getattr(target, part)
            if isinstance(target, _torch.FakeTensor):
                line = next((u.meta["line"] for u in node.users if u.meta.get("line")), None)
                raise TraceError(
                    f"{at(line)}a value of shape {tuple(target.shape)} is used outside the function that made it: it "
                    "was kept in a "
                    "global, an attribute or a list while that function was traced. Return it, and pass it on as an "
                    "argument."
                )
            if isinstance(target, torch.Tensor):
                node.meta["constant"] = target
