"""A recipe: everything about a run as one frozen tree of plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from functitan import optim
from functitan.compiler.passes import Passes
from functitan.data import Corpus, CorpusSource, blank_corpus, load_corpus
from functitan.errors import ConfigError
from functitan.optim import GradientTransformation, Labels, Schedule
from functitan.optim.schedule import Decay
from functitan.remat_policies import (
    Policy,
    dots_saveable,
    everything_saveable,
    memory_budget,
    nothing_saveable,
    save_only_these_names,
)
from functitan.sharding import Rules
from functitan.train import RunConfig, Task

PyTree = Any
_POLICIES: dict[str, Policy] = {p.name: p for p in (nothing_saveable, everything_saveable, dots_saveable)}
RematName = Literal[
    "nothing_saveable", "everything_saveable", "dots_saveable", "save_only_these_names", "memory_budget"
]


@dataclass(frozen=True)
class Family:
    """The functions of a model family; each takes the model's config.

    Attributes:
        declare: ``config -> pytree of Param``.
        loss: ``(params, batch, config, remat=policy) -> (sum, count)``.
        loss_and_max_logits: as ``loss``, with a third result: the largest attention logits, as
            :func:`functitan.optim.qk_clip` reads them. None for a model that does not measure them.
        generate: ``(params, prompt_BS, config, max_new_tokens=, temperature=, key=, valid_ids=) -> ids_BS``,
            or None.
    """

    declare: Callable[[Any], PyTree]
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    generate: Callable[..., torch.Tensor] | None = None
    loss_and_max_logits: Callable[..., tuple[torch.Tensor, torch.Tensor, PyTree]] | None = None


@dataclass(frozen=True)
class OptimConfig:
    """AdamW under a warmup-stable-decay schedule, with clipping; see :mod:`functitan.optim`.

    Attributes:
        lr: the peak rate.
        warmup: steps of warmup.
        decay_ratio: the share of the run that decays; None for all after warmup.
        decay: the shape of the decay.
        min_factor: the rate at the end, as a factor on the peak.
        b1, b2, eps, weight_decay: of AdamW.
        rule: "adamw", or "schedule_free" for :func:`functitan.optim.schedule_free_adamw`, which warms up and then stays
            at the peak rate: the fields of the decay are not read.
        ema: the decay of an average of the parameters, which is then what is evaluated and saved; None for none.
        qk_clip: attention logits above it are clipped, see :func:`functitan.optim.qk_clip`; it costs their measurement.
            None not to.
        max_norm: gradients are clipped by this global norm; None not to.
        nonfinite: a step whose gradient is not finite is left out: "skip" goes on after it, "raise" ends the run.
        state_dtype, state_stochastic, state_block: how moments are stored between steps; see
            :func:`functitan.optim.with_low_bit_state`.
    """

    lr: float = 3e-4
    warmup: int = 200
    decay_ratio: float | None = None
    decay: Decay = "linear"
    min_factor: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    rule: Literal["adamw", "schedule_free"] = "adamw"
    ema: float | None = None
    qk_clip: float | None = None
    max_norm: float | None = 1.0
    nonfinite: Literal["skip", "raise"] = "skip"
    state_dtype: Literal["float32", "bfloat16", "int8", "float8"] = "float32"
    state_stochastic: bool = False
    state_block: int = 256

    def build(self, steps: int) -> GradientTransformation:
        """The step rule for a run of so many steps; steps with a gradient that is not finite are skipped."""
        return self.guarded(self.elementwise(steps))

    def guarded(self, rule: GradientTransformation) -> GradientTransformation:
        """A rule with what every recipe puts around one: QK-clip, the average, clipping, and the guard of bad steps."""
        if self.qk_clip is not None:
            rule = optim.chain(rule, optim.qk_clip(self.qk_clip))
        averaged = rule if self.ema is None else optim.with_ema(rule, self.ema)
        return optim.skip_nonfinite(averaged, self.max_norm, mode=self.nonfinite)

    def labels(self) -> Labels:
        """Which rule steps each leaf, by patterns for paths; see :func:`functitan.optim.partition`."""
        return [("*", self.rule)]

    def schedule(self, peak: float, steps: int) -> Schedule:
        """The rate over a run of so many steps, with this peak."""
        return optim.warmup_stable_decay(
            peak,
            steps,
            self.warmup,
            decay_ratio=self.decay_ratio,
            decay=self.decay,
            min_factor=self.min_factor,
        )

    def elementwise(self, steps: int) -> GradientTransformation:
        """The rule that ``rule`` names, which works on each element alone."""
        settings: dict[str, Any] = dict(b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay)
        if self.rule == "schedule_free":
            return self.stored(optim.schedule_free_adamw(optim.constant(self.lr, self.warmup), **settings))
        return self.stored(optim.adamw(self.schedule(self.lr, steps), **settings))

    def stored(self, rule: GradientTransformation) -> GradientTransformation:
        """The rule with its moments stored as ``state_dtype`` says."""
        if self.state_dtype == "float32":
            return rule
        return optim.with_low_bit_state(
            rule, self.state_dtype, stochastic=self.state_stochastic, block=self.state_block
        )

    def metrics(self, state: optim.SkipState) -> dict[str, torch.Tensor]:
        """What the rule's state says of the last step."""
        inner = state.inner.inner if isinstance(state.inner, optim.EmaState) else state.inner
        found = {"grad_norm": state.norm, "skipped": state.skipped}
        if self.qk_clip is not None:
            inner, clip = inner
            found["max_logit"] = clip.max_logit
        return {**found, **self.rates(inner)}

    def rates(self, state: PyTree) -> dict[str, torch.Tensor]:
        """The learning rates in the state of the rule itself."""
        return {"lr": state.lr}


@dataclass(frozen=True)
class DataConfig:
    """The corpus of the standard library; see :mod:`functitan.data`.

    Attributes:
        batch: sequences per step, over the whole mesh.
        seq: tokens per sequence.
        validation_batches: at most so many held-out batches are read.
    """

    batch: int = 8
    seq: int = 64
    validation_batches: int = 32

    def build(self, seed: int, corpus: Corpus | None = None) -> CorpusSource:
        """The source; reads the corpus unless it is given."""
        return CorpusSource(
            load_corpus() if corpus is None else corpus, self.batch, self.seq, seed, self.validation_batches
        )


@dataclass(frozen=True)
class Recipe:
    """A whole run.

    Attributes:
        name: shown, and the name of the run folder.
        family: the model's functions.
        model: the model's config, a frozen dataclass.
        rules: which mesh axes the model's logical axes are laid over.
        mesh: axis sizes; empty for one device. An axis that the rules name and the mesh lacks has size 1.
        simulate: run all ranks of the mesh in this process.
        remat: the policy by which layers save activations for backward; None for the default.
        save_names: for "save_only_these_names", the names that the model gave its values.
        remat_budget: for "memory_budget", the fraction from 0 to 1; see :func:`functitan.remat_policies.memory_budget`.
        passes: which passes run on the lowered step, and how.
        optim, data, run: the rest.
    """

    name: str
    family: Family
    model: Any
    rules: Rules
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mesh: Mapping[str, int] = field(default_factory=dict)
    simulate: bool = False
    remat: RematName | None = None
    save_names: tuple[str, ...] = ()
    remat_budget: float | None = None
    passes: Passes = field(default_factory=Passes)

    def __post_init__(self) -> None:
        shards = 1
        for axis in dict(self.rules.names).get("batch", ()):
            shards *= self.mesh.get(axis, 1)
        if self.data.batch % shards:
            axes = ", ".join(f"{a}={self.mesh.get(a, 1)}" for a in self.rules.names["batch"])
            raise ConfigError(
                f"recipe {self.name}: data.batch={self.data.batch} is not divisible by the {shards} parts "
                f"that the mesh splits a batch into ({axes}). Set data.batch to a multiple of {shards}."
            )
        microbatches = self.run.microbatches
        if self.data.batch % (shards * microbatches):
            raise ConfigError(
                f"recipe {self.name}: data.batch={self.data.batch} is not divisible by run.microbatches={microbatches}"
                + (f" times the {shards} parts that the mesh splits each into" if shards > 1 else "")
                + f". Set data.batch to a multiple of {shards * microbatches}."
            )

    def replace(self, **changes: Any) -> Recipe:
        """A changed copy."""
        return dataclasses.replace(self, **changes)

    def remat_policy(self) -> Policy | None:
        """The policy of :mod:`functitan.remat` that ``remat`` names; None for the default.

        Raises:
            ConfigError: ``save_names`` or ``remat_budget`` without the policy that reads them, or the other way round.
        """
        if self.remat == "memory_budget" and self.remat_budget is None:
            raise ConfigError(
                f"recipe {self.name}: remat=memory_budget needs a budget, and remat_budget is not set. Set remat_budget "
                "to a fraction from 0 (least memory) to 1, or another remat."
            )
        if self.remat_budget is not None and self.remat != "memory_budget":
            raise ConfigError(
                f"recipe {self.name}: remat_budget={self.remat_budget} is read by remat=memory_budget alone, and remat "
                f"is {self.remat}. Set remat=memory_budget, or leave remat_budget out."
            )
        if self.remat_budget is not None:
            if not 0 <= self.remat_budget <= 1:
                raise ConfigError(
                    f"recipe {self.name}: remat_budget={self.remat_budget} is not a fraction from 0 to 1."
                )
            return memory_budget(self.remat_budget)
        if self.remat == "save_only_these_names":
            return save_only_these_names(*self.save_names)
        if self.save_names:
            raise ConfigError(
                f"recipe {self.name}: save_names={','.join(self.save_names)} is read by "
                f"remat=save_only_these_names, and remat is {self.remat}. Set both."
            )
        return None if self.remat is None else _POLICIES[self.remat]

    def task(self, corpus: Corpus | None = None) -> Task:
        """What the training loop takes; reads the corpus unless it is given."""
        source = self.data.build(self.run.seed, corpus)
        policy = self.remat_policy()
        make = self.family.generate

        def generate(params: PyTree, prompt: torch.Tensor, key: torch.Tensor, tokens: int) -> torch.Tensor:
            assert make is not None
            return make(
                params,
                prompt,
                self.model,
                max_new_tokens=tokens,
                temperature=self.run.temperature,
                key=key,
                valid_ids=source.valid_ids,
            )

        measure = self.family.loss_and_max_logits
        if self.optim.qk_clip is not None and measure is None:
            raise ConfigError(
                f"recipe {self.name}: optim.qk_clip={self.optim.qk_clip} reads the largest attention logits, and this "
                "family of models does not measure them. Set optim.qk_clip=none, or give its Family loss_and_max_logits."
            )

        def loss_for_step(params: PyTree, batch: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, PyTree]]:
            assert measure is not None
            total, count, logits = measure(params, batch, self.model, remat=policy)
            return total, count, {"max_logits": logits}

        return Task(
            name=self.name,
            declared=self.family.declare(self.model),
            loss=lambda params, batch: self.family.loss(params, batch, self.model, remat=policy),
            loss_for_step=None if self.optim.qk_clip is None else loss_for_step,
            optimizer=self.optim.build(self.run.steps),
            optimizer_metrics=self.optim.metrics,
            source=source,
            generate=None if make is None else generate,
            run=self.run,
            mesh=self.mesh,
            rules=self.rules,
            simulate=self.simulate,
            passes=self.passes,
            settings=settings(self),
        )

    def textless_task(self) -> Task:
        """The task without its text, for what needs shapes only: nothing is read."""
        return self.task(blank_corpus(self.data.seq + 2))


def settings(value: Any) -> Any:
    """A recipe, or part of one, in a form that JSON can hold.

    >>> settings(DataConfig(batch=4))
    {'batch': 4, 'seq': 64, 'validation_batches': 32}
    """
    if isinstance(value, Rules):
        return {"names": value.names, "storage": value.storage}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rows = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: settings(part) for name, part in rows.items() if not isinstance(part, Family)}
    if isinstance(value, Mapping):
        return {str(name): settings(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [settings(part) for part in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
