"""Memory by liveness: exact for what formulas know, and against the storages of a real run."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functitan as ft
from functitan import tree
from functitan.compiler.memory import default_groups
from functitan.runtime.lockstep import Lockstep
from tests.compiler.mlp import D, F, L, Sizes, lowered

MESHES = [dict(fsdp=4), dict(tensor=2), dict(fsdp=2, tensor=2), dict(data=2, fsdp=2, tensor=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("remat", [None, ft.nothing_saveable], ids=str)
def test_bytes_from_formulas(axes, remat):
    sizes = Sizes(**{"data": 1, "fsdp": 1, "tensor": 1} | axes)
    memory = lowered(**axes, remat=remat).memory()
    scalars = 8 + 3 * 4  # the step; the rates of learning and decay, and the norm
    assert memory["parameters"] == sizes.params
    assert memory["optimizer"] == 2 * sizes.params + scalars
    assert memory["gradients"] == sizes.params
    assert memory["inputs"] == sizes.stream
    # One layer's parameters at a time: in backward both matrices, and a copy where a minor dim was gathered.
    gathered = 4 * D * F // sizes.tensor if sizes.fsdp > 1 else 0
    assert gathered <= memory["gathered parameters"] <= 3 * gathered
    if remat is not None:
        # The stream that enters each layer but the first (the input), and the one that leaves the last.
        assert memory["saved activations"] == L * sizes.stream
    assert memory.peak == sum(memory.at_peak.values())
    assert all(memory.at_peak[c] <= memory.largest[c] for c in memory.largest)


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive."""

    def __init__(self, given):
        super().__init__()
        self.known, self.now, self.peak = set(), 0, 0
        for t in given:
            self.note(t)

    def note(self, t):
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key, nbytes)

    def gone(self, key, nbytes):
        self.known.discard(key)
        self.now -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor):
                self.note(t)
        return out


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("remat", [None, ft.nothing_saveable, ft.dots_saveable], ids=str)
def test_peak_is_what_a_run_holds(axes, remat):
    program, _, args = lowered(**axes, remat=remat, donate=None, simulate=True)
    ranks = program.mesh.size
    # A whole value is one tensor for all simulated ranks; here each has its own.
    columns = [[t.clone() for t in (x.shards if isinstance(x, ft.Array) else [x] * ranks)] for x in tree.leaves(args)]
    runner = Lockstep(program.mesh, program.bodies)
    with Live([t for column in columns for t in column]) as live:
        runner.graph("step", program.graph, columns)
    assert live.peak / ranks == pytest.approx(program.memory().peak, rel=0.1)


def test_donated_state_is_not_held_twice():
    given, kept = lowered(fsdp=4, donate=0), lowered(fsdp=4, donate=None)
    assert given.donated and not kept.donated
    assert given.memory().peak <= kept.memory().peak


def test_depth_adds_rows_only():
    """A scan is walked twice, whatever its length."""
    program = lowered(fsdp=2, remat=ft.nothing_saveable)
    (call,) = [n for n in program.graph.nodes if n.meta.get("body") and "backward" not in n.target.__name__]
    memory = program.memory()
    assert call.args[1] == L
    sizes = Sizes(1, 2, 1)
    assert memory["saved activations"] == L * sizes.stream


def test_groups_are_prefixes_of_paths():
    assert default_groups(["params/w", "x"]) == {"parameters": "params"}
    program = lowered(fsdp=2)
    own = program.memory({"parameters": "state/params/up"})
    assert own["parameters"] == program.memory()["parameters"] // 2 and own["optimizer"] == 0


def test_the_table_names_the_peak():
    text = str(lowered(fsdp=2).memory())
    assert text.splitlines()[0].split() == ["memory", "per", "rank", "at", "most", "at", "the", "peak"]
    assert "saved activations" in text and "at " in text.splitlines()[-1]
