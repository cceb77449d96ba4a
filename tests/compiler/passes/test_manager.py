"""The manager runs passes in order on copies, and records what each changed."""

import torch

import functitan as ft
from functitan.compiler.passes import Counts, Passes, passes_text, run_passes
from functitan.compiler.passes.manager import Pass
from functitan.compiler.passes.rewrite import each_graph

aten = torch.ops.aten


def lowered():
    mesh = ft.make_mesh({"data": 2}, simulate=True)
    body = ft.region(lambda x: (x * 2).neg(), name="twice")
    x = ft.device_put(torch.arange(4.0), ft.P("data"), mesh)
    return ft.compile(lambda x: body(x).neg().sum(), mesh=mesh, passes=Passes.off()).lower(x)


def drop_neg(program, settings):
    """neg(x) -> x, of one graph or the other."""

    def change(where, graph):
        found = [n for n in graph.nodes if n.target is aten.neg.default]
        for node in found:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        return [f"{where}: dropped neg" for n in found]

    return each_graph(program, change)


def test_a_pass_changes_a_copy_and_is_recorded():
    program = lowered()
    text = program.text()
    pipeline = [Pass("drop", drop_neg, lambda s: True), Pass("again", drop_neg, lambda s: True)]
    after = run_passes(program, Passes.off(), pipeline)
    assert program.text() == text and text.count("neg(") == 2 and after.text().count("neg(") == 0
    drop, again = after.passes[-2:]
    assert (drop.before, drop.after) == (Counts.of(program), Counts.of(after))
    assert (drop.before.nodes, drop.after.nodes) == (program.nodes(), program.nodes() - 2)
    (body,) = program.bodies
    assert drop.changes == ("step: dropped neg", "twice: dropped neg")
    assert again.on and again.changes == () and again.before == again.after == drop.after
    assert after.graph is not program.graph and after.bodies[body].forward is not program.bodies[body].forward


def test_what_a_pass_leaves_is_not_copied():
    program = lowered()
    same, changes = each_graph(program, lambda where, graph: [])
    assert changes == [] and same.graph is program.graph


def test_a_pass_that_is_off_does_nothing_and_says_so():
    program = lowered()
    after = run_passes(program, Passes.off(), [Pass("drop", drop_neg, lambda s: False)])
    assert after.text() == program.text()
    record = after.passes[-1]
    assert not record.on and record.before == record.after
    assert passes_text([record], 80).splitlines()[1].split() == ["drop", "off"]
