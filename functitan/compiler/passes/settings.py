"""Which passes run, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """The settings of all passes; given to ``ft.compile`` and part of a recipe.

    >>> import functitan as ft
    >>> ft.Passes()
    Passes()
    """

    @staticmethod
    def off() -> Passes:
        """The program as it was lowered: every pass off."""
        return Passes()


DEFAULT_PASSES = Passes()
