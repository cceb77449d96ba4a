"""Random programs on random meshes with random specs: sharded equals unsharded, values and gradients."""

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import functitan as ft
from tests.sharding.harness import difference, with_gradients
from tests.sharding.programs import programs
from tests.sharding.strategies import meshes, specs

# The same examples on every machine, in bounded time.
BOUNDED = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@BOUNDED
@given(st.data())
def test_sharded_equals_unsharded(data):
    mesh = data.draw(meshes())
    program = data.draw(programs(mesh))
    placed = [data.draw(specs(x.shape, mesh)) for x in program.inputs]
    note(f"{mesh}\n{program}\n{placed}")
    f = with_gradients(program.run, program.inputs)
    want = f(*program.inputs)
    given_arrays = [ft.device_put(x, spec, mesh) for x, spec in zip(program.inputs, placed, strict=True)]
    got = ft.compile(f, mesh=mesh, conflicts="auto")(*given_arrays)
    assert difference(got, want) < 1e-10
