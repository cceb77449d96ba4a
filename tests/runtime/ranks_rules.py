"""One rank of two: logits that are largest on one rank clip the weights of both, and a NaN of one rank stops both.

Against the same functions on one device.
"""

from __future__ import annotations

import math

import torch

import functitan as ft
from functitan import optim, tree
from functitan.errors import NonfiniteError

RULE = optim.skip_nonfinite(optim.chain(optim.sgd(0.01), optim.qk_clip(0.5)), mode="raise")


def heads(x_BSD: torch.Tensor, w_DK: torch.Tensor, n: int) -> torch.Tensor:
    return (x_BSD @ w_DK).unflatten(-1, (n, -1)).transpose(1, 2)


def loss(params: dict[str, torch.Tensor], x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = heads(x_BSD, params["wq"], 4), heads(x_BSD, params["wk"], 2)
    return q.square().mean() + k.square().mean(), ft.nn.max_logits(q, k).amax(0)


def step(params, state, x_BSD):  # type: ignore[no-untyped-def]
    (_, largest_H), grads = ft.value_and_grad(loss, has_aux=True)(params, x_BSD)
    updates, state = RULE.update(grads, state, params, max_logits={"": largest_H})
    return optim.apply_updates(params, updates), state, largest_H


def main() -> None:
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=gen, dtype=torch.float64)  # noqa: E731
    params, x = {"wq": normal(8, 32), "wk": normal(8, 16)}, normal(4, 6, 8)
    x[:2] *= 0.1  # the rows of rank 0 have small logits
    bad = x.clone()
    bad[3, 0, 0] = math.nan
    mesh = ft.make_mesh({"data": 2})
    compiled = ft.compile(step, mesh=mesh)
    put = lambda rows: ft.device_put(rows, ft.P("data", None, None), mesh)  # noqa: E731
    plain = (params, RULE.init(params))
    found, seen = plain, []
    for rows in (x, bad, x):
        *plain, expected = step(*plain, rows)
        *found, largest = compiled(*found, put(rows))
        assert torch.equal(largest, expected) or rows is bad
        seen.append(float(largest.max()))
        for a, b in zip(tree.leaves(found), tree.leaves(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)
    assert seen[0] > 1 and seen[2] < 0.6  # above tau, and at it after a clip and a step
    try:
        optim.raise_nonfinite(found[1])
    except NonfiniteError as error:
        print(error)


if __name__ == "__main__":
    main()
