"""Layers as functions of plain tensors. Models are in :mod:`functitan.nn.models`."""

from functitan.nn import init
from functitan.nn.attention import causal_attention, decode_attention, max_logits, merge_heads, qkv_heads
from functitan.nn.embedding import embedding
from functitan.nn.linear import linear
from functitan.nn.loss import IGNORE_INDEX, cross_entropy
from functitan.nn.mlp import swiglu
from functitan.nn.norm import rms_norm
from functitan.nn.rope import RopeScaling, apply_rope, rope_frequencies, rope_table

__all__ = [
    "IGNORE_INDEX",
    "RopeScaling",
    "apply_rope",
    "causal_attention",
    "cross_entropy",
    "decode_attention",
    "embedding",
    "init",
    "linear",
    "max_logits",
    "merge_heads",
    "qkv_heads",
    "rms_norm",
    "rope_frequencies",
    "rope_table",
    "swiglu",
]
