"""Which passes run, and how."""

from __future__ import annotations

from dataclasses import dataclass

from functitan.errors import ConfigError, raise_batch


@dataclass(frozen=True)
class Passes:
    """The settings of all passes; given to ``ft.compile`` and part of a recipe.

    Attributes:
        regather: gather stored parameters again in backward; False keeps what forward gathered until then: one gather
            less, and of all layers the whole parameters held.
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

    regather: bool = True
    common_subexpressions: bool = True
    bucket_bytes: int = 1 << 28
    join_bytes: int = 1 << 16
    prefetch: int = 1

    def __post_init__(self) -> None:
        problems = [f"{name}={value}: it counts {what} from 0 on." for name, value, what in self._counts() if value < 0]
        raise_batch(ConfigError, problems, "the settings of the passes")

    def _counts(self) -> tuple[tuple[str, int, str], ...]:
        return (
            ("bucket_bytes", self.bucket_bytes, "bytes"),
            ("join_bytes", self.join_bytes, "bytes"),
            ("prefetch", self.prefetch, "steps"),
        )

    @staticmethod
    def off() -> Passes:
        """The program as it was lowered: every pass off, and parameters gathered again in backward."""
        return Passes(common_subexpressions=False, bucket_bytes=0, join_bytes=0, prefetch=0)


DEFAULT_PASSES = Passes()
