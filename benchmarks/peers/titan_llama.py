"""The peer: TorchTitan 0.3.0's trainer, its model, parallelisms and optimizer, its own train step.

The release runs on CUDA alone. Three things are changed in this process before it is imported, and two settings that
its checks refuse are set on the finished config; the package stays as it is:

- no accelerator is taken for a CPU, not for CUDA; gloo follows from that;
- the monitor of device memory, which asks CUDA for a name, is left out;
- attention is TorchTitan's ``ScaledDotProductAttention``: FlexAttention has no backward on CPUs, and its language
  models are not offered another;
- FSDP reduces by plain sums: for a divide factor of 1 it would ask for a scaled sum, which gloo does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.peers import sizes
from benchmarks.peers.worker import serve

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
    device_name="cpu",
    reset_peak_stats=lambda: None,
    get_peak_stats=lambda: types.SimpleNamespace(
        max_active_gib=0.0,
        max_active_pct=0.0,
        max_reserved_gib=0.0,
        max_reserved_pct=0.0,
        num_alloc_retries=0,
        num_ooms=0,
    ),
)
#: More steps than are ever taken: nothing is scheduled, logged or collected because of their number.
ENDLESS = 10**9


class NoTokenizer(BaseTokenizer):
    """Stands where the trainer wants a tokenizer; the data are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 0


class Tokens(BaseDataLoader):
    """This rank's sequences of the batches that all peers read, in turn."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        sizes: sizes.Sizes = dataclasses.field(default_factory=sizes.Sizes)

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        own = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self._batches = [
            (torch.from_numpy(tokens[own]), torch.from_numpy(labels[own]))
            for tokens, labels in sizes.batches(config.sizes)
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for tokens, labels in self._batches:
                yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def settings(s: sizes.Sizes, parallel: str) -> Trainer.Config:
    """The debug model's own config with the sizes, data and step that all peers share."""
    found = llama3_debugmodel_ce_loss()
    assert found.model_spec is not None
    model: Any = found.model_spec.model
    theirs = (model.dim, len(model.layers), model.layers[0].attention.n_heads, model.vocab_size)
    if theirs != (s.dim, s.layers, s.heads, s.vocab):
        raise SystemExit(f"TorchTitan's debug model has fixed sizes (dim, layers, heads, vocabulary) = {theirs}")
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = int(os.environ["WORLD_SIZE"])
    found.tokenizer = NoTokenizer.Config()
    found.dataloader = Tokens.Config(sizes=s)
    found.optimizer = default_adamw(lr=s.lr, betas=(s.b1, s.b2), eps=s.eps, weight_decay=s.weight_decay)
    found.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, total_steps=ENDLESS, decay_ratio=0.1)
    found.training = TrainingConfig(
        local_batch_size=s.batch // (ranks if parallel == "fsdp" else 1),
        seq_len=s.seq,
        steps=ENDLESS,
        max_norm=s.max_norm,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    found.parallelism = ParallelismConfig(
        tensor_parallel_degree=ranks if parallel == "tensor" else 1,
        enable_sequence_parallel=True,
        # With torch 2.13 the default of 0.3.0 shards no parameters on more than one rank.
        spmd_backend="partial_dtensor" if ranks > 1 else "spmd_types",
    )
    found.compile = CompileConfig(enable=True)
    found.activation_checkpoint = None
    found.checkpoint.enable = False
    found.validator.enable = False
    found.metrics.log_freq = ENDLESS
    found.dump_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    return found


def named_weights(s: sizes.Sizes) -> dict[str, torch.Tensor]:
    """The starting weights under TorchTitan's names, (out, in); q, k and v of a layer are one matrix by kv head."""
    names = {
        "attn_norm": "attention_norm",
        "wo": "attention.wo",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "down": "feed_forward.w2",
        "up": "feed_forward.w3",
    }
    ours = {name: torch.from_numpy(value) for name, value in sizes.weights(s).items()}
    found = {f"{name}.weight": ours[name] for name in ("tok_embeddings", "norm")} | {"lm_head.weight": ours["head"].T}
    for i in range(s.layers):
        for name, theirs in names.items():
            found[f"layers.{i}.{theirs}.weight"] = ours[name][i].T if ours[name].ndim > 2 else ours[name][i]
        heads = [ours[name][i].T.reshape(s.kv_heads, -1, s.head_dim, s.dim) for name in ("wq", "wk", "wv")]
        found[f"layers.{i}.attention.qkv_linear.wqkv.weight"] = torch.cat(heads, 1).reshape(-1, s.dim)
    return found


@torch.no_grad()
def load(model: torch.nn.Module, s: sizes.Sizes) -> None:
    """Fill a model with the starting weights, each rank its part."""
    values = named_weights(s)
    for name, weight in model.named_parameters():
        value = values.pop(name).contiguous()
        if isinstance(weight, DTensor):
            value = distribute_tensor(value, weight.device_mesh, weight.placements)
        weight.copy_(value)
    assert not values, f"TorchTitan has no {', '.join(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", choices=("fsdp", "tensor"), default="fsdp")
    s, found = sizes.parse_sizes(parser)
    trainer = Trainer(settings(s, found.parallel))
    (model,) = trainer.model_parts
    load(model, s)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    data = trainer.batch_generator(trainer.dataloader)
    losses: list[torch.Tensor] = []
    forward_backward = trainer.fwd_bwd_fn

    def kept(*args: Any, **kwargs: Any) -> torch.Tensor:
        """The part of a train step that knows the loss."""
        losses[:] = [forward_backward(*args, **kwargs)]
        return losses[0]

    trainer.fwd_bwd_fn = kept

    def step(_: int) -> float:
        trainer.step += 1
        trainer.train_step(data)
        loss = losses[0].detach()
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        if found.parallel == "fsdp" and dist.get_world_size() > 1:
            dist.all_reduce(loss)  # each rank's is its sequences' share
        return loss.item()

    serve(step, time.perf_counter(), version=f"0.3.0, torch {torch.__version__}")


if __name__ == "__main__":
    main()
