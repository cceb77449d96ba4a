"""Factorisations of matrices: batches split, each matrix is whole."""

from __future__ import annotations

import torch

from functitan.sharding.op_rules.base import Call, Equation, Labels, Rule, TensorType, rule
from functitan.sharding.op_rules.labels import all_whole, along

aten = torch.ops.aten


@rule(aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default, aten.cholesky_inverse.default,
      aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_qr.default, aten._linalg_eigh.default,
      aten._linalg_svd.default, aten.linalg_lu_factor_ex.default, aten.linalg_lu_solve.default,
      aten._linalg_solve_ex.default, aten.linalg_solve_triangular.default, aten.triangular_solve.default,
      aten.linalg_matrix_exp.default)  # fmt: skip
def matrices(call: Call) -> Rule:
    batch = call.operands[0].shape[:-2]

    def row(t: TensorType) -> Labels:
        lead: Labels = tuple(None if n == 1 else f"b{d}" for d, n in enumerate(batch))
        return (*lead, *("_",) * (t.ndim - len(batch)))

    if any(t.shape[: len(batch)] != batch for t in (*call.operands, *call.outputs)):  # batches that broadcast
        return all_whole(call)
    return Equation(tuple(map(row, call.operands)), tuple(map(row, call.outputs)))


@rule(aten.linalg_cross.default)
def cross(call: Call) -> Rule:
    return along(call, call.argument("dim", -1), (frozenset({0}), frozenset({1})))
