"""Prompts are tokenized in fair order: by bytes between organisations, in turn between their users, small beside large."""

import asyncio
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.shares import COST_BYTES_MIN, LARGE_BYTES, QUANTUM_BYTES, FairQueue
from gateway.text.tokenizer_threads import TokenizerThreads

MIB = 1 << 20


def drained(queue: FairQueue[str], *, large: bool = True) -> list[str]:
    found = []
    while (job := queue.pop(large=large)) is not None:
        found.append(job.work)
    return found


def test_small_prompt_passes_huge_ones() -> None:
    """A small prompt is served before another tenant's hundred huge ones."""
    queue = FairQueue[str]()
    for number in range(100):
        queue.push("big", 4 * MIB, f"big{number}")
    queue.push("small", 100, "small")
    order = drained(queue)
    assert order.index("small") == 0 and len(order) == 101


@given(st.integers(0, 1 << 30))
def test_busy_tenants_get_equal_bytes(seed: int) -> None:
    """The bound of deficit round robin: they differ by a quantum and the largest job of each."""
    rnd, queue, served = random.Random(seed), FairQueue[int](), {"a": 0, "b": 0}
    largest = 0
    for name, most in (("a", 2_000_000), ("b", 3_000)):
        for _ in range(50 if name == "a" else 5_000):
            size = rnd.randint(1, most)
            largest = max(largest, size)
            queue.push(name, size, max(size, COST_BYTES_MIN))
    counts = {"a": 50, "b": 5_000}
    while counts["a"] and counts["b"]:
        job = queue.pop()
        assert job is not None
        served[job.tenant] += job.work
        counts[job.tenant] -= 1
        assert abs(served["a"] - served["b"]) <= 2 * QUANTUM_BYTES + 2 * largest


def test_users_of_an_organisation_share_turns() -> None:
    """Users of one organisation take turns, and together they count as one tenant."""
    queue = FairQueue[str]()
    for number in range(200):
        queue.push("acme/ann", QUANTUM_BYTES, f"ann{number}")
    for user in "bcd":
        queue.push(f"acme/{user}", QUANTUM_BYTES, user)
    for _ in range(4):
        queue.push("beta", QUANTUM_BYTES, "beta")
    assert drained(queue)[:8] == ["ann0", "beta", "b", "beta", "c", "beta", "d", "beta"]


def test_large_jobs_are_skipped_when_barred() -> None:
    """Large jobs are passed over while they may not run, and served later."""
    queue = FairQueue[str]()
    queue.push("a", LARGE_BYTES, "large")
    queue.push("b", LARGE_BYTES, "large")
    queue.push("c", LARGE_BYTES - 1, "small")
    assert drained(queue, large=False) == ["small"]
    assert drained(queue) == ["large", "large"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b/x", "b/y"]), st.integers(0, MIB), st.booleans(), st.booleans()), max_size=60
    )
)
def test_jobs_are_served_in_tenant_order(steps: list[tuple[str, int, bool, bool]]) -> None:
    """Every job that is not dropped is served once, in the order of its tenant."""
    queue, pushed, served = FairQueue[int](), [], []
    for number, (tenant, size, drops, pops) in enumerate(steps):
        job = queue.push(tenant, size, number)
        if drops:
            job.dropped = True
        else:
            pushed.append((tenant, number))
        if pops and (found := queue.pop(large=size % 2 == 0)) is not None:
            served.append((found.tenant, found.work))
    while (found := queue.pop()) is not None:
        served.append((found.tenant, found.work))
    assert sorted(served) == sorted(pushed)
    assert not queue._organisations


def test_threads_serve_small_prompts_meanwhile() -> None:
    """On a first-in-first-out pool of two threads, the small one comes after all of them."""

    async def body() -> None:
        threads, go_on, order = TokenizerThreads(2), threading.Event(), list[str]()

        def huge() -> None:
            go_on.wait(60)
            order.append("huge")

        crowd = [asyncio.create_task(threads.run("big", 4 * MIB, huge)) for _ in range(100)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await threads.run("small", 100, lambda: order.append("small"))
        assert order == ["small"]
        go_on.set()
        await asyncio.gather(*crowd)
        assert order.count("huge") == 100
        threads.shutdown()

    asyncio.run(body())


def test_errors_leave_threads_usable() -> None:
    """Threads go on serving after errors and cancellations of their jobs."""

    async def body() -> None:
        threads, go_on = TokenizerThreads(2), threading.Event()
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", 1, lambda: 1 / 0)
        tasks = [asyncio.create_task(threads.run("a", 1, lambda: go_on.wait(60))) for _ in range(10)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        go_on.set()
        assert await threads.run("b", 1, lambda: 7) == 7
        threads.shutdown()

    asyncio.run(body())
