"""Llama 3: ``config`` (the flavors), ``model`` (declare, forward, loss), ``generate``, ``counts``."""

from functitan.nn.models.llama3.config import FLAVORS, Llama3Config, flavor
from functitan.nn.models.llama3.counts import flops_per_token, num_params
from functitan.nn.models.llama3.generate import Cache, decode, generate, prefill
from functitan.nn.models.llama3.model import Params, declare, forward, loss, loss_and_max_logits

__all__ = [
    "FLAVORS",
    "Cache",
    "Llama3Config",
    "Params",
    "declare",
    "decode",
    "flavor",
    "flops_per_token",
    "forward",
    "generate",
    "loss",
    "loss_and_max_logits",
    "num_params",
    "prefill",
]
