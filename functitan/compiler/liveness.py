"""The walk behind :mod:`functitan.compiler.memory`: which storages are live at each call of a lowered program.

Nothing runs: each value stands for the storage behind it, a view is its operand's storage, and a storage is
freed after the last use of what refers to it. Bodies are walked where they are called; of a scan the first
and the last steps are walked, with the rows of the steps between held as one block, so the time does not grow
with depth.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from functitan.compiler.body_calls import BODY_CALLS, call_body, call_body_backward, scan_body
from functitan.compiler.text import body_names, place_name, target_name

if TYPE_CHECKING:
    from functitan.compiler.program import LoweredBody, Program

#: In the order of reports.
CATEGORIES: tuple[str, ...] = (
    "parameters",
    "optimizer",
    "inputs",
    "gradients",
    "saved activations",
    "gathered parameters",
    "collective buffers",
    "other",
)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def group_of(path: str, groups: Mapping[str, str]) -> str:
    """The category of an input: the group whose prefix its path has, else "inputs"."""
    for name, prefix in groups.items():
        if path == prefix or path.startswith(prefix + "/"):
            return name
    return "inputs"


@dataclass(eq=False)
class Block:
    """A storage: its bytes, what it counts as, and how many hold it."""

    nbytes: int
    category: str
    holders: int = 0


#: What a node's value rests on: one storage, several (rows of a scan), or a list of such for several outputs.
Value = tuple[Block, ...]


class Walk:
    """A walk over a program's graphs.

    Attributes:
        largest, at_peak, peak, where: what it found; see :class:`functitan.compiler.memory.Memory`.
    """

    def __init__(self, program: Program, groups: Mapping[str, str]) -> None:
        self._program = program
        self._groups = groups
        self._names = body_names(program)
        self._live = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._uses: dict[int, dict[fx.Node, list[fx.Node]]] = {}
        self.largest = dict(self._live)
        self.at_peak = dict(self._live)
        self.peak = 0
        self.where = "step"

    # --- storages ---------------------------------------------------------------------------------------

    def new(self, nbytes: int, category: str) -> Block:
        block = Block(nbytes, category)
        self._count(category, nbytes)
        return block

    def _count(self, category: str, nbytes: int) -> None:
        self._live[category] += nbytes
        self._total += nbytes
        self.largest[category] = max(self.largest[category], self._live[category])

    def hold(self, value: Value) -> None:
        for block in value:
            block.holders += 1

    def release(self, value: Value) -> None:
        for block in value:
            block.holders -= 1
            if block.holders == 0:
                self._count(block.category, -block.nbytes)

    def recount(self, block: Block, category: str) -> None:
        """Count a storage as something else from now on, if all that is known of it is how it was made."""
        if block.category in ("other", "collective buffers"):
            self._count(block.category, -block.nbytes)
            block.category = category
            self._count(category, block.nbytes)

    def _note(self, where: str, node: fx.Node) -> None:
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, dict(self._live)
            self.where = f"{place_name(where, self._names)}: {target_name(node.target)}"

    # --- graphs ---------------------------------------------------------------------------------------

    def graph(self, where: str, graph: fx.Graph, inputs: Sequence[Value]) -> list[Value]:
        """Walk a graph; the caller gets its results held once."""
        env: dict[fx.Node, Any] = {}
        given = iter(inputs)
        crossing = _read_by_backward(graph) if where == "step" else set()
        last = self._last_uses(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = () if "coordinate" in node.meta else next(given)
                self._hold_all(env[node])
            elif node.op == "output":
                outs = [env[n] for n in node.args[0]]  # type: ignore[union-attr]
                for value in outs:
                    self.hold(value)
                for value in env.values():
                    self._release_all(value)
                return outs
            else:
                env[node] = self._call(node, env)
                if node in crossing:
                    for block in env[node]:
                        self.recount(block, "saved activations")
                self._note(where, node)
            for dead in last.get(node, ()):
                self._release_all(env.pop(dead))
        raise AssertionError("a graph without an output")

    def _hold_all(self, value: Any) -> None:
        for v in value if isinstance(value, list) else [value]:
            self.hold(v)

    def _release_all(self, value: Any) -> None:
        for v in value if isinstance(value, list) else [value]:
            self.release(v)

    def _last_uses(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        known = self._uses.get(id(graph))
        if known is None:
            known, seen = {}, set()
            for node in reversed(graph.nodes):
                if node.op == "output":
                    seen.update(node.all_input_nodes)
                    continue
                if node not in seen:  # nothing reads it
                    known.setdefault(node, []).append(node)
                for used in node.all_input_nodes:
                    if used not in seen:
                        seen.add(used)
                        known.setdefault(node, []).append(used)
            self._uses[id(graph)] = known
        return known

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """The storages of a node's value, held once by the graph's environment."""
        if node.target in BODY_CALLS:
            return self._body(node, env)
        if node.target is operator.getitem and isinstance(env[node.all_input_nodes[0]], list):
            value = env[node.all_input_nodes[0]][node.args[1]]
            self.hold(value)
            self._mark(node, value)
            return value
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return self._tensor(node, val, env)
        made = [(self.new(_storage_bytes(v), "other"),) for v in val if isinstance(v, torch.Tensor)]
        for value in made:
            self.hold(value)
        return made

    def _tensor(self, node: fx.Node, val: torch.Tensor, env: dict[fx.Node, Any]) -> Value:
        value: Value | None = None
        for used in node.all_input_nodes:
            theirs = used.meta.get("val")
            same = isinstance(theirs, torch.Tensor) and _storage(theirs) == _storage(val)
            if node.target is _WAIT or same:
                value = env[used]
                break
        if value is None:
            value = (self.new(_storage_bytes(val), _category(node)),)
        self.hold(value)
        self._mark(node, value)
        return value

    def _mark(self, node: fx.Node, value: Value) -> None:
        """Count a value as the gradient of a parameter if it is one."""
        if self._is_gradient(node):
            for block in value:
                self.recount(block, "gradients")

    def _is_gradient(self, node: fx.Node) -> bool:
        return group_of(node.meta.get("gradient", ""), self._groups) == "parameters"

    # --- bodies ---------------------------------------------------------------------------------------

    def _body(self, node: fx.Node, env: dict[fx.Node, Any]) -> list[Value]:
        body: LoweredBody = self._program.bodies[str(node.args[0])]
        groups: list[list[Value]] = [
            [env[n] for n in a]  # type: ignore[index]
            for a in node.args
            if isinstance(a, list | tuple)
        ]
        if node.target is call_body:
            outs = self.graph(body.name, body.forward, groups[0])
            self._as_saved(outs[len(body.out_layouts) :])
            return outs
        if node.target is call_body_backward:
            assert body.backward is not None
            return self.graph(f"{body.name}.backward", body.backward, [*groups[0], *groups[1], *groups[2]])
        length = int(node.args[1])  # type: ignore[arg-type]
        if node.target is scan_body:
            return self._scan(body, length, groups[0], node.meta["val"])
        kept, saved, cotangents = groups
        # A result is known to be a parameter's gradient by what takes it out of the list of results.
        gradients = {int(u.args[1]) for u in node.users if self._is_gradient(u)}  # type: ignore[arg-type]
        return self._scan_backward(body, length, kept, saved, cotangents, node.meta["val"], gradients)

    def _as_saved(self, values: Sequence[Value]) -> None:
        for value in values:
            for block in value:
                self.recount(block, "saved activations")

    def _scan(self, body: LoweredBody, length: int, inputs: list[Value], vals: Any) -> list[Value]:
        first, n_outs = body.n_carry, len(body.out_layouts)
        carry, fixed = inputs[:first], inputs[first:]
        outer = {b for v in fixed for b in v}
        stacks: list[Value] = [(self.new(_storage_bytes(v), "other"),) for v in vals[first:n_outs]]
        for stack in stacks:
            self.hold(stack)
        for value in carry:
            self.hold(value)
        rows: list[list[Value]] = []  # per walked step, what it saves
        started: list[list[Value]] = []
        for step in range(min(length, 2)):
            if step == 1:
                rows.append(self._rows_between(rows[0], outer, length - 2))
            self._start(body, ".starts", body.forward_starts, fixed, started, length - step)
            now = started.pop(0) if started else []
            outs = self.graph(body.name, body.forward, [*carry, *fixed, *now])
            for value in now:
                self.release(value)
            for value in [*carry, *outs[first:n_outs]]:
                self.release(value)
            carry = outs[:first]
            rows.append(outs[n_outs:])
            self._as_saved(outs[n_outs:])
        for value in (v for step in started for v in step):
            self.release(value)
        saved = [tuple(b for step in column for b in step) for column in zip(*rows, strict=True)]
        return [*carry, *stacks, *saved]

    def _start(
        self,
        body: LoweredBody,
        stage: str,
        graph: fx.Graph | None,
        inputs: Sequence[Value],
        started: list[list[Value]],
        left: int,
    ) -> None:
        """Walk what starts collectives until so many steps ahead are under way, or all that are left."""
        while graph is not None and len(started) < min(body.ahead + 1, left):
            started.append(self.graph(body.name + stage, graph, inputs))

    def _rows_between(self, one: list[Value], outer: set[Block], times: int) -> list[Value]:
        """The rows of so many more steps like one: storages shared within a step are shared here."""
        copies: dict[Block, Block] = {}
        values = []
        for value in one:
            blocks = []
            for block in value:
                if block in outer:
                    blocks.append(block)
                    continue
                if block not in copies:
                    gathered = block.category == "gathered parameters"
                    copies[block] = self.new(block.nbytes * times, block.category if gathered else "saved activations")
                blocks.append(copies[block])
            values.append(tuple(blocks))
            self.hold(values[-1])
        return values

    def _scan_backward(
        self,
        body: LoweredBody,
        length: int,
        kept: list[Value],
        saved: list[Value],
        cotangents: list[Value],
        vals: Sequence[torch.Tensor],
        gradients: set[int],
    ) -> list[Value]:
        assert body.backward is not None
        first = body.n_carry
        carried = {o: k for k, o in enumerate(body.tangent_of) if o < first}
        current = list(cotangents)
        for value in current:
            self.hold(value)
        # Gradients of rows and constants are written in place, step by step.
        totals: dict[int, Value] = {}
        for k, (i, val) in enumerate(zip(body.gradient_of, vals, strict=True)):
            if i >= first:
                totals[i] = (self.new(_storage_bytes(val), "gradients" if k in gradients else "other"),)
                self.hold(totals[i])
        own = [i for i in body.gradient_of if i < first]
        started: list[list[Value]] = []
        unfinished: list[list[Value]] = [[] for _ in body.backward_finish]
        for step in range(min(length, max(2, 1 + len(unfinished)))):
            self._start(body, ".starts.backward", body.backward_starts, kept, started, length - step)
            now = started.pop(0) if started else []
            found = self.graph(f"{body.name}.backward", body.backward, [*kept, *saved, *current, *now])
            for value in now:
                self.release(value)
            for i, value in zip(own, found, strict=False):
                self.release(current[carried[i]])
                current[carried[i]] = value
            self._finish(body, unfinished, found[len(own) :])
        for _ in unfinished:
            self._finish(body, unfinished, [])
        for value in (v for step in started for v in step):
            self.release(value)
        results = [current[carried[i]] if i < first else totals[i] for i in body.gradient_of]
        for i in body.gradient_of:
            if i < first:
                self.hold(current[carried[i]])
        for value in current:
            self.release(value)
        return results

    def _finish(self, body: LoweredBody, unfinished: list[list[Value]], found: list[Value]) -> None:
        """Walk what finishes the gradients of steps before, the last graph first, and hand it those of this step."""
        for k in reversed(range(len(unfinished))):
            given, unfinished[k] = unfinished[k], []
            if not given:
                continue
            done = self.graph(body.finish_names[k], body.backward_finish[k], given)
            for value in given:
                self.release(value)
            if k + 1 < len(unfinished):
                unfinished[k + 1] = done
            else:
                for value in done:
                    self.release(value)
        if unfinished:
            unfinished[0] = found
        else:
            for value in found:
                self.release(value)


def _read_by_backward(graph: fx.Graph) -> set[fx.Node]:
    """Forward values of the step itself that backward reads."""

    def late(node: fx.Node) -> bool:
        origin = node.meta.get("origin")
        return origin is not None and origin.backward

    return {
        n
        for n in graph.nodes
        if n.op == "call_function"
        and isinstance(n.meta.get("val"), torch.Tensor)
        and not late(n)
        and any(map(late, n.users))
    }


def _category(node: fx.Node) -> str:
    """What a new storage counts as."""
    origin = node.meta.get("origin")
    if origin is not None and origin.gather and "collective" in node.meta:
        return "gathered parameters"
    if "collective" in node.meta:
        return "collective buffers"
    if node.users and all("collective" in user.meta for user in node.users):
        return "collective buffers"  # a copy made to be sent
    if origin is not None and origin.gather:
        return "gathered parameters"
    return "other"


def _storage(val: torch.Tensor) -> int:
    return val.untyped_storage()._cdata


def _storage_bytes(val: torch.Tensor) -> int:
    return val.untyped_storage().nbytes()
