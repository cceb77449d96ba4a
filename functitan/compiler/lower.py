"""Lower a traced function for a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from functitan import tree
from functitan.columns import human_bytes
from functitan.compiler import messages, nodes
from functitan.compiler.calls import gradient_layout, reduced_gradient
from functitan.compiler.order import result_by_result
from functitan.compiler.passes import DEFAULT_PASSES, Counts, Passes, PassRecord, run_passes
from functitan.compiler.program import LoweredBody, Program
from functitan.compiler.propagate import Context, Propagator
from functitan.compiler.split import is_gathered, split
from functitan.compiler.trace import Traced
from functitan.compiler.values import Value
from functitan.errors import ShardingError, raise_batch
from functitan.sharding.layout import Layout, by_slices, replicated
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh
from functitan.sharding.op_rules.base import TensorType

#: Problems that a message lists.
_SHOWN = 8


def lower(
    traced: Traced,
    layouts: Sequence[Layout],
    mesh: Mesh,
    rules: Rules | None,
    *,
    conflicts: str = "error",
    reduce_dtype: torch.dtype = torch.float32,
    passes: Passes = DEFAULT_PASSES,
) -> Program:
    """Lower a global trace to a per-device program.

    Args:
        traced: the trace.
        layouts: the layout of each flat input.
        mesh, rules: what annotations mean.
        conflicts: "error", or "auto" to settle operands that disagree by bytes moved.
        reduce_dtype: the lowest dtype in which gradients of parameters are reduced.
        passes: which passes run on the lowered program, and how.

    Raises:
        ShardingError: conflicts and layouts that the user must settle, all in one message.
    """
    ctx = Context(mesh, rules, traced.fake_mode, traced.bodies, conflicts, reduce_dtype, passes.regathers)
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    types = [_type(n) for n in places]

    def enter(p: Propagator) -> None:
        for node, name, typ, layout in zip(places, traced.inputs, types, layouts, strict=True):
            local = p.emitter.placeholder(node.name, typ, layout)
            p.env[node] = p.value(typ, layout, local, node)
            p.env[node].param = name

    def leave(p: Propagator) -> list[tuple[Layout, fx.Node]]:
        outs = []
        names = tree.paths(tree.unflatten(traced.out_tree, list(range(traced.out_tree.num_leaves))))
        for name, node in zip(names, _outputs(traced.graph), strict=True):
            p.at(node)
            layout, local = p.settled(p.env[node], f"output {name}")
            if not layout.is_spec:
                p.problems.append(messages.irregular_output(name, p.env[node], layout))
            outs.append((Layout(layout.dims, storage=layout.storage), local))
        return outs

    p, outs = _propagate(ctx, traced.graph, enter, leave, traced.name, passes.regathers("step"))
    passes.check_regions(body.label for body in ctx.lowered.values())
    p.emitter.graph.output([n for _, n in outs])
    _prune(p.emitter.graph)
    result_by_result(p.emitter.graph)
    names = tree.paths(tree.unflatten(traced.out_tree, list(range(traced.out_tree.num_leaves))))
    used = _bodies_used(p.emitter.graph, {b.name: b for b in ctx.lowered.values()})
    program = Program(
        traced.name,
        mesh,
        p.emitter.graph,
        used,
        traced.inputs,
        list(layouts),
        types,
        names,
        [lay for lay, _ in outs],
        [_type(n) for n in _outputs(traced.graph)],
        traced.out_tree,
        list(dict.fromkeys(ctx.choices)),
        rules.unused(ctx.seen_names) if rules is not None else [],
    )
    counts = Counts.of(program)
    said = {
        name: tuple(dict.fromkeys(text for own, text in ctx.decided if own == name))
        for name in ("memory_budget", "regather")
    }
    program.passes = (PassRecord("regather", bool(passes.regather), counts, counts, said["regather"]),)
    if said["memory_budget"]:
        program.passes = (PassRecord("memory_budget", True, counts, counts, said["memory_budget"]), *program.passes)
    return run_passes(program, passes)


def lower_joint(
    ctx: Context, body: Any, layouts: list[Layout], params: list[str], zeros: frozenset[int] = frozenset()
) -> LoweredBody:
    """Lower a body's joint graph for the layouts of its inputs, and split it.

    Args:
        ctx, body: what to lower.
        layouts, params: of each input its layout, and which parameter it is.
        zeros: carries that are taken as zeros of any layout: the body as its first step meets it, which shows how these
            leave it, pending sums included.
    """
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    primals, tangents = places[: body.n_inputs], places[body.n_inputs :]
    results = _outputs(body.graph)
    n_outs = len(body.output_types)
    out_nodes, gradient_nodes = results[:n_outs], results[n_outs:]
    tangent_of = [i for i, d in enumerate(body.differentiable) if d][: len(tangents)]
    local: dict[str, Any] = {}

    def enter(p: Propagator) -> None:
        local.update(inputs=[], tangents={}, exits={})
        for node, layout, param in zip(primals, layouts, params, strict=True):
            made = p.emitter.placeholder(node.name, _type(node), layout)
            zero = len(local["inputs"]) in zeros
            p.env[node] = p.zeros(_type(node), layout) if zero else p.value(_type(node), layout, made, node)
            p.env[node].param = param
            local["inputs"].append(made)
        p.env.missing = lambda node: tangent(p, node)

    def exit_of(p: Propagator, i: int) -> tuple[Layout, fx.Node]:
        if i not in local["exits"]:
            v: Value = p.env[out_nodes[i]]
            p.at(out_nodes[i])
            layout = v.layout or v.preferred or replicated(v.type.shape)
            if i in zeros:
                target = Layout(layout.dims, layout.pending)
            elif i < body.n_carry:
                target = _carry_exit(layout, layouts[i], p.sizes, bool(p.env[primals[i]].resolved))
            else:
                target = Layout(layout.dims)
            local["exits"][i] = (target, p.read(v, target, f"leaves {body.name}"))
        return local["exits"][i]

    def tangent(p: Propagator, node: fx.Node) -> Value:
        k = tangents.index(node)
        layout = exit_of(p, tangent_of[k])[0].dual()
        made = p.emitter.placeholder(node.name, _type(node), layout)
        local["tangents"][k] = made
        return p.value(_type(node), layout, made, node)

    def leave(p: Propagator) -> list[tuple[Layout, fx.Node]]:
        outs = [exit_of(p, i) for i in range(n_outs)]
        for node in tangents:
            p.env[node]
        found = []
        for i, node in zip(body.gradient_of, gradient_nodes, strict=True):
            p.at(node)
            target = gradient_layout(p, p.env[node], layouts[i].settled(), layouts[i].unreduced)
            found.append((target, reduced_gradient(p, p.env[node], target, params[i])))
        return outs + found

    regather = ctx.regathers(body.name)
    p, results_local = _propagate(ctx, body.graph, enter, leave, body.name, regather)
    outs, gradients = results_local[:n_outs], results_local[n_outs:]
    inputs: list[fx.Node] = local["inputs"]
    cotangents = [local["tangents"][k] for k in range(len(tangents))]
    forward, backward, kept, saved, budget = split(
        p.emitter.graph,
        inputs,
        cotangents,
        [n for _, n in outs],
        [n for _, n in gradients],
        body.remat,
        body.n_carry,
        keep_gathered=not regather,
    )
    if budget:
        ctx.decided.append(("memory_budget", f"{body.name}: {budget}"))
    held = [n for n in saved if is_gathered(n)]
    if held:
        size = human_bytes(sum(n.meta["val"].nbytes for n in held))
        ctx.decided.append(("regather", f"{body.name}: {len(held)} gathered parameters, {size}, are kept for backward"))
    return LoweredBody(
        f"{body.key}.{sum(k[0] == body.key for k in ctx.lowered)}",
        body.name,
        body.n_inputs,
        body.n_carry,
        body.n_xs,
        forward,
        backward,
        layouts,
        [_type(n) for n in primals],
        [lay for lay, _ in outs],
        [_type(n) for n in out_nodes],
        kept,
        [n.meta["val"] for n in saved],
        tangent_of,
        [c.meta["layout"] for c in cotangents],
        list(body.gradient_of),
        [lay for lay, _ in gradients],
        [_type(n) for n in gradient_nodes],
        body.remat,
    )


def _carry_exit(natural: Layout, entry: Layout, sizes: dict[str, int], read: bool) -> Layout:
    """A carry leaves as it entered if that takes sums and free slices alone; else its own way, refused later.

    A pending sum that the body ``read`` is settled: it would be added up in each step anyway.
    """
    kept = () if read or set(entry.pending) - set(natural.pending) else entry.pending
    return Layout(entry.dims, kept) if by_slices(natural.settled(), entry, sizes) else Layout(natural.dims)


def _propagate(
    ctx: Context, graph: fx.Graph, enter: Any, leave: Any, name: str, regather: bool
) -> tuple[Propagator, Any]:
    """Walk a graph until the places where pending sums are resolved stand still."""
    settle_at: dict[fx.Node, Layout] = {}
    while True:  # every round settles at least one more node
        p = Propagator(ctx, settle_at, regather)
        enter(p)
        p.run(graph)
        outs = leave(p)
        torn = {
            v.source: max(v.resolved, key=lambda lay: len(lay.axes))
            for v in p.values
            if v.source is not None and v.source not in settle_at and _is_torn(v)
        }
        if not torn:
            break
        settle_at.update(torn)
    problems = list(dict.fromkeys(p.refused or p.problems))
    shown = problems[:_SHOWN] + ([f"and {len(problems) - _SHOWN} more."] if len(problems) > _SHOWN else [])
    raise_batch(ShardingError, shown, f"lowering {name}")
    ctx.choices.extend(p.choices)
    return p, outs


def _is_torn(v: Value) -> bool:
    """Whether a pending sum goes on over an axis for one reader and is added up over it for another."""
    return v.layout is not None and any(v.passed & (set(v.layout.pending) - set(lay.pending)) for lay in v.resolved)


def _type(node: fx.Node) -> TensorType:
    val = nodes.value(node)
    return TensorType(tuple(val.shape), val.dtype)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return list(nodes.args(output)[0])  # type: ignore[arg-type]


def _prune(graph: fx.Graph) -> None:
    nodes.drop_dead(graph)


def _bodies_used(graph: fx.Graph, known: dict[str, LoweredBody]) -> dict[str, LoweredBody]:
    """The bodies that a graph calls, directly or not, in order of first call."""
    found: dict[str, LoweredBody] = {}
    stack = [graph]
    while stack:
        for node in stack.pop().nodes:
            name = node.meta.get("body")
            if name is not None and name not in found:
                body = found[name] = known[name]
                stack += [g for _, g in body.graphs()]
    return found
