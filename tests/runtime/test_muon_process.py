"""Muon on gloo processes equals Muon on one device bit for bit: only matrices move."""

from __future__ import annotations

import pytest

from tests.runtime.gloo import run_ranks


@pytest.mark.parametrize("ranks,backend", [(2, "eager"), (4, "eager"), (2, "inductor")])
def test_processes_give_the_bits_of_one_device(ranks: int, backend: str) -> None:
    run_ranks(ranks, "tests.runtime.ranks_muon", str(ranks), backend, limit=120.0)
