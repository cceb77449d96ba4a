"""The words of lowering errors: what was asked, what was found, what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from functitan.compiler import reshard
from functitan.compiler.source import SourceLine, at
from functitan.compiler.values import Value
from functitan.sharding.layout import Layout, dim_text, spec_text
from functitan.sharding.op_rules.base import Call, Solution


def human(nbytes: float) -> str:
    """Bytes for people.

    >>> human(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return ""


def name_of(call: Call) -> str:
    """An op's name without its namespace's noise."""
    return str(call.op).removesuffix(".default")


def shown(v: Value, layout: Layout | None) -> str:
    """A value in a message: parameter path or type, and its spec."""
    dtype = str(v.type.dtype).removeprefix("torch.")
    what = v.param or f"{dtype}{list(v.type.shape)}"
    return f"{what} with spec {layout}" if layout is not None else what


def conflict(
    call: Call,
    operands: Sequence[Value],
    layouts: Sequence[Layout | None],
    solution: Solution,
    sizes: dict[str, int],
    line: SourceLine | None,
    *,
    settled: bool = False,
) -> str:
    """Operands that cannot keep their layouts: what to write, or when it is ``settled``, what becomes of them."""
    rows = [f"{at(line)}{name_of(call)}: " + "; ".join(c.what for c in solution.conflicts) + "."]
    involved = {i for c in solution.conflicts for i in c.operands}
    for i, (v, have, want) in enumerate(zip(operands, layouts, solution.operands, strict=True)):
        if have is None or i not in involved:
            continue
        row = f"    operand {i}: {shown(v, have)}"
        if have.dims != want.dims:
            moved = reshard.cost(reshard.plan(have, want, sizes, v.type.dtype.itemsize))
            row += f"; {'becomes' if settled else 'would become'} {want} ({human(moved)} sent per rank)"
        rows.append(row)
    if settled:
        return "\n".join(rows)
    if solution.advice:
        return "\n".join([*rows, f"    {solution.advice}"])
    changed = [
        (i, want)
        for i, (have, want) in enumerate(zip(layouts, solution.operands, strict=True))
        if have is not None and have.dims != want.dims
    ]
    stored = [i for i, have in enumerate(layouts) if have is not None and have.storage and not have.active]
    if changed and changed[0][0] in stored:
        have = layouts[changed[0][0]]
        assert have is not None
        rows.append(
            f"    Operand {changed[0][0]} is a parameter in storage over {', '.join(sorted(have.storage))}. Write "
            "params = ft.use_params(params) where the function begins: parameters that are not differentiated are "
            "gathered only where they are marked as used."
        )
    elif changed:
        rows.append(
            f"    Write {written(f'operand {changed[0][0]}', changed[0][1])} before this line, or with logical names; "
            'or compile with conflicts="auto".'
        )
    return "\n".join(rows)


def uncut(call: Call, v: Value, layout: Layout, axis: str, gathered: Layout, line: SourceLine | None) -> str:
    """A view that cuts a dim inside a mesh axis."""
    return (
        f"{at(line)}{name_of(call)}: cannot reshape {list(v.type.shape)} to {list(call.outputs[0].shape)} with "
        f"{shown(v, layout)}: "
        f'the split over "{axis}" does not fall on the new dims. Write '
        f"ft.constrain(x, P({', '.join(dim_text(d) for d in gathered.dims)})) before this line, or use sizes whose "
        "leading "
        "part the axis divides."
    )


def no_rule(call: Call, line: SourceLine | None) -> str:
    """An op that the compiler cannot shard, and the line that would register a rule."""
    operands = ",".join("_" * t.ndim for t in call.operands)
    outputs = ",".join("_" * t.ndim for t in call.outputs)
    packet = str(call.op).rsplit(".", 1)[0]
    return (
        f"{at(line)}no sharding rule for {call.op}. If all its dims must be whole, register one with\n"
        f'    ft.sharding.register_rule(torch.ops.{packet}, "{operands}->{outputs}")\n'
        'and use letters for dims that may be split, such as "b_->b_".'
    )


def no_rules(names: Sequence[str | None], line: SourceLine | None) -> str:
    """Logical names in a function that was compiled without rules."""
    return (
        f"{at(line)}constrain names logical axes {tuple(names)}, and the function is compiled without rules. Pass "
        "rules=ft.Rules(...) to ft.compile, or give constrain a PartitionSpec of mesh axes."
    )


def scanned_dim(name: str, v: Value, layout: Layout, line: SourceLine | None) -> str:
    """A scan over a dim that is split."""
    return (
        f"{at(line)}scan of {name}: the scanned dim 0 of {shown(v, layout)} is split; every rank runs all steps. Leave "
        "the "
        "leading dim whole (a rule such as layers=None)."
    )


def carry_layout(name: str, path: str, own: Layout, out: Layout, line: SourceLine | None) -> str:
    """A carry that leaves a scan's body in another layout than it entered."""
    return (
        f"{at(line)}scan of {name}: carry {path} enters with spec {own} and leaves the body with {out}; it keeps its "
        "spec. "
        f"Write {written('carry', own)} at the end of the body, or {written('carry', out)} before the scan."
    )


def written(value: str, layout: Layout) -> str:
    """The constrain that gives a value this layout; for a joined one, which no spec says, the nearest that one does.

    >>> written("x", Layout((("data", 4), (8,))))
    "ft.constrain(x, P('data', None))"
    """
    plain = [dim if all(isinstance(d, str) for d in dim[:-1]) else () for dim in layout.dims]
    return f"ft.constrain({value}, {spec_text([tuple(d for d in dim if isinstance(d, str)) for dim in plain])})"


def irregular_output(path: str, v: Value, layout: Layout) -> str:
    """An output whose layout no spec can say."""
    sizes = ", ".join(f"dim {i}: {dim_text(d)}" for i, d in enumerate(layout.dims))
    return (
        f"output {path} of shape {list(v.type.shape)} has a joined layout ({sizes}) that no spec can say. Return it "
        "before "
        "the reshape that joined the dims, or write ft.constrain on it."
    )
