"""Regions and scans in a trace: bodies traced once by themselves, forward and backward jointly.

A body's graph takes its flat inputs and one cotangent per differentiable output, and returns the outputs and the
gradients. What of the forward part is kept for backward is decided after lowering (see ``split``). Tensors that a
body closes over become inputs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from functitan import _torch, tree
from functitan.compiler import markers
from functitan.compiler.closures import signed
from functitan.compiler.local import LocalBody, LocalCall, local_body
from functitan.compiler.trace import Traced, make_graph
from functitan.errors import TraceError
from functitan.sharding.shard_map import LocalFunction

_numbers = itertools.count()
#: The place of every gradient inside a body.
INSIDE = -1
Type = tuple[tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class Body:
    """A traced body.

    Attributes:
        key: what nodes call it by.
        name: for reports.
        remat: the policy of what forward saves, or None for the compiler's default.
        graph: flat inputs, then cotangents -> outputs, then gradients.
        n_carry, n_xs: how the inputs of a scan's body are grouped (both 0 for a region); the rest are constants.
        n_inputs: flat inputs without cotangents.
        out_tree: the structure of the result (for a scan: of the pair carry, y).
        output_types: shape and dtype of each output, per step.
        differentiable: which outputs have a cotangent.
        gradient_of: the inputs that have a gradient, in the order of the graph's gradients.
        gradient_types: shape and dtype of those gradients, per step.
        captured: the tensors that the traced call closed over, in input order.
    """

    key: str
    name: str
    remat: Any
    n_inputs: int
    n_carry: int = 0
    n_xs: int = 0
    graph: fx.Graph = field(default_factory=fx.Graph)
    out_tree: Any = None
    output_types: list[Type] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    gradient_of: list[int] = field(default_factory=list)
    gradient_types: list[Type] = field(default_factory=list)
    captured: list[torch.Tensor] = field(default_factory=list)

    def grouped(self, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Flat inputs as carry, xs and constants."""
        a, b = self.n_carry, self.n_carry + self.n_xs
        return inputs[:a], inputs[a:b], inputs[b:]


class _Finder(_torch.TorchDispatchMode):
    """Finds the fake tensors that a function reads and neither got nor made."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(t): t for t in known}
        self.found: dict[int, torch.Tensor] = {}

    def note(self, values: Any) -> None:
        """Note the foreign tensors among some values."""
        for t in tree.leaves(values):
            if isinstance(t, _torch.FakeTensor) and id(t) not in self._known:
                self.found.setdefault(id(t), t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor):
                self._known[id(t)] = t
        return out


class _Substitute(TorchFunctionMode):
    """Reads of captured tensors become reads of the body's own inputs, innermost body last."""

    def __init__(self, swap: Callable[[Any], Any]) -> None:
        super().__init__()
        self._swap = swap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree.map(self._swap, args), **tree.map(self._swap, kwargs or {}))


class TracingAnnotator:
    """Turns annotations into nodes of the trace, and traces bodies."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._swaps: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        self._seen: dict[Any, tuple[Body, list[int], Any]] = {}
        self._local: dict[Any, tuple[LocalBody, Any]] = {}  # the function is kept: keys may hold ids
        self._places = itertools.count()
        self._bodies_open = 0
        self._used: dict[int, torch.Tensor] = {}

    def constrain(self, x: torch.Tensor, spec: Any, pending: Any, what: str = "") -> torch.Tensor:
        return markers.ops.constrain(x, markers.encode_spec(spec, pending, x.ndim, what))

    def constrain_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return markers.ops.constrain_like(x, like)

    def checkpoint_name(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return markers.ops.checkpoint_name(x, name)

    def _place(self) -> int:
        """Which gradient of the function this is, counted in program order; those inside bodies are not told apart."""
        return INSIDE if self._bodies_open else next(self._places)

    def mark_gradients(self, gradients: Any, params: Any) -> Any:
        return tree.map(lambda g, p: markers.ops.param_gradient(g, p, self._place(), []), gradients, params)

    def use_params(self, params: Any, pending: tuple[str, ...]) -> Any:
        if _torch.inside_functorch():
            return params  # per-example derivatives: marks have no batched form

        def use(p: torch.Tensor) -> torch.Tensor:
            if id(p) not in self._used:
                used = markers.ops.use_param(p, self._place(), list(pending))
                self._used[id(used)] = used
                return used
            return p  # a model that marks its parameters inside a derivative that did

        return tree.map(use, params)

    def region(self, f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if _torch.inside_functorch():
            markers.no_vmap()
        leaves, in_tree = tree.flatten(args)
        leaves = [self._swap(leaf) for leaf in leaves]
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = [leaf for leaf, t in zip(leaves, is_tensor, strict=True) if t]
        static = tuple(leaf for leaf, t in zip(leaves, is_tensor, strict=True) if not t)

        def flat(*values: torch.Tensor) -> Any:
            given, rest = iter(values), iter(static)
            return f(*tree.unflatten(in_tree, [next(given) if t else next(rest) for t in is_tensor]))

        where = (in_tree, tuple(is_tensor), signed(static)[0])
        body, captured = self._body(f, flat, tensors, 0, 0, where, options)
        outs = markers.Call.apply(body, None, *tensors, *captured)
        return tree.unflatten(body.out_tree, outs)

    def scan(self, f: Callable[..., Any], init: Any, xs: Any, length: int, options: dict[str, Any]) -> tuple[Any, Any]:
        if _torch.inside_functorch():
            markers.no_vmap()
        carry, carry_tree = tree.flatten(init)
        rows, xs_tree = tree.flatten(xs)
        carry, rows = [self._swap(c) for c in carry], [self._swap(r) for r in rows]
        for kind, values in (("init", carry), ("xs", rows)):
            for v in values:
                if not isinstance(v, torch.Tensor):
                    raise TraceError(
                        f"scan: a leaf of {kind} is {v!r}; leaves are tensors. Write torch.tensor(...), or close over "
                        "a "
                        "constant."
                    )

        def flat(*values: torch.Tensor) -> Any:
            c = tree.unflatten(carry_tree, values[: len(carry)])
            x = tree.unflatten(xs_tree, values[len(carry) : len(carry) + len(rows)])
            out = f(c, x)
            if not isinstance(out, tuple) or len(out) != 2:
                raise TraceError(f"scan: the body returned {_kind(out)}; it returns a pair (carry, y).")
            tree.check_same_structure(c, out[0], ("the carry in", "the carry out"))
            return out

        steps = [_row(r) for r in rows]
        where = (carry_tree, xs_tree)
        body, captured = self._body(f, flat, [*carry, *steps], len(carry), len(rows), where, options)
        for i, (c, (shape, dtype)) in enumerate(zip(carry, body.output_types, strict=False)):
            if tuple(c.shape) != shape or c.dtype != dtype:
                path = tree.paths(init)[i] or "carry"
                raise TraceError(
                    f"scan: carry {path} comes in as {c.dtype} {tuple(c.shape)} and leaves the body as {dtype} "
                    f"{shape}; it "
                    "keeps its shape and dtype. Cast or reshape it at the end of the body, or before the scan."
                )
        outs = markers.Call.apply(body, length, *carry, *rows, *captured)
        return tree.unflatten(body.out_tree, outs)

    def local_map(self, local: LocalFunction, args: tuple[Any, ...]) -> Any:
        if _torch.inside_functorch():
            markers.no_vmap()
        args = tree.map(self._swap, args)
        leaves, in_tree = tree.flatten(args)
        types = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in leaves if isinstance(t, torch.Tensor))
        specs = (repr(local.in_specs), repr(local.out_specs))
        key = ("local", signed(local.f)[0], local.name, specs, in_tree, types, torch.is_grad_enabled())
        if key not in self._local:
            self._local[key] = (local_body(local, args, self._traced.fake_mode), local.f)
            body = self._local[key][0]
            self._traced.bodies[body.key] = body
        body = self._local[key][0]
        return tree.unflatten(body.out_tree, LocalCall.apply(body, *leaves))

    def _swap(self, value: Any) -> Any:
        for swaps in self._swaps:
            if id(value) in swaps:
                value = swaps[id(value)][1]
        return value

    def _body(
        self,
        f: Callable[..., Any],
        flat: Callable[..., Any],
        tensors: list[torch.Tensor],
        n_carry: int,
        n_xs: int,
        where: Any,
        options: dict[str, Any],
    ) -> tuple[Body, list[torch.Tensor]]:
        """The body of a call and the tensors that this call captures, traced unless a like call was."""
        closure = signed(f)
        types = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        signature = (
            closure[0],
            types,
            where,
            n_carry,
            n_xs,
            options["name"],
            options["remat"],
            torch.is_grad_enabled(),
        )
        known = self._seen.get(signature)
        if known is not None and all(i < len(closure[1]) for i in known[1]):
            return known[0], [self._swap(closure[1][i]) for i in known[1]]
        self._bodies_open += 1
        try:
            body = self._trace_body(flat, tensors, n_carry, n_xs, options)
        finally:
            self._bodies_open -= 1
        places = {id(self._swap(t)): i for i, t in enumerate(closure[1])}
        if all(id(t) in places for t in body.captured):
            self._seen[signature] = (body, [places[id(t)] for t in body.captured], f)
        return body, body.captured

    def _trace_body(
        self,
        flat: Callable[..., Any],
        tensors: list[torch.Tensor],
        n_carry: int,
        n_xs: int,
        options: dict[str, Any],
    ) -> Body:
        needs = [t.requires_grad for t in tensors]
        with _torch.outside_trace(self._traced.fake_mode), torch.set_grad_enabled(torch.is_grad_enabled()):
            while True:
                inputs = [_fresh(t, n) for t, n in zip(tensors, needs, strict=True)]
                with _Finder(inputs) as finder:
                    probe = tree.leaves(flat(*inputs))
                    finder.note(probe)  # what is returned as it is passes through no op
                # A carry that gets a gradient in the body has one from the second step on, so on entry too.
                grown = [n or (i < n_carry and probe[i].requires_grad) for i, n in enumerate(needs)]
                if grown == needs:
                    break
                needs = grown
            captured = list(finder.found.values())
            body = Body(
                f"{options['name']}_{next(_numbers)}",
                options["name"],
                options["remat"],
                len(tensors) + len(captured),
                n_carry,
                n_xs,
                captured=captured,
            )
            self._joint(body, flat, [*tensors, *captured], [*needs, *(t.requires_grad for t in captured)], len(tensors))
        markers.BODIES[body.key] = body
        self._traced.bodies[body.key] = body
        return body

    def _joint(
        self,
        body: Body,
        flat: Callable[..., Any],
        tensors: list[torch.Tensor],
        needs: list[bool],
        n_given: int,
    ) -> None:
        """Trace forward and backward of a body into one graph."""
        inputs = [_fresh(t, n) for t, n in zip(tensors, needs, strict=True)]
        swaps = {id(t): (t, own) for t, own in zip(tensors[n_given:], inputs[n_given:], strict=True)}

        @contextlib.contextmanager
        def own_inputs() -> Iterator[None]:
            self._swaps.append(swaps)
            try:
                with _Substitute(self._swap):
                    yield
            finally:
                self._swaps.pop()

        def forward(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with own_inputs():
                out = flat(*values[:n_given])
            leaves, body.out_tree = tree.flatten(out)
            for path, leaf in zip(tree.paths(out), leaves, strict=True):
                if not isinstance(leaf, torch.Tensor):
                    raise TraceError(
                        f"{body.name}: output {path} is {leaf!r}; the outputs of a region or scan body are tensors."
                    )
            return [self._swap_out(leaf, swaps) for leaf in leaves]

        probe = forward(inputs)
        body.output_types = [(tuple(o.shape), o.dtype) for o in probe]
        body.differentiable = [o.requires_grad or (i < body.n_carry and needs[i]) for i, o in enumerate(probe)]
        wanted = [i for i, n in enumerate(needs) if n]
        tangents = [torch.empty(o.shape, dtype=o.dtype) for o, d in zip(probe, body.differentiable, strict=True) if d]

        def joint(*values: torch.Tensor) -> list[torch.Tensor]:
            given, cotangents = values[: len(tensors)], values[len(tensors) :]
            for own, (key, (original, _)) in zip(given[n_given:], list(swaps.items()), strict=True):
                swaps[key] = (original, own)
            outs = forward(given)
            if not cotangents:
                return outs
            for i in range(body.n_carry):
                if body.differentiable[i] and not outs[i].requires_grad:
                    # A carry that the body cuts off still has a cotangent in the loop: it is zero.
                    never = torch.zeros_like(given[i], dtype=torch.bool)
                    outs[i] = torch.where(never, given[i], outs[i])
            live = [o for o, d in zip(outs, body.differentiable, strict=True) if d]
            found = torch.autograd.grad(live, [given[i] for i in wanted], list(cotangents), allow_unused=True)
            body.gradient_of, gradients = [], []
            for i, g in zip(wanted, found, strict=True):
                if g is None and i < body.n_carry:
                    g = torch.zeros_like(given[i])
                if g is not None:
                    body.gradient_of.append(i)
                    gradients.append(g)
            body.gradient_types = [(tuple(g.shape), g.dtype) for g in gradients]
            return [*outs, *gradients]

        body.graph = make_graph(joint, [*inputs, *tangents], self)

    @staticmethod
    def _swap_out(leaf: torch.Tensor, swaps: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return swaps[id(leaf)][1] if id(leaf) in swaps else leaf


def _kind(value: Any) -> str:
    """What a body returned, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def _fresh(t: torch.Tensor, needs: bool) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).requires_grad_(needs)


def _row(t: torch.Tensor) -> torch.Tensor:
    """A fake of one step's slice of a scanned leaf."""
    return torch.empty(t.shape[1:], dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
