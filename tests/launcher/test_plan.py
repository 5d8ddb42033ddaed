"""Where processes run: decode never shares a core with anything where there are cores enough."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.local.core_plan import PREFILL_NICE, plan_cpu
from runtime.settings.cores import cores_text, parse_cores


def test_decode_gets_one_of_two_cores() -> None:
    """Decode gets one of two cores; prefill and the control processes share the other."""
    plan = plan_cpu((0, 1), prefill=1, decode=1, on_gpu=False)
    assert [seat.cores for seat in plan.decode] == [(1,)]
    assert [seat.cores for seat in plan.prefill] == [(0,)]
    assert plan.control == (0,)
    assert (plan.prefill[0].nice, plan.decode[0].nice) == (PREFILL_NICE, 0)
    assert (plan.prefill[0].threads, plan.decode[0].threads) == (1, 1)
    assert plan.note == ""


def test_single_core_sharing_is_noted() -> None:
    """All processes share the only core, and a note says so."""
    plan = plan_cpu((3,), prefill=2, decode=1, on_gpu=False, threads=2)
    assert plan.control == (3,)
    assert {seat.cores for seat in (*plan.prefill, *plan.decode)} == {(3,)}
    assert "one CPU core" in plan.note
    assert "--threads 2" in plan.note
    assert plan_cpu((3,), prefill=0, decode=1, on_gpu=False).note == ""


def test_gpu_workers_are_not_pinned() -> None:
    """Workers on a GPU are neither pinned to cores nor niced."""
    plan = plan_cpu((0, 1, 2, 3), prefill=1, decode=1, on_gpu=True)
    assert {(seat.cores, seat.nice) for seat in (*plan.prefill, *plan.decode)} == {((), 0)}


def test_excess_threads_are_cut_and_noted() -> None:
    """More threads than cores are cut, and a note names --threads."""
    plan = plan_cpu((0, 1), prefill=1, decode=1, on_gpu=False, threads=4)
    assert plan.decode[0].threads == 1
    assert "--threads 4" in plan.note


def test_crowded_decode_leaves_prefill_a_core() -> None:
    """Decode workers that outnumber the cores share them, and prefill keeps one."""
    plan = plan_cpu((0, 1, 2), prefill=1, decode=4, on_gpu=False)
    assert {seat.cores for seat in plan.decode} == {(1,), (2,)}
    assert plan.prefill[0].cores == (0,)
    assert "share" in plan.note


@given(
    cores=st.sets(st.integers(0, 200), min_size=2, max_size=64),
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    threads=st.integers(0, 16),
)
def test_decode_cores_are_never_shared(cores: set[int], prefill: int, decode: int, threads: int) -> None:
    """Decode workers' cores are never used by prefill or control processes, for any plan on two or more cores."""
    plan = plan_cpu(tuple(cores), prefill=prefill, decode=decode, on_gpu=False, threads=threads)
    assert (len(plan.prefill), len(plan.decode)) == (prefill, decode)
    decode_cores = {core for seat in plan.decode for core in seat.cores}
    others = {core for seat in plan.prefill for core in seat.cores} | set(plan.control)
    assert decode_cores
    assert set(plan.control)
    assert not decode_cores & others
    assert decode_cores | others <= cores
    for seat in (*plan.prefill, *plan.decode):
        assert 1 <= seat.threads <= len(seat.cores)
    if len(cores) > decode:
        assert sum(len(seat.cores) for seat in plan.decode) == len(decode_cores)


@given(st.sets(st.integers(0, 500)))
def test_core_lists_round_trip(cores: set[int]) -> None:
    """Cores written as text parse back to the same cores."""
    assert parse_cores(cores_text(tuple(cores))) == tuple(sorted(cores))
