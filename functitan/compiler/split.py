"""Split a body's lowered joint graph into forward and backward under its remat policy.

Decided here, on local values after lowering, what forward saves. A value that backward needs is, in this order: an
input that is kept; saved, if the policy allows; or computed again from what it is made of. Gathered parameters are
saved only when asked to, and views are taken again from what they view. Other collectives are saved unless the policy saves
nothing: repeating them costs the network, not only compute.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from functitan.compiler import nodes
from functitan.compiler.remat_budget import Problem, said_of, within
from functitan.ops import attention, grouped_mm  # noqa: F401 (register their ops)

aten = torch.ops.aten
_VIEWS = {
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.select.int,
}
_DOTS = {
    aten.mm.default,
    aten.bmm.default,
    torch.ops.functitan.attention.default,
    torch.ops.functitan.grouped_mm.default,
}
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_gathered(node: fx.Node) -> bool:
    """Whether a node is a stored parameter as it was gathered, before any view of it."""
    return node.target is _WAIT and node.meta["origin"].gather


def saveable(policy: Any, keep_gathered: bool = False) -> Callable[[fx.Node], bool]:
    """Which computed values a policy lets forward save. None is everything_saveable.

    Args:
        policy: the remat policy, or None.
        keep_gathered: save gathered parameters, whatever the policy.
    """
    name = getattr(policy, "name", "everything_saveable")
    wanted = set(policy.names) if name == "save_only_these_names" else set()

    def check(node: fx.Node) -> bool:
        if keep_gathered and is_gathered(node):
            return True
        if not isinstance(node.meta.get("val"), torch.Tensor) or name in ("nothing_saveable", "memory_budget"):
            return False  # of a memory budget only 0 comes here
        if wanted and _own(node) and wanted & names_of(node):
            return True
        if not _computed(node):
            return False
        if name == "everything_saveable" or node.target is _WAIT:
            return True
        source = node.args[0] if node.target is operator.getitem else node
        return name == "dots_saveable" and getattr(source, "target", None) in _DOTS

    return check


def _own(node: fx.Node) -> bool:
    """Whether a value may be saved if its name is: no gathered parameter, and not only a name."""
    origin = node.meta.get("origin")
    # A name is for a value, not another value: that one is saved or not.
    return not (origin is not None and origin.gather) and "checkpoint_name" not in node.meta


def _computed(node: fx.Node) -> bool:
    """Whether a tensor is worth saving at all: computed, and no view or name of another value."""
    tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return tensor and _own(node) and node.target not in _VIEWS and bool(node.all_input_nodes)


def names_of(node: fx.Node) -> set[str]:
    """The names that ``checkpoint_name`` gave a value."""
    found: set[str] = set()
    for user in node.users:
        if "checkpoint_name" in user.meta:
            found |= {user.meta["checkpoint_name"]} | names_of(user)
    return found


def depends_on(graph: fx.Graph, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from any of the roots."""
    found = set(roots)
    for node in graph.nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that the roots are computed from, themselves included."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def split(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
    outs: Sequence[fx.Node],
    gradients: Sequence[fx.Node],
    policy: Any,
    n_carry: int = 0,
    *,
    keep_gathered: bool = False,
) -> tuple[fx.Graph, fx.Graph | None, list[int], list[fx.Node], str]:
    """Cut a joint graph in two.

    Args:
        graph: the joint graph.
        inputs, tangents: its placeholders.
        outs, gradients: its results.
        policy: the remat policy, or None.
        n_carry: the leading inputs that a loop carries: no input of the whole loop, so backward gets them saved.
        keep_gathered: save the parameters that forward gathered.

    Returns:
        The forward graph (coordinates, inputs -> outs, saved values), the backward graph (coordinates, kept inputs,
        saved values, tangents -> gradients) or None, the indices of kept inputs, the saved nodes, and for a memory budget
        what it came to, in words.
    """
    coordinates = [n for n in graph.nodes if n.op == "placeholder" and "coordinate" in n.meta]
    effects = [n for n in graph.nodes if nodes.has_effect(n)]
    if not gradients:
        return extract(graph, [*coordinates, *inputs], outs, effects, whole=True), None, [], [], ""
    late = depends_on(graph, tangents)
    early = ancestors(outs)
    # What an op of forward gives beside what forward returns is there as well: attention's log-sum-exp.
    early |= {n for n in graph.nodes if n.target is operator.getitem and n.args[0] in early}
    late_effects = [n for n in effects if n in late]
    may_save, said = saveable(policy, keep_gathered), ""
    if getattr(policy, "name", "") == "memory_budget" and policy.budget != 0:
        needed = ancestors([*gradients, *late_effects])
        problem = Problem(
            list(graph.nodes),
            early & needed,
            {n for n in needed - early if n.op == "call_function"},
            {*gradients, *late_effects},
            [n for n in inputs[:n_carry] if n in needed],
            lambda n: "collective" not in n.meta and _computed(n),
            lambda n: "origin" in n.meta and n.meta["origin"].gather,
        )
        choice, limit = within(problem, policy.budget, policy.nbytes)
        said = said_of(choice, limit)
        may_save = lambda n: n in choice.saved or (keep_gathered and is_gathered(n))  # noqa: E731
    kept: set[fx.Node] = set()
    saved: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [*gradients, *late_effects]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in inputs[:n_carry]:
            saved.append(node)
        elif node.op == "placeholder":
            kept.add(node)
        elif node not in late and node in early and may_save(node):
            saved.append(node)
        else:
            stack.extend(node.all_input_nodes)
    order = {n: i for i, n in enumerate(graph.nodes)}
    saved.sort(key=order.__getitem__)
    kept_inputs = [i for i, n in enumerate(inputs) if n in kept]
    forward = extract(graph, [*coordinates, *inputs], [*outs, *saved], [n for n in effects if n not in late])
    backward = extract(
        graph,
        [*coordinates, *(inputs[i] for i in kept_inputs), *saved, *tangents],
        gradients,
        late_effects,
    )
    return forward, backward, kept_inputs, saved, said


def extract(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    outs: Sequence[fx.Node],
    effects: Sequence[fx.Node],
    *,
    whole: bool = False,
) -> fx.Graph:
    """A graph of its own from some values of a graph to others, with some effects; inputs become placeholders.

    A graph that is left ``whole`` may hold a derivative of its own, whose backward gathers parameters again on purpose.
    """
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = made.placeholder(node.name)
        env[node].meta = dict(node.meta)
        env[node].meta.pop("collective", None)
    needed: set[fx.Node] = set()
    stack = [n for n in (*outs, *effects) if n not in env]
    while stack:
        node = stack.pop()
        if node in needed or node in env:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
    gathered: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            env[node] = made.node_copy(node, env.__getitem__)
            origin = node.meta.get("origin")
            if origin is not None and origin.gather and not whole:
                # A parameter that is gathered for recomputation is not gathered again for its gradient.
                key = (node.target, str(env[node].args), str(env[node].kwargs))
                if key in gathered:
                    made.erase_node(env[node])
                env[node] = gathered.setdefault(key, env[node])
    made.output([env[n] for n in outs])
    return made
