"""One rank of a job: steps of Muon on given gradients, against the same on one device.

Arguments: the layout, the sizes of the fsdp and the tensor axis, and the backend.
"""

from __future__ import annotations

import sys

import torch

import functitan as ft
from functitan import tree
from tests.optim import owned, stacked


def main(layout: str, fsdp: int, tensor: int, backend: str) -> None:
    torch.set_num_threads(1)
    axes = ("fsdp", "tensor") if tensor > 1 else ("fsdp",)
    mesh = ft.make_mesh({"fsdp": fsdp, "tensor": tensor})
    # Rounded as torch rounds: Inductor may contract a multiply and an add in float32, not these.
    if layout == "stacked":
        rule = stacked.stacked(axes, as_torch=True)
        found, expected = stacked.run_on(rule, mesh, backend=backend), stacked.run_plain(rule)
    else:
        rule = owned.owned(axes, as_torch=True, bucket_bytes=3000)
        specs = owned.TENSOR if tensor > 1 else owned.SPECS
        found, expected = owned.run_on(rule, mesh, specs, backend=backend), owned.run_plain(rule)
    for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
