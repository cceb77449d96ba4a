"""Parameters from their declarations: whole on one device, or born sharded on a mesh with the same bits."""

from __future__ import annotations

from typing import Any

import torch

from functitan import tree
from functitan.annotations import Param, constrain
from functitan.errors import ShardingError, TreeError, raise_batch
from functitan.nn.init import init_params
from functitan.runtime.compiled import compile
from functitan.sharding.array import Array, abstract_array
from functitan.sharding.layout import Layout
from functitan.sharding.logical import Rules, param_layout
from functitan.sharding.mesh import Mesh

PyTree = Any


def init(key: torch.Tensor, declared: PyTree, mesh: Mesh | None = None, rules: Rules | None = None) -> PyTree:
    """Fill declared parameters.

    Values are drawn by global element index, so they are the same bits on one device and on every mesh; each
    rank makes only its own part.

    Args:
        key: a key of :mod:`functitan.random`.
        declared: a pytree of :class:`functitan.Param`.
        mesh: where the parameters live; None for plain tensors on the key's device.
        rules: which mesh axes the logical axes are laid over, storage included.

    Returns:
        The structure of ``declared``: Arrays in their storage layout; whole ones are plain tensors, as the
        results of compiled functions are.

    Raises:
        TreeError: a leaf that is no Param, or an initialiser that made another shape or dtype.
        ShardingError: a mesh without rules, or a dim that its axes do not divide; all by path.

    >>> from functitan import random
    >>> from functitan.sharding.mesh import make_mesh
    >>> declared = {"w": Param((4, 2), ("embed", "mlp"))}
    >>> mesh = make_mesh({"fsdp": 2}, simulate=True)
    >>> params = init(random.key(0), declared, mesh, Rules(embed=None, mlp=None, storage=dict(embed="fsdp")))
    >>> params["w"].spec, torch.equal(params["w"].full(), init(random.key(0), declared)["w"])
    (PartitionSpec('fsdp', None), True)
    """
    if mesh is None:
        return init_params(key, declared)
    layouts = param_layouts(declared, mesh, _given(rules))

    def initialize(key: torch.Tensor) -> PyTree:
        return tree.map(lambda x, lay: constrain(x, lay.spec), init_params(key, declared), layouts)

    # A simulated or abstract mesh has no device of its own: the values live where the key does.
    made = compile(initialize, mesh=mesh, rules=rules)(key)
    # A program's outputs are values like others; that some axes are for storage only is known here.
    return tree.map(
        lambda x, lay: Array(x.shape, x.dtype, lay, mesh, x.shards) if isinstance(x, Array) else x,
        made,
        layouts,
    )


def abstract_init(declared: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """The parameters as Arrays without values, for lowering: no memory, no arithmetic.

    Args:
        declared: a pytree of :class:`functitan.Param`.
        mesh: any mesh, usually of :func:`functitan.abstract_mesh`.
        rules: as for :func:`init`.
    """
    layouts = param_layouts(declared, mesh, _given(rules))
    return tree.map(lambda p, lay: abstract_array(p.shape, p.dtype, lay, mesh), declared, layouts)


def param_layouts(declared: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """The storage layout of every parameter.

    Raises:
        TreeError: a leaf that is no Param.
        ShardingError: names every parameter that the mesh and rules do not fit.
    """
    wrong: list[str] = []
    problems: list[str] = []

    def layout(path: str, param: Any) -> Layout | None:
        if not isinstance(param, Param):
            wrong.append(f"{path or 'the tree'} is a {type(param).__name__}; declare it as a Param.")
            return None
        try:
            return param_layout(param.shape, param.axes, rules, mesh, path)
        except ShardingError as error:
            problems.append(str(error))
            return None

    found = [layout(path, p) for path, p in tree.flatten_with_paths(declared)[0]]
    raise_batch(TreeError, wrong, "the parameters")
    raise_batch(ShardingError, problems, "the parameters' layouts")
    return tree.unflatten(tree.structure(declared), found)


def _given(rules: Rules | None) -> Rules:
    if rules is None:
        raise ShardingError(
            "init on a mesh needs rules=ft.Rules(...), which say over which mesh axes each logical axis is "
            "laid. Write None for an axis that stays whole."
        )
    return rules
