"""What it took to make a program ready to run, and why another one was needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compilation:
    """One signature of a compiled function made ready.

    Attributes:
        name: the function's.
        number: which of its signatures, from 1.
        lowering: seconds to trace and lower it.
        building: seconds to make its graphs runnable: under inductor, to compile them.
        graphs: how many graphs the compiler was given.
        cached: how many of these it took from its cache on disk.
        changed: for another signature than the first, what differs from the last one, leaf by leaf.
    """

    name: str
    number: int
    lowering: float
    building: float
    graphs: int = 0
    cached: int = 0
    changed: str = ""

    def __str__(self) -> str:
        """A line.

        >>> print(Compilation("train_step", 1, 2.5, 11.0, 7, 3))
        train_step was compiled in 13.5 s: traced and lowered 2.5 s, 7 graphs 11.0 s, 3 of them from the cache
        >>> print(Compilation("loss", 2, 0.25, 0.01, changed="batch/tokens: int64[8, 64] -> int64[4, 64]"))
        loss was compiled again, number 2, in 0.3 s: traced and lowered 0.2 s; changed: batch/tokens: int64[8, 64] -> int64[4, 64]
        """
        again = f"again, number {self.number}, " if self.number > 1 else ""
        text = f"{self.name} was compiled {again}in {self.lowering + self.building:.1f} s"
        text += f": traced and lowered {self.lowering:.1f} s"
        if self.graphs:
            where = f"{self.cached} of them from the cache" if self.cached else "none from the cache"
            text += f", {self.graphs} graphs {self.building:.1f} s, {where}"
        return text + (f"; changed: {self.changed}" if self.changed else "")
