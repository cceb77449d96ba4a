"""One rank of a job: steps of Muon in its stacked layout on given gradients, against the same on one device.

Argument: the size of the fsdp axis.
"""

from __future__ import annotations

import sys

import torch

import functitan as ft
from functitan import tree
from tests.optim.stacked import run_on, run_plain, stacked


def main(ranks: int) -> None:
    torch.set_num_threads(1)
    rule = stacked()
    found, expected = run_on(rule, ft.make_mesh({"fsdp": ranks})), run_plain(rule)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
