"""Chaos on real processes, in short; `scripts/chaos`, `scripts/cancels` and `scripts/soak_load` go on for as long as one likes.
A bad network takes minutes by itself."""

import asyncio
import io
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from signal import SIGTERM
from typing import TypeVar

import pytest
import uvloop
from rich.console import Console

from tests import tiny_models
from tests.e2e.netns import network
from tests.helpers import first
from tools.chaos.__main__ import chaos
from tools.chaos.cancels import cancels
from tools.chaos.cluster import Cluster
from tools.chaos.gaps import Fault
from tools.chaos.orders import CONTEXT_TOKENS, Choice, compare
from tools.chaos.proxy import FarCluster
from tools.chaos.run import Plan, Result, Run
from tools.chaos.show import show, tell
from tools.chaos.soak import slope

SEED = 7
KILLS = 200
RANK_SHARE = 0.3 if "--tensor-parallel-size" in os.environ.get("CROSSDOCK_VLLM_ARGS", "") else 0.0
PARTITION_S = 30.0
C = TypeVar("C", bound=Cluster)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT_TOKENS)


def on(make: Callable[[], C], work: Callable[[C], Awaitable[list[str]]]) -> None:
    """Runs `work` on a cluster, which it returns the violations of."""

    async def whole() -> list[str]:
        async with make() as cluster:
            found = await work(cluster)  # type: ignore[arg-type]
            ended = await cluster.close()
        return [*found, *(f"{name} ended with status {status}" for name, status in ended.items() if status)]

    violations = uvloop.run(whole())
    assert not violations, f"seed {SEED}: " + "\n".join(violations)


def test_random_faults_change_no_token(model: Path, tmp_path: Path) -> None:
    """Random kills and stops change no token and leave nothing behind."""
    plan = Plan(
        seed=SEED, faults=5, overlap=0.3, pause_s=0.3, clients=4, orders=12, output_tokens_max=200, leave_share=0.1,
        constrained_share=0.34, session_share=0.4,
    )  # fmt: skip

    async def work(cluster: Cluster) -> list[str]:
        result = await chaos(cluster, plan)
        assert result.answers > 10 and result.constrained > 2, "too few streams to mean something"
        return result.violations

    on(lambda: Cluster(model, tmp_path), work)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_killed_workers_change_no_token(model: Path, tmp_path: Path) -> None:
    """Kills of prefill and decode workers, and of their ranks, change no token of any kind of stream."""
    plan = Plan(
        seed=SEED, faults=KILLS, roles=("prefill", "decode"), stop_share=0.0, rank_share=RANK_SHARE, pause_s=0.3, clients=4,
        orders=24, output_tokens_max=200, constrained_share=0.34,
    )  # fmt: skip

    async def work(cluster: Cluster) -> list[str]:
        result = await chaos(cluster, plan)
        show(result, Console(width=180))
        return result.violations

    on(lambda: Cluster(model, tmp_path), work)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cut_share", [0.0, 1.0], ids=["killed", "cut off"])
def test_lost_hosts_change_no_token(model: Path, tmp_path: Path, cut_share: float) -> None:
    """The loss of a host with a prefill and a decode worker ends no stream and changes no token."""
    plan = Plan(
        seed=SEED, hosts=True, faults=4, stop_share=cut_share, overlap=0.0, pause_s=0.3, clients=4, orders=12,
        output_tokens_max=300, leave_share=0.0,
    )  # fmt: skip

    async def work(cluster: Cluster) -> list[str]:
        result = await chaos(cluster, plan)
        assert sum(fault.role == "host" for fault in result.faults) == 4 and result.answers > 10
        return result.violations

    with network() as hosts:
        on(lambda: Cluster(model, tmp_path, network=hosts), work)


def test_standby_coordinator_takes_over(model: Path, tmp_path: Path) -> None:
    """A standby coordinator takes over from one that is killed or asked to end."""
    plan = Plan(
        seed=SEED,
        faults=1,
        roles=("coordinator",),
        stop_share=0.0,
        pause_s=0.3,
        clients=2,
        orders=8,
        output_tokens_max=200,
    )

    async def work(cluster: Cluster) -> list[str]:
        result = await chaos(cluster, plan)
        asked = cluster.serving()
        cluster.signal(asked, SIGTERM)
        await cluster.until("the other serves", lambda: cluster.serving() is not asked and cluster.is_whole())
        assert asked.process is not None
        await cluster.until("the first has ended", lambda: asked.process.poll() is not None)
        return result.violations

    on(lambda: Cluster(model, tmp_path, standby=True), work)


@pytest.mark.parametrize("count", first(1, [60, 1000]))
def test_leaving_clients_leave_nothing_behind(count: int, model: Path, tmp_path: Path) -> None:
    """Clients that leave in any state of their request leave nothing behind."""

    async def work(cluster: Cluster) -> list[str]:
        # How fast it is, the script says, on a machine of its own.
        result = await cancels(cluster, count, SEED, back_s=30.0)
        assert result.states.get("decoding") and result.states.get("prefilling")
        return result.violations

    on(lambda: Cluster(model, tmp_path), work)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bad_network_changes_no_token(model: Path, tmp_path: Path) -> None:
    """Delay 200 ms, loss 5 %; then what one process says, or what is said to it, is held for 30 s."""
    plan = Plan(seed=SEED, clients=4, orders=16, output_tokens_max=120)

    async def work(cluster: FarCluster) -> list[str]:
        run = Run(cluster, plan, lambda result, seconds: None)
        # A gateway that is cut off for longer than a request may wait says so; its client tries again.
        run.tolerates = lambda seen: seen.error.startswith("HTTP 503")

        async def breaking(clients: list[asyncio.Task[None]]) -> None:
            cluster.weather.delay_s, cluster.weather.loss = 0.2, 0.05
            await asyncio.wait(clients, timeout=15, return_when="FIRST_EXCEPTION")
            await run.check(clients)
            for hold in (
                cluster.control["decode-0"].pass_up,
                cluster.control["prefill-1"].pass_down,
                cluster.ports["decode-1"].pass_up,
                cluster.control["gateway-0"].pass_up,
            ):
                hold.clear()
                await asyncio.wait(clients, timeout=PARTITION_S, return_when="FIRST_EXCEPTION")
                hold.set()
                await run.check(clients)
                await cluster.until("all have found each other again", cluster.is_whole)
            cluster.weather.delay_s = cluster.weather.loss = 0.0

        result = await run.run(breaking)
        assert result.answers > 20
        return result.violations

    on(lambda: FarCluster(model, tmp_path, SEED), work)


class Out(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_long_run_prints_progress_lines(terminal: bool) -> None:
    """A long run prints lines about its progress if its output is not a terminal."""
    out, result = Out(terminal), Result(Plan(), tokens=1200, violations=["a token changed"])
    result.faults = [Fault("decode", "kill", "decode-0.1", 0.0), Fault("–", "none", "nobody", 1.0)]

    async def some() -> None:
        await asyncio.wait({asyncio.create_task(tell(result, out, 0.01))}, timeout=0.1)

    asyncio.run(some())
    said = out.getvalue().splitlines()
    assert not said if terminal else "1 faults, 0 whole answers, 1,200 tokens compared, 1 wrong" in said[0]


# --- what is measured with ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ([1, 2, 3, 4], (0, 0, 0)),
        ([1, 2, 4], (1, 0, 0)),
        ([1, 2, 2, 3, 4], (0, 1, 0)),
        ([1, 9, 3, 4], (0, 0, 1)),
        ([1, 2, 3], (1, 0, 0)),
    ],
)
def test_comparison_counts_wrong_tokens(got: list[int], expected: tuple[int, int, int]) -> None:
    """The comparison counts tokens that are lost, duplicated or changed."""
    want = {0: Choice([1, 2, 3, 4], "abcd", [], "length")}
    text = "".join("abcdefghij"[token - 1] for token in got)
    found = compare(want, {0: Choice(got, text, [], "length")}, whole=True)
    assert (found.lost, found.duplicated, found.changed) == expected


def test_comparison_covers_whole_answers() -> None:
    """The comparison covers text, log probabilities and finish reasons, and accepts part of an answer if told to."""
    want = {0: Choice([1, 2], "ab", [-0.5, -1.0], "stop")}
    assert not compare(want, {0: Choice([1], "a", [-0.5])}, whole=False)
    assert not compare(want, {}, whole=False)
    assert compare(want, {}, whole=True).lost == 2
    assert compare(want, {0: Choice([1, 2], "ax", [-0.5, -1.0], "stop")}, whole=True).changed
    assert compare(want, {0: Choice([1, 2], "ab", [-0.5, -1.0], "length")}, whole=True).changed
    assert compare(want, {0: Choice([1, 2], "ab", [-0.5, -2.0], "stop")}, whole=True).changed


def test_slope_of_growing_process_rises() -> None:
    assert slope([(0, 1), (10, 2), (20, 3)]) == pytest.approx(0.1) and slope([(0, 5), (9, 5)]) == 0
