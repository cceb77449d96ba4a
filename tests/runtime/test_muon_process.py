"""Muon on gloo processes equals Muon on one device bit for bit: only matrices move."""

from __future__ import annotations

import pytest

from functitan.runtime.plans import PlanMismatch, compare
from tests.runtime.gloo import run_ranks


@pytest.mark.parametrize(
    "layout,fsdp,tensor,backend",
    [
        ("stacked", 2, 1, "eager"),
        ("stacked", 4, 1, "eager"),
        ("stacked", 2, 1, "inductor"),
        ("owned", 2, 1, "eager"),
        ("owned", 2, 2, "eager"),
        ("owned", 2, 1, "inductor"),
    ],
)
def test_processes_give_the_bits_of_one_device(layout: str, fsdp: int, tensor: int, backend: str) -> None:
    run_ranks(fsdp * tensor, "tests.runtime.ranks_muon", layout, str(fsdp), str(tensor), backend, limit=120.0)


def test_processes_with_other_plans_are_an_error_on_all() -> None:
    out = run_ranks(2, "tests.runtime.ranks_plans", limit=60.0)
    assert all("rank 0 made" in text and "rank 1 made" in text for text in out)


def test_the_error_names_the_ranks() -> None:
    compare(["aa"] * 4, "step")
    with pytest.raises(PlanMismatch, match=r"processes of step do not agree.*ranks 0, 1, 3 made aa; rank 2 made bb"):
        compare(["aa", "aa", "bb", "aa"], "step")
