"""The optimizer of recipes that step matrices by Muon and everything else by AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from functitan import optim
from functitan.optim import GradientTransformation, Labels
from functitan.optim.orthogonalize import Scale
from functitan.recipes.base import OptimConfig


@dataclass(frozen=True)
class MuonConfig(OptimConfig):
    """Muon for the matrices of layers, AdamW for embeddings, head and norms; both follow one schedule.

    The fields of :class:`OptimConfig` are AdamW's, and the schedule's.

    Attributes:
        muon_lr: Muon's peak rate. With scale "match_rms" AdamW's rates fit.
        matrices: globs for the paths of what Muon steps.
        momentum, nesterov, muon_weight_decay, ns_schedule, scale, ns_dtype, layout, wire_dtype: see
            :func:`functitan.optim.muon`.
        muon_axes: the mesh axes that layers are spread over in the stacked layout.
    """

    muon_lr: float = 3e-4
    matrices: tuple[str, ...] = ("layers/w*", "layers/gate", "layers/up", "layers/down")
    momentum: float = 0.95
    nesterov: bool = True
    muon_weight_decay: float = 0.1
    ns_schedule: Literal["quintic", "polar_express", "two_phase"] = "quintic"
    scale: Scale = "match_rms"
    ns_dtype: torch.dtype = torch.bfloat16
    layout: Literal["stacked", "gathered"] = "stacked"
    muon_axes: tuple[str, ...] = ("fsdp", "tensor")
    wire_dtype: torch.dtype | None = None

    def labels(self) -> Labels:
        return [*((pattern, "muon") for pattern in self.matrices), ("*", "adamw")]

    def build(self, steps: int) -> GradientTransformation:
        muon = optim.muon(
            self.schedule(self.muon_lr, steps),
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.muon_weight_decay,
            schedule=self.ns_schedule,
            scale=self.scale,
            ns_dtype=self.ns_dtype,
            layout=self.layout,
            axes=self.muon_axes if self.layout == "stacked" else (),
            wire_dtype=self.wire_dtype,
        )
        rule = optim.partition({"muon": muon, "adamw": self.adamw(steps)}, self.labels())
        # Clipped before the orthogonalisation, whose results all have the size that they should.
        return optim.skip_nonfinite(rule, self.max_norm)

    def metrics(self, state: optim.SkipState) -> dict[str, torch.Tensor]:
        groups = state.inner.groups
        return {
            "grad_norm": state.norm,
            "lr": groups["adamw"].lr,
            "muon_lr": groups["muon"].lr,
            "skipped": state.skipped,
        }
