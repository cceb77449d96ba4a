"""Drawings of who holds what."""

import pytest
import torch

import functitan as ft
from functitan.errors import ArgumentError
from functitan.sharding.visualize import drawing, ranks_text

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_two_dims():
    mesh = ft.make_mesh({"fsdp": 2, "tensor": 2}, simulate=True)
    text = drawing(ft.device_put(torch.zeros(8, 4), ft.P("fsdp", "tensor"), mesh))
    assert text.splitlines() == [
        "[8, 4] as (fsdp, tensor) on fsdp=2, tensor=2; each rank holds [4, 2]",
        "       0:2   2:4  dim 1",
        "     ┌─────┬─────┐",
        " 0:4 │  0  │  1  │",
        "     ├─────┼─────┤",
        " 4:8 │  2  │  3  │",
        "     └─────┴─────┘",
        "dim 0",
    ]


def test_it_is_printed(capsys):
    ft.visualize((4,), ft.P("data"), ft.abstract_mesh({"data": 2}))
    assert "│  0  │  1  │" in capsys.readouterr().out


def test_one_split_dim_of_many_and_several_axes():
    text = drawing((3, 8, 5), ft.P(None, ("tensor", "data"), None), ft.abstract_mesh(MESH))
    # tensor is major: the second part belongs to tensor=0, data=1, on both ranks of fsdp.
    assert "│ 0, 2 │ 4, 6 │ 1, 3 │ 5, 7 │" in text and "dim 1" in text and "dim 0" not in text


def test_a_whole_value_is_one_box():
    assert "│ 0-7 │" in drawing((4, 5), ft.P(None, None), ft.abstract_mesh(MESH))


def test_three_split_dims_are_listed():
    text = drawing((4, 4, 4), ft.P("data", "fsdp", "tensor"), ft.abstract_mesh(MESH))
    assert "  [0:2, 2:4, 0:2]  rank 2" in text.splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_large_meshes_stay_within_the_width(width):
    text = drawing((4096, 4096), ft.P("fsdp", "tensor"), ft.abstract_mesh({"fsdp": 64, "tensor": 32}), width=width)
    lines = text.splitlines()
    assert max(map(len, lines[1:])) <= width + len("  dim 1") and len(lines) < 25 and "..." in text


def test_ranks():
    assert [ranks_text(r) for r in ([3], [0, 4], [0, 1, 2], [1, 3, 5, 7], [0, 1, 2, 4, 5, 6])] == [
        "3",
        "0, 4",
        "0-2",
        "1-7 by 2",
        "0, 1, ... 6",
    ]


def test_errors():
    mesh = ft.make_mesh({"data": 2}, simulate=True)
    with pytest.raises(ArgumentError, match=r"without a spec and a mesh; write ft.visualize"):
        ft.visualize((8, 4))
    with pytest.raises(ArgumentError, match="takes no spec"):
        ft.visualize(ft.device_put(torch.zeros(2), ft.P("data"), mesh), ft.P("data"), mesh)
