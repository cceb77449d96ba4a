"""What a compiled function says of its compilations."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import functitan as ft

MESH = ft.make_mesh({"data": 1})


def test_another_signature_is_logged_with_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "functitan")
    double = ft.compile(lambda batch: batch["x"] * 2, mesh=MESH)
    double({"x": torch.ones(2)})
    double({"x": torch.zeros(2)})
    double({"x": torch.ones(3)})
    double({"x": torch.ones(3, dtype=torch.float64)})
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.WARNING, logging.WARNING]
    changes = [re.sub(r".*changed: ", "", r.getMessage()) for r in caplog.records[1:]]
    assert changes == ["batch/x: float32[2] -> float32[3]", "batch/x: float32[3] -> float64[3]"]
    assert [c.number for c in double.compilations] == [1, 2, 3]
    assert all(c.lowering > 0 and c.graphs == 0 for c in double.compilations)


def test_graphs_that_come_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """The second of two like functions finds what the first compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = []
    for _ in range(2):
        compiled = ft.compile(lambda x: torch.sin(x) + 0.123, mesh=MESH, backend="inductor")
        assert torch.allclose(compiled(torch.ones(5)), torch.sin(torch.ones(5)) + 0.123)
        (made,) = compiled.compilations
        counts.append((made.graphs, made.cached))
        assert made.building > 0
    assert counts == [(1, 0), (1, 1)]
    assert "1 graphs" in str(made) and "1 of them from the cache" in str(made)
