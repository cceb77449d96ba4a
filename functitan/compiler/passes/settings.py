"""Which passes run, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from functitan.errors import ConfigError, listed, raise_batch


@dataclass(frozen=True)
class Passes:
    """The settings of all passes; given to ``ft.compile`` and part of a recipe.

    Attributes:
        regather: gather stored parameters again in backward; False keeps what forward gathered until then: one gather
            less, and of all layers the whole parameters held. Or patterns of the names of regions and scans: those gather
            again, the others keep. "step" is what is outside of them.
        common_subexpressions: compute equal values of a graph once, without holding anything longer for backward.
        bucket_bytes: the gathers of a body's parameters, and the reductions of their gradients, are sent as buffers of
            at most so many bytes (of the gathered side); 0 sends each by itself.
        prefetch: how many steps of a scan ahead parameters are gathered; 0 where they are needed. With 1 or more,
            reductions of gradients are waited for one step later as well.
        join_bytes: reductions of operands of at most so many bytes that do not depend on each other are sent as one,
            wherever they are; 0 sends each by itself.

    >>> import functitan as ft
    >>> ft.Passes(prefetch=2).prefetch, ft.Passes.off().prefetch
    (2, 0)
    """

    regather: bool | tuple[str, ...] = True
    common_subexpressions: bool = True
    bucket_bytes: int = 1 << 28
    join_bytes: int = 1 << 16
    prefetch: int = 1

    def __post_init__(self) -> None:
        problems = [f"{name}={value}: it counts {what} from 0 on." for name, value, what in self._counts() if value < 0]
        if isinstance(self.regather, str):
            problems.append(
                f"regather={self.regather!r}: it takes true, false, or a tuple of patterns of regions; write "
                f"({self.regather!r},)."
            )
        raise_batch(ConfigError, problems, "the settings of the passes")

    def _counts(self) -> tuple[tuple[str, int, str], ...]:
        return (
            ("bucket_bytes", self.bucket_bytes, "bytes"),
            ("join_bytes", self.join_bytes, "bytes"),
            ("prefetch", self.prefetch, "steps"),
        )

    def regathers(self, name: str) -> bool:
        """Whether backward gathers the parameters of a region again.

        >>> Passes(regather=("layer*",)).regathers("layer_norm"), Passes(regather=("layer*",)).regathers("head")
        (True, False)
        """
        if isinstance(self.regather, bool):
            return self.regather
        return any(fnmatchcase(name, pattern) for pattern in self.regather)

    def check_regions(self, names: Iterable[str]) -> None:
        """Compare with the regions of a program.

        Raises:
            ConfigError: a pattern that names none of them.
        """
        known = sorted({*names, "step"})
        patterns = () if isinstance(self.regather, bool) else self.regather
        problems = [
            f'regather names "{pattern}", which no region of the program is called; there are {listed(known)}.'
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in known)
        ]
        raise_batch(ConfigError, problems, "the settings of the passes")

    @staticmethod
    def off() -> Passes:
        """The program as it was lowered: every pass off, and parameters gathered again in backward."""
        return Passes(common_subexpressions=False, bucket_bytes=0, join_bytes=0, prefetch=0)


DEFAULT_PASSES = Passes()
