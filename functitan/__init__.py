"""functitan: pure functions on global tensors, sharded by annotations, for PyTorch.

Names are imported when they are first used, so that ``functitan --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The name of the __future__ feature would hide the submodule of that name from ``from functitan import annotations``.
del annotations

if TYPE_CHECKING:
    from spmd_types import PartitionSpec as P

    from functitan import debug, nn, optim, random, sharding, tree
    from functitan.annotations import Param, checkpoint_name, constrain, region, scan, use_params
    from functitan.autodiff import grad, value_and_grad, vjp
    from functitan.batching import vmap
    from functitan.runtime.check import check
    from functitan.compiler.program import Program
    from functitan.autodiff_custom import custom_vjp
    from functitan.errors import FunctitanError
    from functitan.runtime.compiled import Compiled, compile
    from functitan.train.init import abstract_init, init
    from functitan.remat_policies import (
        dots_saveable,
        everything_saveable,
        nothing_saveable,
        remat,
        save_only_these_names,
    )
    from functitan.sharding.array import Array, array_from_process_local, device_put
    from functitan.sharding.logical import Rules
    from functitan.sharding.mesh import Mesh, abstract_mesh, make_mesh
    from functitan.sharding.visualize import visualize
    from functitan.shapes import ShapeDtypeStruct, eval_shape
    from functitan.autodiff import stop_gradient

_HOME = {
    "P": ("spmd_types", "PartitionSpec"),
    **dict.fromkeys(("debug", "nn", "optim", "random", "sharding", "tree"), ("", "")),
    **dict.fromkeys(
        ("Param", "checkpoint_name", "constrain", "region", "scan", "use_params"), ("functitan.annotations", "")
    ),
    **dict.fromkeys(("grad", "value_and_grad", "vjp", "stop_gradient"), ("functitan.autodiff", "")),
    "vmap": ("functitan.batching", ""),
    "check": ("functitan.runtime.check", ""),
    "Program": ("functitan.compiler.program", ""),
    "custom_vjp": ("functitan.autodiff_custom", ""),
    "FunctitanError": ("functitan.errors", ""),
    **dict.fromkeys(("Compiled", "compile"), ("functitan.runtime.compiled", "")),
    **dict.fromkeys(("init", "abstract_init"), ("functitan.train.init", "")),
    **dict.fromkeys(
        ("dots_saveable", "everything_saveable", "nothing_saveable", "remat", "save_only_these_names"),
        ("functitan.remat_policies", ""),
    ),
    **dict.fromkeys(("Array", "array_from_process_local", "device_put"), ("functitan.sharding.array", "")),
    "Rules": ("functitan.sharding.logical", ""),
    **dict.fromkeys(("Mesh", "abstract_mesh", "make_mesh"), ("functitan.sharding.mesh", "")),
    "visualize": ("functitan.sharding.visualize", ""),
    **dict.fromkeys(("ShapeDtypeStruct", "eval_shape"), ("functitan.shapes", "")),
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'functitan' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = importlib.import_module(f"functitan.{name}") if not module else getattr(
        importlib.import_module(module), attribute or name
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
