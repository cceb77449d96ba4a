"""The peer: the model as pure functions under ``jax.jit``, optax's clipping and AdamW, donated state.

Legend: B batch, S sequence, D model, H heads, K head dim, P rotary pairs.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers import sizes
from benchmarks.peers.worker import serve


def rms_norm(x: Any, scale: Any, eps: float) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x_BSHK: Any, cos_S1P: Any, sin_S1P: Any) -> Any:
    a, b = x_BSHK[..., 0::2], x_BSHK[..., 1::2]
    return jnp.stack([a * cos_S1P - b * sin_S1P, a * sin_S1P + b * cos_S1P], -1).reshape(x_BSHK.shape)


def block(s: sizes.Sizes, rope: Any, x_BSD: Any, layer: Any) -> Any:
    h = rms_norm(x_BSD, layer["attn_norm"], s.norm_eps)
    q, k, v = ((h @ layer[w]).reshape(*h.shape[:2], -1, s.head_dim) for w in ("wq", "wk", "wv"))
    out = jax.nn.dot_product_attention(rotate(q, *rope), rotate(k, *rope), v, is_causal=True)
    x_BSD = x_BSD + out.reshape(x_BSD.shape) @ layer["wo"]
    h = rms_norm(x_BSD, layer["mlp_norm"], s.norm_eps)
    return x_BSD + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


def main() -> None:
    s, _ = sizes.parse_sizes(argparse.ArgumentParser(description=__doc__))
    angles = sizes.rope_angles(s)[:, None, :]
    rope = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    outer = ("tok_embeddings", "norm", "head")
    params = {name: jnp.asarray(value) for name, value in sizes.weights(s).items()}
    rule = optax.chain(
        optax.clip_by_global_norm(s.max_norm),
        optax.adamw(s.lr, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.weight_decay),
    )
    data = [(jnp.asarray(t.astype(np.int32)), jnp.asarray(y.astype(np.int32))) for t, y in sizes.batches(s)]

    def loss_fn(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["tok_embeddings"][tokens]
        for i in range(s.layers):
            x = block(s, rope, x, {name: value[i] for name, value in params.items() if name not in outer})
        logits = rms_norm(x, params["norm"], s.norm_eps) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt: Any, tokens: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
        updates, opt = rule.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    state = (params, rule.init(params))

    def step(number: int) -> float:
        nonlocal state
        params, opt, loss = train_step(*state, *data[number % len(data)])
        state = jax.block_until_ready((params, opt))
        return float(loss)

    serve(step, time.perf_counter(), version=f"{jax.__version__}, optax {optax.__version__}")


if __name__ == "__main__":
    main()
