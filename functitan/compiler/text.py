"""A lowered program as text: one line per value, with its local type, layout, op, and where it comes from.

The text is the same on every rank, and in every process that lowers the same function: coordinates are
inputs, and bodies are numbered within the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from functitan.columns import human_bytes
from functitan.compiler.body_calls import BODY_CALLS, call_body_backward, scan_body, scan_body_backward
from functitan.compiler.collectives import short_dtype
from functitan.errors import ArgumentError, listed, suggest

if TYPE_CHECKING:
    from functitan.compiler.program import Program


def body_names(program: Program) -> dict[str, str]:
    """Names of bodies for people: the label, numbered where a program has several of one label."""
    labels = [b.label for b in program.bodies.values()]
    seen: dict[str, int] = {}
    names = {}
    for key, body in program.bodies.items():
        seen[body.label] = seen.get(body.label, 0) + 1
        again = labels.count(body.label) > 1
        names[key] = f"{body.label}#{seen[body.label]}" if again else body.label
    return names


def place_name(where: str, names: dict[str, str]) -> str:
    """How people read the name of a graph of :meth:`Program.graphs`.

    >>> place_name("block.0.starts.backward", {"block.0": "block"}), place_name("step", {})
    ('block backward starts', 'step')
    """
    body, late = (where.removesuffix(".backward"), " backward") if where.endswith(".backward") else (where, "")
    head, _, stage = body.rpartition(".")
    if stage.startswith(("starts", "finish")) and head in names:
        body, late = head, f"{late} {stage}"
    return names.get(body, body) + late


def program_text(program: Program, body: str | None = None) -> str:
    """The lowered code.

    Args:
        program: what to show.
        body: "step", or the name of a body: its forward and backward. None for everything.

    Raises:
        ArgumentError: the program has no such body.
    """
    names = body_names(program)
    if body is not None and body != "step" and body not in names.values():
        known = ["step", *names.values()]
        raise ArgumentError(f'there is no body "{body}"; there are {listed(known)}.{suggest(body, known)}')
    parts = []
    for where, graph in program.graphs():
        title = place_name(where, names)
        if body is None or body == title or title.startswith(f"{body} "):
            parts.append("\n".join([f"{title}:", *_lines(graph, names)]))
    return "\n\n".join(parts)


def _lines(graph: fx.Graph, bodies: dict[str, str]) -> Iterator[str]:
    values = _value_names(graph)
    for node in graph.nodes:
        if node.op == "output":
            yield "    return " + ", ".join(_argument(a, values) for a in node.args[0])
            continue
        left = f"%{values[node]}: {type_text(node.meta.get('val'))}"
        layout = node.meta.get("layout")
        if layout is not None:
            left += f" {layout}"
        # What is sent stands out: these lines are what a reader of a sharding looks for.
        mark = ">>> " if "collective" in node.meta else "    "
        right = "input" if node.op == "placeholder" else _call(node, bodies, values)
        yield f"{mark}{left} = {right}{_comment(node)}"


def _value_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Short names: the op, numbered from the second on."""
    seen: dict[str, int] = {}
    names = {}
    for node in graph.nodes:
        base = node.name
        if node.op != "placeholder":
            move = node.meta.get("collective")
            base = move.kind if move is not None else target_name(node.target).split(".")[0].removesuffix("_tensor")
        seen[base] = seen.get(base, 0) + 1
        names[node] = base if seen[base] == 1 else f"{base}_{seen[base]}"
    return names


def type_text(val: Any) -> str:
    """A value's local type.

    >>> type_text(torch.empty(2, 3)), type_text([torch.empty(1), torch.empty(())])
    ('f32[2,3]', '(f32[1], f32[])')
    """
    if isinstance(val, torch.Tensor):
        return f"{short_dtype(str(val.dtype).removeprefix('torch.'))}[{','.join(str(n) for n in val.shape)}]"
    if isinstance(val, list | tuple):
        return "(" + ", ".join(type_text(v) for v in val) + ")"
    return type(val).__name__


def _call(node: fx.Node, bodies: dict[str, str], values: dict[fx.Node, str]) -> str:
    move = node.meta.get("collective")
    if move is not None:
        return f"{move.kind}({_argument(node.args[0], values)}) over {'+'.join(move.axes)}"
    if node.target in BODY_CALLS:
        name, *rest = node.args
        late = " backward" if node.target in (call_body_backward, scan_body_backward) else ""
        times = f" x {rest.pop(0)}" if node.target in (scan_body, scan_body_backward) else ""
        given = ", ".join(_argument(a, values) for a in rest)
        return f"{bodies.get(str(name), str(name))}{late}{times}({given})"
    arguments = [_argument(a, values) for a in node.args]
    arguments += [f"{k}={_argument(v, values)}" for k, v in node.kwargs.items()]
    return f"{target_name(node.target)}({', '.join(arguments)})"


def target_name(target: Any) -> str:
    """An op's name without what is the same for all.

    >>> target_name(torch.ops.aten.mm.default)
    'mm'
    >>> target_name(torch.ops.aten.add.Scalar)
    'add.Scalar'
    """
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    for prefix in ("aten.", "_c10d_functional."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".default").removesuffix(".Tensor")


def _argument(value: Any, values: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return f"%{values[value]}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(v, values) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return short_dtype(str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format | torch.layout | torch.device):
        return str(value).removeprefix("torch.")
    return repr(value)


def _comment(node: fx.Node) -> str:
    origin, move = node.meta.get("origin"), node.meta.get("collective")
    if origin is None:
        return ""
    parts = []
    if move is not None:
        parts.append(f"{human_bytes(move.nbytes)} sent")
        parts += [text for text in (origin.param, origin.why) if text]
    if origin.line is not None:
        parts.append(str(origin.line) + (" (gradient)" if origin.backward else ""))
    return f"  # {', '.join(parts)}" if parts else ""
