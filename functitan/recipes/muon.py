"""The optimizer of recipes that step matrices by Muon and everything else by AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from functitan import optim
from functitan.optim import GradientTransformation, Labels
from functitan.optim.muon import MomentumForm
from functitan.optim.orthogonalize import Layout, Scale
from functitan.recipes.base import OptimConfig


@dataclass(frozen=True)
class MuonConfig(OptimConfig):
    """Muon for the matrices of layers, AdamW for embeddings, head and norms; both follow one schedule.

    The fields of :class:`OptimConfig` are AdamW's, and the schedule's.

    Attributes:
        matrix_rule: "muon", or "normuon" for :func:`functitan.optim.normuon`, whose ``b2`` is ``neuron_b2``.
        muon_lr: Muon's peak rate. With scale "match_rms" AdamW's rates fit.
        matrices: globs for the paths of what Muon steps.
        momentum, nesterov, momentum_form, muon_weight_decay, ns_schedule, scale, ns_dtype, layout, wire_dtype,
            bucket_bytes, gram: see :func:`functitan.optim.muon`. Without a layout it is the one of stacked and owned
            with the lower maximal load.
        muon_axes: the mesh axes of the ranks that share the work.
    """

    matrix_rule: Literal["muon", "normuon"] = "muon"
    neuron_b2: float = 0.95
    muon_lr: float = 3e-4
    matrices: tuple[str, ...] = ("layers/w*", "layers/gate", "layers/up", "layers/down")
    momentum: float = 0.95
    nesterov: bool = True
    momentum_form: MomentumForm = "ema"
    muon_weight_decay: float = 0.1
    ns_schedule: Literal["quintic", "polar_express", "two_phase"] = "quintic"
    scale: Scale = "match_rms"
    ns_dtype: torch.dtype = torch.bfloat16
    layout: Layout | None = None
    muon_axes: tuple[str, ...] = ("fsdp", "tensor")
    wire_dtype: torch.dtype | None = None
    bucket_bytes: int = 64 << 20
    gram: tuple[str, ...] = ()

    def labels(self) -> Labels:
        return [*((pattern, self.matrix_rule) for pattern in self.matrices), ("*", self.rule)]

    def build(self, steps: int) -> GradientTransformation:
        settings: dict[str, Any] = dict(
            momentum=self.momentum,
            nesterov=self.nesterov,
            momentum_form=self.momentum_form,
            weight_decay=self.muon_weight_decay,
            schedule=self.ns_schedule,
            scale=self.scale,
            ns_dtype=self.ns_dtype,
            layout=self.layout,
            axes=() if self.layout == "gathered" else self.muon_axes,
            wire_dtype=self.wire_dtype,
            bucket_bytes=self.bucket_bytes,
            gram=self.gram,
        )
        rate = self.schedule(self.muon_lr, steps)
        muon = optim.muon(rate, **settings)
        if self.matrix_rule == "normuon":
            muon = optim.normuon(rate, b2=self.neuron_b2, **settings)
        rule = optim.partition({self.matrix_rule: self.stored(muon), self.rule: self.elementwise(steps)}, self.labels())
        # Clipped before the orthogonalisation, whose results all have the size that they should.
        return self.guarded(rule)

    def rates(self, state: optim.PartitionState) -> dict[str, torch.Tensor]:
        return {"lr": state.groups[self.rule].lr, "muon_lr": state.groups[self.matrix_rule].lr}
