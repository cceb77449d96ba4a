"""One rank of a job: steps of Muon on given gradients, against the same on one device; stacked and op by op, also with
its momentum in 8 bits, and in bfloat16 rounded at random.

Arguments: the layout, the sizes of the fsdp and the tensor axis, and the backend.
"""

from __future__ import annotations

import sys

import torch
from spmd_types.types import PartitionSpec as P

import functitan as ft
from functitan import optim, tree
from tests.optim import owned, stacked


def main(layout: str, fsdp: int, tensor: int, backend: str) -> None:
    torch.set_num_threads(1)
    axes = ("fsdp", "tensor") if tensor > 1 else ("fsdp",)
    mesh = ft.make_mesh({"fsdp": fsdp, "tensor": tensor})
    # Rounded as torch rounds: Inductor may contract a multiply and an add in float32, not these.
    if layout == "stacked":
        rules = [stacked.stacked(axes, as_torch=True)]
        if backend == "eager":
            # The rows of "down" are split: each is one block, whose largest number the ranks find together.
            low = dict(block=16, min_size=0, where=lambda path: path != "up")
            rules.append(optim.with_low_bit_state(rules[0], "int8", **low))
            rules.append(optim.with_low_bit_state(rules[0], "bfloat16", stochastic=True, min_size=0))
        pairs = [(stacked.run_on(r, mesh, backend=backend), stacked.run_plain(r)) for r in rules]
    else:
        rule = owned.owned(axes, as_torch=True, bucket_bytes=3000)
        specs = owned.TENSOR if tensor > 1 else owned.SPECS
        pairs = [(owned.run_on(rule, mesh, specs, backend=backend), owned.run_plain(rule))]
        if tensor > 1:
            # Groups with owners of their own; ranks without a matrix; three rows of twelve that are padding.
            few = {"a": P(("tensor", "fsdp"), None), "w": P(None, "tensor", "fsdp")}
            cases = [(owned.EXPERTS, owned.EXPERT_SPECS), ({"a": (4, 8), "w": (1, 12, 20)}, few)]
            for shapes, specs in cases:
                values = owned.trees(shapes=shapes)
                for t in values:
                    if "w" in t:
                        t["w"][:, 9:] = 0
                pairs.append((owned.run_on(rule, mesh, specs, values, backend), owned.run_plain(rule, values)))
    for found, expected in pairs:
        for (path, a), b in zip(tree.flatten_with_paths(found)[0], tree.leaves(expected), strict=True):
            assert torch.equal(a, b), f"{path} differs by {(a.double() - b.double()).abs().max()}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
