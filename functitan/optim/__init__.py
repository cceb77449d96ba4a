"""Optimizers as pure transformations of gradients."""

from functitan.optim.adamw import AdamWState, adamw
from functitan.optim.blocks import Blocks
from functitan.optim.clip import ClipState, SkipState, clip_by_global_norm, global_norm, skip_nonfinite
from functitan.optim.muon import MuonState, muon
from functitan.optim.newton_schulz import Coefficients, newton_schulz
from functitan.optim.partition import Labels, PartitionState, label_tree, masked, masks, partition, table
from functitan.optim.schedule import warmup_stable_decay
from functitan.optim.transform import GradientTransformation, Schedule, apply_updates, chain

__all__ = [
    "AdamWState",
    "Blocks",
    "ClipState",
    "Coefficients",
    "GradientTransformation",
    "Labels",
    "MuonState",
    "PartitionState",
    "Schedule",
    "SkipState",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "global_norm",
    "label_tree",
    "masked",
    "masks",
    "muon",
    "newton_schulz",
    "partition",
    "skip_nonfinite",
    "table",
    "warmup_stable_decay",
]
