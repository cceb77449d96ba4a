"""One call of a ``custom_vjp`` function: pytrees to flat tensors and back, and the checks of what rules
return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functitan import tree
from functitan.errors import GradientError

# Where a value of backward comes from: ("tensor", number among the saved tensors) or ("static", the value).
Slot = tuple[str, Any]


class Rule:
    """The two rules of a call, and what the forward one finds out for the backward one.

    Args:
        name: of the function, for messages.
        fwd: ``(*args) -> (out, residuals)``.
        bwd: ``(*nondiff, residuals, cotangents) -> gradients``.
        nondiff: the positions of arguments that have no gradient.
        args: the arguments.
        treedef: their structure as one tuple.
        further: whether a second derivative may be asked, which needs the inputs themselves.
    """

    def __init__(
        self,
        name: str,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        nondiff: tuple[int, ...],
        args: tuple[Any, ...],
        treedef: tree.TreeDef,
        further: bool,
    ) -> None:
        self._name, self._fwd, self._bwd = name, fwd, bwd
        self._treedef, self._further = treedef, further
        self._nondiff = [args[i] for i in nondiff]
        self._wanted = [i for i in range(len(args)) if i not in nondiff]
        self._n_args = len(args)
        # Of each argument, path, shape and kind of every leaf: the arguments themselves are not kept alive.
        self._inputs = [[(path, _shape(v), _is_float(v)) for path, v in tree.flatten_with_paths(a)[0]] for a in args]
        self._arg_trees = [tree.structure(a) for a in args]

    def forward(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Run the forward rule: output tensors, then residual tensors that are neither inputs nor outputs."""
        outs, residuals = self._run(leaves)
        self._outs = [None if isinstance(o, torch.Tensor) else o for o in outs]
        tensors = [o for o in outs if isinstance(o, torch.Tensor)]
        self._types = [(tuple(t.shape), t.dtype, t.device) for t in tensors]
        self._is_tensor = [isinstance(o, torch.Tensor) for o in outs]
        self._residuals: list[Slot] = []
        for r in residuals:
            if not isinstance(r, torch.Tensor):
                self._residuals.append(("static", r))
                continue
            given = next((i for i, leaf in enumerate(leaves) if leaf is r), None)
            if given is not None:
                self._residuals.append(("input", given))
                continue
            place = next((i for i, t in enumerate(tensors) if t is r), None)
            if place is None:
                place = len(tensors)
                tensors.append(r)
            self._residuals.append(("output", place))
        return tuple(tensors)

    def result(self, output: Sequence[torch.Tensor]) -> Any:
        """The pytree that the function returns."""
        return tree.unflatten(self._out_tree, self._merge(output, self._outs))

    def not_differentiable(self, output: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the node that have no gradient: integers, and residuals."""
        n = len(self._types)
        return [t for i, t in enumerate(output) if i >= n or not t.dtype.is_floating_point]

    def saved(self, leaves: Sequence[Any], output: Sequence[Any]) -> tuple[list[Slot], list[torch.Tensor]]:
        """What backward needs: residuals, or all inputs when residuals may have to be differentiated."""
        tensors: list[torch.Tensor] = []

        def slot(value: Any) -> Slot:
            if not isinstance(value, torch.Tensor):
                return "static", value
            tensors.append(value)
            return "tensor", len(tensors) - 1

        sources = {"input": leaves, "output": output}
        values = [sources[k][v] if k in sources else v for k, v in self._residuals]
        return [slot(v) for v in [*values, *(leaves if self._further else ())]], tensors

    def backward(
        self,
        slots: Sequence[Slot],
        tensors: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Run the backward rule: one gradient, or None, per flat input."""
        values = [tensors[v] if kind == "tensor" else v for kind, v in slots]
        residuals, leaves = values[: len(self._residuals)], values[len(self._residuals) :]
        if torch.is_grad_enabled():
            if not self._further:
                raise GradientError(
                    f"custom_vjp of {self._name}: autograd itself was asked for a second derivative "
                    "(create_graph=True). Nest ft.grad or ft.vjp, which differentiate the rules."
                )
            # Saved residuals carry no history: compute them again from the inputs, which do.
            _, residuals = self._run(leaves)
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None and dtype.is_floating_point else g
            for g, (shape, dtype, device) in zip(cotangents, self._types, strict=False)
        ]
        out = tree.unflatten(self._out_tree, self._merge(given, [None] * len(self._outs)))
        found = self._bwd(*self._nondiff, tree.unflatten(self._residual_tree, residuals), out)
        if not isinstance(found, (tuple, list)) or len(found) != len(self._wanted):
            many = f"{len(found)}" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise GradientError(
                f"custom_vjp of {self._name}: the backward rule returned {many} for {len(self._wanted)} "
                "differentiated arguments; return a tuple with one gradient per argument, None for zero."
            )
        by_place = dict(zip(self._wanted, found, strict=True))
        return [g for i in range(self._n_args) for g in self._gradients_of(i, by_place.get(i))]

    def _run(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        result = self._fwd(*tree.unflatten(self._treedef, leaves))
        if not isinstance(result, tuple) or len(result) != 2:
            found = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise GradientError(
                f"custom_vjp of {self._name}: the forward rule returned {found}; return (out, residuals)."
            )
        outs, self._out_tree = tree.flatten(result[0])
        residuals, self._residual_tree = tree.flatten(result[1])
        return outs, residuals

    def _merge(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Flat outputs: tensors where there were tensors, ``others`` elsewhere."""
        rest = iter(tensors)
        return [next(rest) if t else o for t, o in zip(self._is_tensor, others, strict=True)]

    def _gradients_of(self, place: int, gradient: Any) -> list[torch.Tensor | None]:
        inputs = self._inputs[place]
        # None, here and inside, stands for zero; to a pytree it is a node without leaves, so leaves go by
        # path.
        by_path = dict(tree.flatten_with_paths(gradient)[0])
        unknown = [p for p in by_path if p not in {path for path, _, _ in inputs}]
        if unknown:
            raise GradientError(
                f"custom_vjp of {self._name}: the gradient of argument {place} has a leaf "
                f"{unknown[0] or 'at its root'}, which the argument has not; it has "
                f"{self._arg_trees[place]}. Return the argument's structure, with None for zero."
            )
        for path, shape, is_float in inputs:
            g = by_path.get(path)
            if g is not None and is_float and _shape(g) != shape:
                where = f"argument {place}" + (f", leaf {path}" if path else "")
                raise GradientError(
                    f"custom_vjp of {self._name}: the gradient of {where} has shape {_shape(g)}, and the "
                    f"argument has {shape}. Sum over the dims that broadcasting added."
                )
        return [by_path.get(path) if is_float else None for path, _, is_float in inputs]


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
