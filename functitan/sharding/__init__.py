"""Meshes, specs, rules, layouts and arrays."""

from spmd_types.types import PartitionSpec

from functitan.sharding.layout import Layout
from functitan.sharding.logical import Rules
from functitan.sharding.mesh import Mesh, abstract_mesh, make_mesh
from functitan.sharding.op_rules import covered, register_rule

__all__ = ["Layout", "Mesh", "PartitionSpec", "Rules", "abstract_mesh", "covered", "make_mesh", "register_rule"]
