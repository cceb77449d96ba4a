"""Passes: what is done to a lowered Program before it runs, graph to graph, each one switchable."""

from functitan.compiler.passes.manager import run_passes
from functitan.compiler.passes.record import Counts, PassRecord, passes_text
from functitan.compiler.passes.settings import DEFAULT_PASSES, Passes

__all__ = ["DEFAULT_PASSES", "Counts", "PassRecord", "Passes", "passes_text", "run_passes"]
