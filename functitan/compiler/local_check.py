"""The type check of a shard_map body: spmd_types' checker on fake local tensors, once per shapes and mesh.

Its errors, and types that an output's spec does not allow, are told with the user's line, axis names and what to write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from spmd_types.runtime import assert_type
from spmd_types.types import I, P, R, SpmdTypeError, V

from functitan import _spmd, _torch
from functitan.compiler import source
from functitan.compiler.local import LocalBody, activate_body
from functitan.errors import FunctitanError, ShardingError, raise_batch
from functitan.sharding.layout import spec_text
from functitan.sharding.mesh import Mesh
from functitan.sharding.shard_map import Boundary, unnamed

_UNKNOWN = re.compile(r"Axis '([\w+]+)' is not in the current mesh|No mesh axis named '([\w+]+)'")
_WORDS: dict[Any, str] = {R: "R", I: "I", V: "V", P: "P"}


def check_types(
    body: LocalBody,
    shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    mode: _torch.FakeTensorMode,
    line: source.SourceLine | None,
) -> None:
    """Run a body under spmd_types' checker.

    Raises:
        ShardingError: an op on types that do not mix, or an output that is not what out_specs says.
    """
    axes = body.axes(mesh)
    live = [a for a, n in axes if n > 1]
    if not live:
        return  # every type is right on one device
    with mode:
        # What gets a gradient is part of the check: I and V mix only where no gradient reaches the I.
        values = [
            torch.empty(tuple(s), dtype=d).requires_grad_(n)
            for s, d, n in zip(shapes, body.input_dtypes, body.needs, strict=True)
        ]
        coordinates = {a: torch.empty((), dtype=torch.int64) for a in live}
    # The checker's mode must not see an active fake mode; ops on fake tensors find theirs by themselves.
    with _spmd.groups(axes), torch.enable_grad(), _spmd.typecheck(), activate_body(body, axes, coordinates):
        for x, bound in zip(values, body.inputs, strict=True):
            assert_type(x, {a: _input_type(bound, a) for a in live})
        for axis, x in coordinates.items():
            assert_type(x, {a: V if a == axis else R for a in live})
        try:
            with _torch.quiet_fake_tensors():
                outs = body.flat(*values)
        except FunctitanError:
            raise
        except Exception as e:
            raise ShardingError(_refused(body, e, mesh, line)) from None
        problems = [
            text
            for path, out, bound in zip(body.paths, outs, body.outputs, strict=True)
            for axis in live
            if (text := _output(body, path, out, bound, axis, line))
        ]
    raise_batch(ShardingError, problems, f"the outputs of shard_map({body.name})")


def _input_type(bound: Boundary, axis: str) -> Any:
    return V if axis in bound.axes else dict(bound.types).get(axis, R)


def _refused(body: LocalBody, e: Exception, mesh: Mesh, line: source.SourceLine | None) -> str:
    where = source.at(source.line_of(e.__traceback__) or line)
    unknown = _UNKNOWN.search(str(e))
    if unknown:
        return where + _unknown_axis(body, unknown[1] or unknown[2], mesh)
    said = str(e).strip() or type(e).__name__
    if isinstance(e, SpmdTypeError):
        hint = (
            "\nA tensor that the body closes over has no type; pass it as an argument."
            if "missing axis" in said
            else ""
        )
        return f"{where}shard_map({body.name}): spmd_types refuses this line: {said}{hint}"
    return (
        f"{where}shard_map({body.name}): this line cannot run on local shapes: {said}. Write sizes that depend on the mesh "
        "by ft.axis_size(axis)."
    )


def _unknown_axis(body: LocalBody, name: str, mesh: Mesh) -> str:
    """What is wrong with the axes that a collective names."""
    parts, known = name.split(_spmd.JOIN), [a for a, _ in body.axes(mesh)]
    for part in parts:
        try:
            mesh.require(part, f"a collective of the shard_map body {body.name}")
        except ShardingError as said:
            return str(said)
        if part not in known:
            return unnamed(body.name, part, known)
    if len(set(parts)) < len(parts):
        return f'the shard_map body {body.name} names an axis of "{name}" twice. Name each once.'
    ordered = _spmd.JOIN.join(a for a in known if a in parts)
    return (
        f'the shard_map body {body.name} takes axes together as "{name}", and the order of the mesh is "{ordered}": parts '
        f'are numbered major to minor. Write "{ordered}".'
    )


def _output(
    body: LocalBody, path: str, out: torch.Tensor, bound: Boundary, axis: str, line: source.SourceLine | None
) -> str:
    """What is wrong with an output over one axis, or an empty text."""
    found = _spmd.type_of(out, axis)
    declared = dict(bound.types).get(axis)
    spec = spec_text(list(bound.spec(out.ndim)))  # type: ignore[arg-type]
    name = f"{source.at(line)}shard_map({body.name}): output {path or 'value'} with out_specs {spec}"
    if axis in bound.axes:
        if found is V:
            return ""
        dim = next(i for i, e in enumerate(bound.entries or ()) if axis in ((e,) if isinstance(e, str) else e or ()))
        if found is P:
            how = f'spmd.reduce_scatter(y, "{axis}", src=spmd.P, dst=spmd.S({dim}))'
            return f'{name}: over "{axis}" it is a pending sum (P), and the spec splits dim {dim} over it. Write {how}.'
        how = (
            f'spmd.convert(y, "{axis}", src=spmd.{_WORDS[found]}, dst=spmd.S({dim}))'
            if found in (R, I)
            else "a collective"
        )
        return (
            f'{name}: over "{axis}" it is {_WORDS.get(found, "untyped")}, the same on all ranks, and the spec splits dim '
            f'{dim} over it. Write {how}, or leave "{axis}" out of the spec.'
        )
    if declared is P:
        if found in (P, V):
            return ""
        return (
            f'{name}: over "{axis}" out_specs says a pending sum (P), and it is {_WORDS.get(found, "untyped")}: the sum over '
            f'ranks would count it once per rank. Write spmd.convert(y, "{axis}", src=spmd.R, dst=spmd.P), or leave P out.'
        )
    if found is I:
        return ""
    if found is R:
        return (
            f'{name}: over "{axis}" it is R, whose gradient is a pending sum; an axis that out_specs does not mention must '
            f'be I, or its gradient would be counted once per rank. Write dst=spmd.I in the collective over "{axis}" that '
            f'makes it (such as spmd.all_reduce(y, "{axis}", src=spmd.P, dst=spmd.I)). A value that only comes from inputs '
            f'that are R over "{axis}" is computed outside shard_map, or from inputs that in_specs gives as '
            f'spmd.SpmdType({{"{axis}": spmd.I}}, ...).'
        )
    if found is P:
        return (
            f'{name}: over "{axis}" it is a pending sum (P). Add it up with spmd.all_reduce(y, "{axis}", src=spmd.P, '
            f'dst=spmd.I), or keep it pending with out_specs spmd.SpmdType({{"{axis}": spmd.P}}, {spec}).'
        )
    return (
        f'{name}: over "{axis}" it differs between ranks (V), and out_specs claims that it is the same on all: a reduction '
        f'over "{axis}" is missing. Write spmd.all_reduce(y, "{axis}", src=spmd.V, dst=spmd.I) if it is a part of a sum, '
        f'spmd.all_gather(y, "{axis}", src=spmd.S(dim), dst=spmd.I) if it is a part of a dim, or name "{axis}" on a dim of '
        "the spec."
    )
