"""Runs the passes on a lowered Program in a fixed order, and records what each changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from functitan.compiler.passes.bucket import bucket
from functitan.compiler.passes.common_subexpressions import common_subexpressions
from functitan.compiler.passes.join_reductions import join_reductions
from functitan.compiler.passes.prefetch import prefetch
from functitan.compiler.passes.record import Counts, PassRecord
from functitan.compiler.passes.settings import Passes
from functitan.compiler.program import Program

#: A pass: the changed program and a sentence for each change. The program that is given stays as it is.
Run = Callable[[Program, Passes], tuple[Program, list[str]]]


@dataclass(frozen=True)
class Pass:
    """A pass of the pipeline.

    Attributes:
        name: shown, and the setting that it belongs to.
        run: the pass.
        on: whether the settings ask for it.
    """

    name: str
    run: Run
    on: Callable[[Passes], bool]


#: In the order in which they run; a step's graph and its bodies see the same passes on every backend.
PIPELINE: tuple[Pass, ...] = (
    Pass("common_subexpressions", common_subexpressions, lambda s: s.common_subexpressions),
    Pass("bucket", bucket, lambda s: s.bucket_bytes > 0),
    Pass("join_reductions", join_reductions, lambda s: s.join_bytes > 0),
    Pass("prefetch", prefetch, lambda s: s.prefetch > 0),
)


def run_passes(program: Program, settings: Passes, pipeline: Sequence[Pass] = PIPELINE) -> Program:
    """The program after all passes that the settings ask for, with a record of each in ``program.passes``.

    Args:
        program: as it was lowered; it stays as it is.
        settings: which passes run, and how.
        pipeline: the passes in order.
    """
    records = list(program.passes)
    counts = Counts.of(program)
    for step in pipeline:
        before, changes = counts, []
        if step.on(settings):
            program, changes = step.run(program, settings)
            counts = Counts.of(program) if changes else counts
        records.append(PassRecord(step.name, step.on(settings), before, counts, tuple(changes)))
    return replace(program, passes=tuple(records))
