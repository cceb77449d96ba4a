"""One rank of a job: steps of Muon in its stacked layout on given gradients, against the same on one device.

Arguments: the size of the fsdp axis, and the backend.
"""

from __future__ import annotations

import sys

import torch

import functitan as ft
from functitan import tree
from tests.optim.stacked import run_on, run_plain, stacked


def main(ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    # Rounded as torch rounds: Inductor may contract a multiply and an add in float32, not these.
    rule = stacked(as_torch=True)
    found, expected = run_on(rule, ft.make_mesh({"fsdp": ranks}), backend=backend), run_plain(rule)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
