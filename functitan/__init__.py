"""functitan: pure functions on global tensors, sharded by annotations, for PyTorch.

Names are imported when they are first used, so that ``functitan --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The __future__ feature would otherwise stand where the submodule of that name belongs.
del annotations

if TYPE_CHECKING:
    from spmd_types.types import PartitionSpec as P

    from functitan import debug, nn, optim, random, sharding, tree
    from functitan.accumulation import accumulate_grads
    from functitan.annotations import Param, checkpoint_name, constrain, constrain_like, region, scan, use_params
    from functitan.autodiff import grad, stop_gradient, value_and_grad, vjp
    from functitan.autodiff_custom import custom_vjp
    from functitan.batching import vmap
    from functitan.compiler.passes import Passes
    from functitan.compiler.program import Program
    from functitan.errors import FunctitanError
    from functitan.remat_policies import (
        dots_saveable,
        everything_saveable,
        memory_budget,
        nothing_saveable,
        remat,
        save_only_these_names,
    )
    from functitan.runtime.check import check, verify
    from functitan.runtime.compiled import Compiled, compile
    from functitan.shapes import ShapeDtypeStruct, eval_shape
    from functitan.sharding.array import Array, array_from_process_local, device_put
    from functitan.sharding.logical import Rules
    from functitan.sharding.mesh import Mesh, abstract_mesh, make_mesh
    from functitan.sharding.shard_map import axis_index, axis_size, shard_map
    from functitan.sharding.visualize import visualize
    from functitan.train.init import abstract_init, init

#: Module -> the names that are taken from it.
_HOME = {
    "functitan.accumulation": ("accumulate_grads",),
    "functitan.annotations": (
        "Param",
        "checkpoint_name",
        "constrain",
        "constrain_like",
        "region",
        "scan",
        "use_params",
    ),
    "functitan.autodiff": ("grad", "stop_gradient", "value_and_grad", "vjp"),
    "functitan.autodiff_custom": ("custom_vjp",),
    "functitan.batching": ("vmap",),
    "functitan.compiler.passes": ("Passes",),
    "functitan.compiler.program": ("Program",),
    "functitan.errors": ("FunctitanError",),
    "functitan.remat_policies": (
        "dots_saveable",
        "everything_saveable",
        "memory_budget",
        "nothing_saveable",
        "remat",
        "save_only_these_names",
    ),
    "functitan.runtime.check": ("check", "verify"),
    "functitan.runtime.compiled": ("Compiled", "compile"),
    "functitan.shapes": ("ShapeDtypeStruct", "eval_shape"),
    "functitan.sharding.array": ("Array", "array_from_process_local", "device_put"),
    "functitan.sharding.logical": ("Rules",),
    "functitan.sharding.mesh": ("Mesh", "abstract_mesh", "make_mesh"),
    "functitan.sharding.shard_map": ("axis_index", "axis_size", "shard_map"),
    "functitan.sharding.visualize": ("visualize",),
    "functitan.train.init": ("abstract_init", "init"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_MODULES = ("debug", "nn", "optim", "random", "sharding", "tree")

__all__ = [
    "Array",
    "Compiled",
    "FunctitanError",
    "Mesh",
    "P",
    "Param",
    "Passes",
    "Program",
    "Rules",
    "ShapeDtypeStruct",
    "abstract_init",
    "abstract_mesh",
    "accumulate_grads",
    "array_from_process_local",
    "axis_index",
    "axis_size",
    "check",
    "checkpoint_name",
    "compile",
    "constrain",
    "constrain_like",
    "custom_vjp",
    "debug",
    "device_put",
    "dots_saveable",
    "eval_shape",
    "everything_saveable",
    "grad",
    "init",
    "make_mesh",
    "memory_budget",
    "nn",
    "nothing_saveable",
    "optim",
    "random",
    "region",
    "remat",
    "save_only_these_names",
    "scan",
    "shard_map",
    "sharding",
    "stop_gradient",
    "tree",
    "use_params",
    "value_and_grad",
    "verify",
    "visualize",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(f"functitan.{name}")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name == "P":
        value = importlib.import_module("spmd_types.types").PartitionSpec
    else:
        raise AttributeError(f"module 'functitan' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
