"""One rank of a job whose processes have other settings: buckets of another size on each."""

from __future__ import annotations

import torch

import functitan as ft
from functitan.runtime.plans import PlanMismatch
from functitan.sharding import processes
from tests.optim.owned import owned, run_on


def main() -> None:
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"fsdp": 2})
    try:
        run_on(owned(bucket_bytes=2000 * (1 + processes.rank())), mesh)
    except PlanMismatch as error:
        print(error)
    else:
        raise AssertionError("ran with other plans")


if __name__ == "__main__":
    main()
