"""Arrays of parts that ranks already hold."""

import pytest
import torch

import functitan as ft
from functitan.errors import ShardingError

MESH = ft.make_mesh({"data": 2, "tensor": 2}, simulate=True)


def test_parts_are_taken_as_they_are():
    parts = [torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), torch.tensor([[4, 5]]), torch.tensor([[6, 7]])]
    x = ft.array_from_process_local(parts, ft.P("data", "tensor"), MESH)
    assert x.shape == (2, 4) and x.spec == ft.P("data", "tensor")
    assert torch.equal(x.full(), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]))
    assert all(a is b for a, b in zip(x.shards, parts, strict=True))


def test_a_batch_split_over_two_axes_feeds_a_compiled_function():
    rows = torch.arange(8.0).reshape(4, 2)
    x = ft.array_from_process_local(list(rows.split(1)), ft.P(("data", "tensor"), None), MESH)
    total = ft.compile(lambda x: x.sum(), mesh=MESH)(x)
    assert torch.equal(total, rows.sum())


def test_one_process():
    x = ft.array_from_process_local(torch.ones(3), ft.P("data"), ft.make_mesh({"data": 1}))
    assert x.shape == (3,) and torch.equal(x.full(), torch.ones(3))


@pytest.mark.parametrize(
    "parts,spec,message",
    [
        ([torch.ones(2)] * 3, ft.P("data"), "given 3 parts .* a list with the parts of its 4 ranks"),
        ([torch.ones(2)] * 3 + [torch.ones(1)], ft.P("data"), r"rank 3 has torch.float32 \(1,\) and rank 0"),
        ([torch.ones(2)] * 3 + [torch.ones(2).int()], ft.P("data"), "rank 3 has torch.int32"),
        ([torch.ones(2)] * 4, ft.P("data", None), "has 2 entries, the parts have 1 dims"),
        ([torch.ones(2)] * 4, ft.P("dta"), 'unknown mesh axis "dta"'),
    ],
)
def test_errors(parts, spec, message):
    with pytest.raises(ShardingError, match=message):
        ft.array_from_process_local(parts, spec, MESH)


def test_an_abstract_mesh_holds_nothing():
    with pytest.raises(ShardingError, match="it takes nothing"):
        ft.array_from_process_local([torch.ones(2)], ft.P("data"), ft.abstract_mesh({"data": 2}))


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        (
            ft.make_mesh({"a": 2}, simulate=True),
            r"a=2 \(simulated\) has no DeviceMesh.*Start 2 processes with torchrun",
        ),
        (ft.abstract_mesh({"a": 2}), r"a=2 \(abstract\) has no DeviceMesh"),
        (ft.make_mesh({"a": 1}), "has one rank, and no process group"),
    ],
    ids=["simulated", "abstract", "one rank"],
)
def test_only_processes_have_a_device_mesh(mesh: ft.Mesh, found: str) -> None:
    with pytest.raises(ShardingError, match=found):
        _ = mesh.device_mesh
