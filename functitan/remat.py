"""The former home of :mod:`functitan.remat_policies`; a module of this name hides ``ft.remat``."""

from functitan.remat_policies import (
    Policy,
    check_policy,
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    remat,
    save_only_these_names,
)

__all__ = [
    "Policy",
    "check_policy",
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
    "remat",
    "save_only_these_names",
]
