"""Optimizers as pure transformations of gradients."""

from functitan.optim.adamw import AdamWState, adam, adamw
from functitan.optim.blocks import Blocks
from functitan.optim.clip import (
    ClipState,
    SkipState,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    raise_nonfinite,
    skip_nonfinite,
)
from functitan.optim.ema import EmaState, ema_params, with_ema
from functitan.optim.evaluation import eval_params
from functitan.optim.hyperparams import Hyper, InjectState, inject_hyperparams
from functitan.optim.lion import LionState, lion
from functitan.optim.low_bit import Quantized, dequantize, quantize, state_bytes, with_low_bit_state
from functitan.optim.master import MasterState, with_master
from functitan.optim.muon import MuonState, muon
from functitan.optim.newton_schulz import Coefficients, newton_schulz
from functitan.optim.normuon import NorMuonState, normuon
from functitan.optim.partition import Labels, PartitionState, label_tree, masked, masks, partition, table
from functitan.optim.qk_clip import QkClipState, qk_clip
from functitan.optim.schedule import constant, cosine, piecewise, warmup_stable_decay
from functitan.optim.schedule_free import ScheduleFreeState, schedule_free_adamw
from functitan.optim.sgd import SgdState, sgd
from functitan.optim.transform import GradientTransformation, Schedule, apply_updates, chain

__all__ = [
    "AdamWState",
    "Blocks",
    "ClipState",
    "Coefficients",
    "EmaState",
    "GradientTransformation",
    "Hyper",
    "InjectState",
    "Labels",
    "LionState",
    "MasterState",
    "MuonState",
    "NorMuonState",
    "PartitionState",
    "QkClipState",
    "Quantized",
    "Schedule",
    "ScheduleFreeState",
    "SgdState",
    "SkipState",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "dequantize",
    "ema_params",
    "eval_params",
    "global_norm",
    "inject_hyperparams",
    "label_tree",
    "lion",
    "masked",
    "masks",
    "muon",
    "newton_schulz",
    "normuon",
    "partition",
    "piecewise",
    "qk_clip",
    "quantize",
    "raise_nonfinite",
    "schedule_free_adamw",
    "sgd",
    "skip_nonfinite",
    "state_bytes",
    "table",
    "warmup_stable_decay",
    "with_ema",
    "with_low_bit_state",
    "with_master",
]
