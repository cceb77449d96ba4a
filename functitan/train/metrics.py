"""Throughput, memory, and what a run prints: a progress line and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch


@dataclass(frozen=True)
class Summary:
    """What a run found.

    Attributes:
        steps: the steps made.
        first_loss, last_loss: mean training loss in nats per label, of the first and the last step.
        validation: held-out loss in nats per byte.
        tokens_per_second: over all steps but the first, which also warms up; None for a run of one step.
        peak_bytes: the largest memory of the device, on a CPU that of the process.
        skipped: steps whose gradient was not finite.
        folder: the run folder.
        sample: the sample text, "" for none.
    """

    steps: int
    first_loss: float
    last_loss: float
    validation: float
    tokens_per_second: float | None
    peak_bytes: int
    skipped: int
    folder: str
    sample: str


class Meter:
    """Measures the time of steps; pauses (validation, sampling) are left out."""

    def __init__(self, steps: int, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._tokens, self._clock = steps, tokens_per_step, clock
        self._done, self._busy, self._started = 0, 0.0, clock()

    def step_done(self) -> None:
        """Count a step. The first one is not timed: it warms up."""
        now = self._clock()
        if self._done:
            self._busy += now - self._started
        self._done, self._started = self._done + 1, now

    def resume(self) -> None:
        """Go on after a pause: the time since the last step does not count."""
        self._started = self._clock()

    @property
    def tokens_per_second(self) -> float | None:
        """None before the second step."""
        return (self._done - 1) * self._tokens / self._busy if self._done > 1 and self._busy else None

    @property
    def seconds_left(self) -> float | None:
        """None before the second step."""
        return self._busy / (self._done - 1) * (self._steps - self._done) if self._done > 1 else None


def peak_bytes(device: torch.device) -> int:
    """The largest memory so far: of the CUDA allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def progress_text(step: int, steps: int, values: Mapping[str, float], speed: float | None, left: float | None) -> str:
    """The progress line.

    >>> progress_text(20, 500, {"loss": 3.25, "lr": 1e-3}, 4321.0, 75.0)
    'step  20/500   loss 3.2500   lr 1.00e-03   4,321 tokens/s   1:15 left'
    """
    parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {values['loss']:.4f}"]
    if "lr" in values:
        parts.append(f"lr {values['lr']:.2e}")
    if speed is not None and left is not None:
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        parts += [f"{speed:,.0f} tokens/s", f"{clock} left"]
    return "   ".join(parts)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns.

    >>> print(table([("a", "1"), ("longer", "2")]))
    a        1
    longer   2
    """
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def summary_text(summary: Summary) -> str:
    """The table at the end of a run."""
    speed = summary.tokens_per_second
    rows = [
        ("steps", f"{summary.steps}"),
        ("first loss", f"{summary.first_loss:.4f}"),
        ("last loss", f"{summary.last_loss:.4f}"),
        ("validation loss", f"{summary.validation:.4f} nats per byte, on held-out files"),
        ("speed", "not measured in one step" if speed is None else f"{speed:,.0f} tokens/s"),
        ("peak memory", f"{summary.peak_bytes / 2**20:,.0f} MiB"),
        ("run folder", summary.folder),
    ]
    if summary.skipped:
        rows.insert(3, ("skipped steps", f"{summary.skipped}, because their gradients were not finite"))
    return table(rows)


class Progress:
    """Prints the progress line: in place on a terminal, else now and then on a line of its own."""

    def __init__(self, steps: int, out: TextIO | None = None, lines: int = 20) -> None:
        self._out = sys.stdout if out is None else out
        self._steps, self._in_place = steps, self._out.isatty()
        self._every = max(1, steps // lines)
        self._width = 0

    def update(self, step: int, text: str) -> None:
        """Show the line of a step."""
        if self._in_place:
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif step == 1 or step % self._every == 0 or step == self._steps:
            self._out.write(text + "\n")
        self._out.flush()

    def line(self, text: str) -> None:
        """Print a line below the progress line."""
        if self._in_place and self._width:
            self._out.write("\n")
        self._width = 0
        self._out.write(text + "\n")
        self._out.flush()
