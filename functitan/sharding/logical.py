"""Rules: which mesh axes a logical axis is laid over.

Models name their dims ("batch", "embed", "heads"); a recipe's whole parallelism is a mesh plus rules. Rules are total
and strict: a name without a rule is an error, and "not sharded" is written as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_types.types import PartitionSpec

from functitan.errors import ShardingError, listed, suggest
from functitan.sharding.layout import Layout, from_spec, spec_text
from functitan.sharding.mesh import Mesh

Entry = str | tuple[str, ...] | None


def as_axes(entry: Any, where: str) -> tuple[str, ...]:
    """One entry of a spec or rule as a tuple of axis names."""
    if entry is None:
        return ()
    names = (entry,) if isinstance(entry, str) else entry
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
        raise ShardingError(f"{where} is {entry!r}; write None, a mesh axis such as 'tensor', or a tuple of axes.")
    return tuple(names)


def _short(axes: tuple[str, ...]) -> Entry:
    """Axes as users write them."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


class Rules:
    """A mapping from logical axis names to mesh axes, with a second table for storage.

    Args:
        storage: logical axis -> mesh axes that a *parameter* is split over at rest, beside those it is computed
            with. They are gathered where the parameter is used, and gradients are scattered over them (FSDP).
        names: logical axis -> a mesh axis, a tuple of axes (major to minor), or None.

    >>> rules = Rules(batch=("data", "fsdp"), embed=None, mlp="tensor", storage=dict(embed="fsdp"))
    >>> rules.spec(("batch", "mlp"), "h")
    PartitionSpec(('data', 'fsdp'), 'tensor')
    >>> rules.spec(("embed", "mlp"), "w", storage=True)
    PartitionSpec('fsdp', 'tensor')
    """

    def __init__(self, storage: Mapping[str, Entry] | None = None, **names: Entry) -> None:
        self.names: dict[str, tuple[str, ...]] = {k: as_axes(v, f'the rule for "{k}"') for k, v in names.items()}
        self.storage: dict[str, tuple[str, ...]] = {
            k: as_axes(v, f'the storage rule for "{k}"') for k, v in (storage or {}).items()
        }
        for name in self.storage:
            if name not in self.names:
                raise ShardingError(
                    f'the storage rule for "{name}" names no logical axis; the rules have {listed(self.names)}.'
                    f"{suggest(name, self.names)} Write {name}=None beside it when compute does not split it."
                )

    def replace(self, storage: Mapping[str, Entry] | None = None, **names: Entry) -> Rules:
        """Changed rules: named entries are replaced or added, the rest stays."""
        return Rules({**self.storage, **(storage or {})}, **{**self.names, **names})

    def _key(self) -> tuple[Any, ...]:
        return (tuple(sorted(self.names.items())), tuple(sorted(self.storage.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = [f"{k}={_short(v)!r}" for k, v in self.names.items()]
        if self.storage:
            parts.append(f"storage={ {k: _short(v) for k, v in self.storage.items()} }")
        return f"Rules({', '.join(parts)})"

    def axes_of(self, name: str | None, what: str) -> tuple[str, ...]:
        """The mesh axes of a logical name.

        Raises:
            ShardingError: the name has no rule.
        """
        if name is None:
            return ()
        if name not in self.names:
            raise ShardingError(
                f'{what}: logical axis "{name}" has no rule; the rules have {listed(self.names)}.'
                f"{suggest(name, self.names)} Write {name}=None in the rules to leave it whole on purpose."
            )
        return self.names[name]

    def spec(self, axes: Sequence[str | None], what: str, *, storage: bool = False) -> PartitionSpec:
        """The PartitionSpec of a value with these logical axes; with ``storage`` that of a parameter at rest.

        Raises:
            ShardingError: a name without a rule, or one mesh axis for two dims; the message names both rules.
        """
        entries: list[Entry] = []
        claimed: dict[str, str] = {}
        for name in axes:
            found = self.axes_of(name, what)
            rows = [(a, f"{name}={_short(found)!r}") for a in found]
            if storage and name is not None:
                rows += [(a, f"storage {name}={_short(self.storage[name])!r}") for a in self.storage.get(name, ())]
            for axis, rule in rows:
                if axis in claimed:
                    raise ShardingError(
                        f'{what} {tuple(axes)}: mesh axis "{axis}" is wanted by two rules, {claimed[axis]} and '
                        f"{rule}; an axis can split one dim. Drop it from one of them."
                    )
                claimed[axis] = rule
            names = tuple(a for a, _ in rows)
            entries.append(None if not names else names[0] if len(names) == 1 else names)
        return PartitionSpec(*entries)

    def unused(self, seen: set[str]) -> list[str]:
        """The logical names that nothing asked for, for a report."""
        return [n for n in self.names if n not in seen]


def layout_of(
    shape: Sequence[int],
    spec: Sequence[Entry] | PartitionSpec,
    mesh: Mesh,
    what: str,
    pending: Sequence[str] = (),
) -> Layout:
    """The layout of a global shape under a PartitionSpec of mesh axes.

    Raises:
        ShardingError: an axis that the mesh lacks, and all that ``from_spec`` refuses.
    """
    entries = [as_axes(e, f"{what}: an entry of the spec") for e in spec]
    for names in entries:
        for name in names:
            mesh.require(name, f"{what}: {spec_text([e if len(e) > 1 else e[0] if e else None for e in entries])}")
    for name in pending:
        mesh.require(name, f"{what}: pending={pending!r}")
    return from_spec(shape, [e or None for e in entries], mesh.shape, what=what, pending=pending)


def param_layout(shape: Sequence[int], axes: Sequence[str | None], rules: Rules, mesh: Mesh, what: str) -> Layout:
    """The layout of a parameter at rest; its ``storage`` axes are those which only storage adds."""
    compute = rules.spec(axes, what)
    stored = rules.spec(axes, what, storage=True)
    at_rest = layout_of(shape, stored, mesh, what)
    computed = layout_of(shape, compute, mesh, what)
    only = frozenset(at_rest.axes) - frozenset(computed.axes)
    return Layout(at_rest.dims, storage=only)
