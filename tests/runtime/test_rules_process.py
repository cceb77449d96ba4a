"""Rules whose decision is one of all ranks, on gloo processes: QK-clip and the guard of bad steps."""

from tests.runtime.gloo import run_ranks


def test_what_one_rank_sees_decides_for_both() -> None:
    out = run_ranks(2, "tests.runtime.ranks_rules", limit=120.0)
    assert out[0] == out[1] and "the gradient of the step 2 steps ago has the global norm nan" in out[0]
