"""What users read when something is wrong: the whole text, and no traceback from inside torch."""

from __future__ import annotations

import traceback

import pytest
import torch

import functitan as ft
from functitan.errors import ConfigError, FunctitanError, ShardingError, TraceError, TreeError
from functitan.recipes import RECIPES, load_recipe, override
from tests.compiler.placing import RULES, mesh_of, place, randn, text_of

X = randn(4, 4, 8)
W = {"up": randn(8, 16), "down": randn(16, 8)}
NAMES = {"up": "param embed mlp", "down": "param mlp embed"}
CAPTURED = randn(4, 4, 8)
HERE = "test_errors.py:N"


def lower(f, rules=RULES):
    mesh = mesh_of({"fsdp": 2, "tensor": 2})
    return ft.compile(f, mesh=mesh, rules=rules).lower(place(W, NAMES, mesh), place(X, "batch seq embed", mesh))


def shown(error):
    """The text of an error, after a look at what Python would print of it."""
    printed = "".join(traceback.format_exception(error))
    assert "site-packages" not in printed and "During handling" not in printed and error.__cause__ is None
    return text_of(error)


def refused(f, kind=FunctitanError, rules=RULES):
    with pytest.raises(kind) as e:
        lower(f, rules)
    return shown(e.value)


# --- specs ---------------------------------------------------------------------------------------------------------


def test_unknown_mesh_axis():
    assert refused(lambda w, x: ft.constrain(x, ft.P("dat", None, None)), ShardingError) == (
        f"unknown mesh axis \"dat\" in constrain of x at {HERE}: P('dat', None, None); the mesh has data=1, fsdp=2, "
        "tensor=2. "
        'Did you mean "data"? Write one of these, or add "dat": 1 to the mesh when the axis is not used here.'
    )


def test_unknown_logical_axis():
    assert refused(lambda w, x: ft.constrain(x, ("batch", "sequence", None)), ShardingError) == (
        f'constrain of x at {HERE}: logical axis "sequence" has no rule; the rules have batch, seq, whole_seq, embed, '
        "mlp, "
        'layers. Did you mean "seq"? Write sequence=None in the rules to leave it whole on purpose.'
    )


def test_axis_used_twice():
    assert refused(lambda w, x: ft.constrain(x, ft.P("fsdp", ("data", "fsdp"), None)), ShardingError) == (
        f"constrain of x at {HERE}: the spec P('fsdp', ('data', 'fsdp'), None) uses mesh axis \"fsdp\" for dim 0 and "
        "dim 1; "
        "an axis can split one dim, once. Keep one of them (free axes: tensor)."
    )
    assert refused(lambda w, x: ft.constrain(x, ("batch", "seq", "mlp")), ShardingError) == (
        f"constrain of x at {HERE} ('batch', 'seq', 'mlp'): mesh axis \"tensor\" is wanted by two rules, seq='tensor' "
        "and "
        "mlp='tensor'; an axis can split one dim. Drop it from one of them."
    )


def test_indivisible_dim_of_parameters():
    """All parameters that do not fit, in one message, by path."""
    declared = {
        "emb": ft.Param((17, 8), ("mlp", "embed")),
        "layers": {"b": ft.Param((12,), ("batch",)), "w": ft.Param((4, 3), ("layers", "embed"))},
    }
    mesh = mesh_of({"data": 2, "fsdp": 4, "tensor": 2})
    with pytest.raises(ShardingError) as e:
        ft.init(ft.random.key(0), declared, mesh, RULES)
    assert shown(e.value) == (
        "3 problems in the parameters' layouts:\n"
        "  1. emb: dim 0 has size 17, which does not divide by tensor=2. Use a size such as 18, or give the dim fewer "
        "axes.\n"
        "  2. layers/b: dim 0 has size 12, which does not divide by data=2 * fsdp=4 = 8. Alone would fit: data, fsdp. "
        "Use a "
        "size such as 16, or give the dim fewer axes.\n"
        "  3. layers/w: dim 1 has size 3, which does not divide by fsdp=4. Use a size such as 4, or give the dim fewer "
        "axes."
    )


def test_indivisible_dim_of_an_intermediate():
    assert refused(lambda w, x: ft.constrain(x[:, :3] * 2, ("batch", "seq", None)), ShardingError) == (
        f"constrain of float64[4, 3, 8] at {HERE}: dim 1 has size 3, which does not divide by tensor=2. Use a size "
        "such as "
        "4, or give the dim fewer axes."
    )


def test_rank_mismatch():
    assert refused(lambda w, x: ft.constrain(x, ("batch", "embed")), ShardingError) == (
        f'{HERE} (assert refused(lambda w, x: ft.constrain(x, ("batch", "embed")), ShardingError) == (): constrain '
        "was "
        "given 2 entries ('batch', 'embed') for a value of 3 dims; write one per dim, None for a whole one."
    )
    with pytest.raises(ShardingError) as e:
        ft.device_put(X, ft.P("fsdp"), mesh_of({"fsdp": 2}))
    assert shown(e.value) == (
        "device_put: the spec P('fsdp') has 1 entries, the value has 3 dims (4, 4, 8). Write one entry per dim, None "
        "for a "
        "whole one."
    )
    with pytest.raises(ShardingError) as e:
        ft.Param((4, 4), ("embed",))
    assert shown(e.value) == ("Param has 2 dims (4, 4) but 1 logical axes ('embed',); give one name, or None, per dim.")


def test_entries_that_are_no_names():
    assert "constrain was given the entry 3 in ('batch', 3, None); an entry is a logical axis name or None" in refused(
        lambda w, x: ft.constrain(x, ("batch", 3, None))
    )
    assert "constrain was given 3; write a tuple with one logical axis name or None per dim" in refused(
        lambda w, x: ft.constrain(x, 3)
    )


def test_no_rules():
    def f(w, x):
        return ft.constrain(x, ("batch", "seq", None))

    assert refused(f, rules=None) == (
        f"{HERE} (return ft.constrain(x, (\"batch\", \"seq\", None))): constrain names logical axes ('batch', 'seq', "
        "None), "
        "and the function is compiled without rules. Pass rules=ft.Rules(...) to ft.compile, or give constrain a "
        "PartitionSpec of mesh axes."
    )


def test_several_problems_in_one_message():
    def f(w, x):
        a = ft.constrain(x, ("batch", "sq", None))
        b = ft.constrain(a * 2, ft.P("dta", None, None))
        return a + b

    text = refused(f, ShardingError)
    assert (
        text.startswith("2 problems in lowering f:\n  1. constrain of x at ")
        and '\n  2. unknown mesh axis "dta"' in text
    )


# --- operands ------------------------------------------------------------------------------------------------------


def test_conflicting_operands():
    def f(w, x):
        y = ft.constrain(x, ("batch", None, "mlp"))
        return y + ft.constrain(x, ("batch", "seq", None))

    assert refused(f, ShardingError) == (
        f'{HERE} (return y + ft.constrain(x, ("batch", "seq", None))): aten.add.Tensor: axis "tensor" splits two '
        "different "
        "dims of the op.\n"
        "    operand 0: float64[4, 4, 8] with spec (fsdp, None, tensor)\n"
        "    operand 1: float64[4, 4, 8] with spec (fsdp, tensor, None); would become (fsdp, None, tensor) (128 B sent "
        "per "
        "rank)\n"
        "    Write ft.constrain(operand 1, P('fsdp', None, 'tensor')) before this line, or with logical names; or "
        "compile "
        'with conflicts="auto".'
    )

    def settled(w, x):  # what the message says to write
        y = ft.constrain(x, ("batch", None, "mlp"))
        return y + ft.constrain(ft.constrain(x, ("batch", "seq", None)), ft.P("fsdp", None, "tensor"))

    lower(settled)


def test_a_stored_parameter_that_is_not_in_use():
    def f(w, x):
        return ft.constrain(x, ("batch", "whole_seq", None)) @ w["up"]

    assert refused(f, ShardingError) == (
        f'{HERE} (return ft.constrain(x, ("batch", "whole_seq", None)) @ w["up"]): aten.mm: axis "fsdp" splits two '
        "different "
        "dims of the op.\n"
        "    operand 0: float64[16, 8] with spec (fsdp, None)\n"
        "    operand 1: w/up with spec (fsdp, tensor); would become (None, tensor) (256 B sent per rank)\n"
        "    Operand 1 is a parameter in storage over fsdp. Write params = ft.use_params(params) where the function "
        "begins: "
        "parameters that are not differentiated are gathered only where they are marked as used."
    )
    lower(lambda w, x: f(ft.use_params(w), x))


@torch.library.custom_op("tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An op of a user's."""
    return x.clone()


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_op_without_a_rule():
    def f(w, x):
        y = opaque(x[0, :, :4])
        return y, opaque(y)

    assert refused(f, ShardingError) == (
        "2 problems in lowering f:\n"
        f"  1. {HERE} (y = opaque(x[0, :, :4])): no sharding rule for tests.opaque.default. "
        "If all "
        "its dims must be whole, register one with\n"
        '    ft.sharding.register_rule(torch.ops.tests.opaque, "__->__")\n'
        'and use letters for dims that may be split, such as "b_->b_".\n'
        f"  2. {HERE} (return y, opaque(y)): no sharding rule for tests.opaque.default. If "
        "all "
        "its dims must be whole, register one with\n"
        '    ft.sharding.register_rule(torch.ops.tests.opaque, "__->__")\n'
        'and use letters for dims that may be split, such as "b_->b_".'
    )


def test_tree_mismatch():
    def f(w, x):
        return ft.tree.map(torch.add, w, {"up": w["up"], "dwn": w["down"]})

    assert refused(f, TreeError) == (
        f'{HERE} (return ft.tree.map(torch.add, w, {{"up": w["up"], "dwn": w["down"]}})): first and second must have '
        "the same "
        "structure; only first has: down; only second has: dwn. Is down meant to be dwn?"
    )


# --- impure and data-dependent code --------------------------------------------------------------------------------

WRITES = (
    "writes into a tensor of shape (4, 4, 8) that the function did not make: an argument, a captured tensor, or one of "
    "these "
    "after ft.constrain. Compiled functions are pure; write the form that returns a new tensor: "
)


def test_in_place_on_a_captured_tensor():
    def f(w, x):
        CAPTURED.mul_(2)
        return x + CAPTURED

    before = CAPTURED.clone()
    assert refused(f, TraceError) == f"{HERE} (CAPTURED.mul_(2)): mul_ {WRITES}x = x.mul(...)."
    assert torch.equal(CAPTURED, before)


def test_in_place_on_an_argument_and_its_views():
    def whole(w, x):
        x += 1
        return x

    def part(w, x):
        x[0] = 0
        return x

    def constrained(w, x):
        y = ft.constrain(x, ("batch", "seq", None))
        y.add_(1)
        return x

    def in_region(w, x):
        def body(y):
            x.add_(1)
            return y

        return ft.region(body)(x)

    assert refused(whole) == f"{HERE} (x += 1): add_ {WRITES}x = x.add(...)."
    some = WRITES.replace("(4, 4, 8)", "(4, 8)")
    assert refused(part) == (
        f"{HERE} (x[0] = 0): fill_ {some}torch.where(mask, new, x), x.index_put(...) or x.slice_scatter(...) for a "
        "part of it."
    )
    for f in (constrained, in_region):
        assert f".add_(1)): add_ {WRITES}x = x.add(...)." in refused(f)


def test_in_place_on_a_differentiated_tensor():
    def f(w, x):
        def loss(w):
            w["up"].mul_(2)
            return w["up"].sum()

        return ft.grad(loss)(w)

    assert f'{HERE} (w["up"].mul_(2)): mul_ writes into a tensor of shape (8, 16)' in refused(f)

    def through_a_region(w, x):
        def loss(w):
            def body(y):
                w["up"].mul_(2)
                return y.sum() * w["up"].sum()

            return ft.region(body)(x)

        return ft.grad(loss)(w)

    assert refused(through_a_region) == (
        f'{HERE} (w["up"].mul_(2)): through_a_region writes into a tensor that it did not make, or that a derivative '
        "needs as "
        "it is. Compiled functions are pure; write the form that returns a new tensor, such as x = x.add(...). (torch: "
        "a leaf "
        "Variable that requires grad is being used in an in-place operation)"
    )


def test_in_place_on_what_the_function_made_is_fine():
    def f(w, x):
        y = x * 2
        y += 1
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, :-1]
        return z

    mesh = mesh_of({"fsdp": 2})
    torch.testing.assert_close(ft.compile(f, mesh=mesh, rules=RULES)(W, place(X, "batch _ _", mesh)).full(), f(W, X))


def random_number(instead):
    return (
        "uses the global RNG inside a compiled function, where every number must come from an argument. Pass a key "
        f"(ft.random.key(seed), ft.random.split) into the function and write {instead}."
    )


def test_global_rng():
    def f(w, x):
        return x + torch.randn(4, 4, 8)

    expected = f"{HERE} (return x + torch.randn(4, 4, 8)): torch.randn {random_number('ft.random.normal(key, shape)')}"
    assert refused(f, TraceError) == expected
    assert refused(lambda w, x: ft.region(lambda y: f(w, y))(x)) == expected


def test_global_rng_below_the_functions_of_torch():
    def f(w, x):
        return x * torch.ops.aten.rand_like.default(x)

    expected = (
        f"{HERE} (return x * torch.ops.aten.rand_like.default(x)): aten.rand_like.default "
        f"{random_number('a function of ft.random')}"
    )
    assert refused(f, TraceError) == expected
    assert refused(lambda w, x: ft.region(lambda y: f(w, y))(x)) == expected


NEEDS_A_VALUE = (
    "needs the value of a tensor here (.item(), bool(tensor), an `if` on a tensor, or a shape that depends on data), "
    "and it is "
    "traced on shapes only. Write torch.where(condition, a, b) for a choice, keep numbers as 0-d tensors, and return "
    "or "
    "ft.debug.print what you want to see."
)


def test_item():
    def f(w, x):
        return x * x.sum().item()

    assert refused(f, TraceError) == f"{HERE} (return x * x.sum().item()): f {NEEDS_A_VALUE}"


def test_data_dependent_if():
    def f(w, x):
        if x.sum() > 0:
            return x
        return -x

    assert refused(f, TraceError) == f"{HERE} (if x.sum() > 0:): f {NEEDS_A_VALUE}"
    assert refused(lambda w, x: ft.grad(lambda y: ft.region(lambda z: f(w, z))(y).sum())(x)).startswith(
        f"{HERE} (if x.sum() > 0:): "
    )


@pytest.mark.parametrize("f", [lambda w, x: x.nonzero(), lambda w, x: x[x > 0], lambda w, x: x.tolist()])
def test_shapes_and_lists_that_depend_on_data(f):
    assert NEEDS_A_VALUE in refused(f, TraceError)


def test_a_value_that_leaks_from_a_region():
    def f(w, x):
        kept = []
        ft.region(lambda y: (kept.append(y * 2), y)[1])(x)
        return kept[0] + 1

    assert refused(f, TraceError) == (
        f"{HERE} (return kept[0] + 1): a value of shape (4, 4, 8) is used outside the function that made it: it was "
        "kept in a "
        "global, an attribute or a list while that function was traced. Return it, and pass it on as an argument."
    )


# --- the user's own mistakes ---------------------------------------------------------------------------------------


def test_shapes_that_torch_refuses(capfd):
    def f(w, x):
        return x + w["up"]

    assert refused(f, TraceError) == (
        f'{HERE} (return x + w["up"]): f cannot be traced: torch refuses this line: Attempting to broadcast a '
        "dimension of "
        "length 16 at -1! Mismatching argument at index 1 had torch.Size([8, 16]); but expected shape should be "
        "broadcastable "
        "to [4, 4, 8]. Shapes in a compiled function are those of whole (global) tensors."
    )
    assert capfd.readouterr().err == ""


def test_the_users_own_exceptions_come_as_they_are():
    class Mine(Exception):
        pass

    def raises(w, x):
        raise Mine("as it is")

    def key(w, x):
        return w["upp"]

    for f, kind in ((raises, Mine), (key, KeyError)):
        with pytest.raises(kind) as e:
            lower(f)
        printed = "".join(traceback.format_exception(e.value))
        assert f"in {f.__name__}" in printed and "site-packages" not in printed


def test_the_users_own_causes_are_kept():
    def f(w, x):
        try:
            return w["upp"]
        except KeyError as e:
            raise ValueError("no such weight") from e

    with pytest.raises(ValueError, match="no such weight") as e:
        lower(f)
    assert isinstance(e.value.__cause__, KeyError)


def test_outputs_that_are_no_tensors():
    assert refused(lambda w, x: {"a": 1, "b": x, "c": "s"}, TraceError) == (
        "2 problems in the outputs of <lambda>:\n"
        "  1. output a of <lambda> is 1 of type int; the leaves of a compiled function's result are tensors. Return "
        "torch.tensor(...), or keep the value outside.\n"
        "  2. output c of <lambda> is 's' of type str; the leaves of a compiled function's result are tensors. Return "
        "torch.tensor(...), or keep the value outside."
    )


# --- recipes (use of a donated value stands in test_donation) ------------------------------------------------------


def test_recipe_not_found():
    with pytest.raises(ConfigError) as e:
        load_recipe("llama3-debg")
    assert shown(e.value) == (
        f'there is no recipe "llama3-debg"; there are {", ".join(RECIPES)}. Did you mean "llama3-debug"? A recipe of '
        "your own is written as ./file.py:function."
    )


def test_wrong_override():
    with pytest.raises(ConfigError) as e:
        override(load_recipe("llama3-debug"), ["optim.lrr=3", "run.steps=1.5"])
    assert shown(e.value) == (
        "2 problems in the settings:\n"
        '  1. there is no setting "optim.lrr" in recipe llama3-debug; there are optim.lr, optim.warmup, '
        "optim.decay_ratio, optim.decay, optim.min_factor, optim.b1, optim.b2, optim.eps, optim.weight_decay, "
        "optim.rule, optim.ema, optim.qk_clip, optim.max_norm, optim.nonfinite, optim.state_dtype, "
        'optim.state_stochastic, optim.state_block. Did you mean "optim.lr"?\n'
        '  2. run.steps: "1.5" is not a whole number; it takes int.'
    )
