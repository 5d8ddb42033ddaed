"""Real processes, killed with real signals: streams go on with exactly the tokens they would have had."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import Live, Served, cut, live, shm_connections, sockets_between
from tests.helpers import first

PROMPT = list(range(20, 90))
TOKENS = 300
SAMPLED = {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
AWAY_S = 1.05  # after which peers leave, at the heartbeat of these clusters


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(
        tiny, tmp_path_factory.mktemp("state"), "--prefill", "2", "--decode", "2", STEP_TOKENS="32", HEARTBEAT_MS="300"
    ) as one:
        yield one


class Background(threading.Thread):
    """A request that runs while the test breaks something."""

    def __init__(self, up: Served, prompt: list[int] = PROMPT, tokens: int = TOKENS, **options: Any) -> None:
        super().__init__()
        self.up = up
        self.prompt, self.tokens = prompt, tokens
        self.options = options
        self.ids: list[int] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            self.ids = self.up.token_ids(self.prompt, self.tokens, ignore_eos=True, **self.options)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def result(self) -> list[int]:
        self.join(240)
        assert not self.is_alive() and not self.error, self.error
        return self.ids


def busy(up: Served, state: str) -> bool:
    return up.status().running.get(state, 0) > 0


def without(up: Live, killed: set[int]) -> bool:
    """All four workers are up, none of them killed: until a loss is noticed, the lost one is still in the table."""
    pids = {worker.pid for worker in up.status().workers}
    return len(pids) == 4 and not pids & killed


@pytest.mark.parametrize(
    ("role", "options"),
    first(2, [("decode_worker", SAMPLED), ("prefill_worker", {}), ("decode_worker", {}), ("prefill_worker", SAMPLED)]),
    ids=["decode, sampled", "prefill, greedy", "decode, greedy", "prefill, sampled"],
)
def test_killed_worker_changes_no_token(up: Live, role: str, options: dict[str, Any]) -> None:
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True, **options)
    streams = [Background(up, **options) for _ in range(4)]
    up.wait_for("streams decode", lambda: busy(up, "decoding"))
    victim = up.one(role)
    victim.send_signal(signal.SIGKILL)
    assert [stream.result() for stream in streams] == [expected] * 4
    up.wait_for("another is in its place", lambda: without(up, {victim.pid}))
    up.wait_idle()


def test_stopped_decode_worker_is_fenced(up: Live) -> None:
    """A stopped decode worker is fenced, changes no token with late frames and registers again."""
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
    streams = [Background(up) for _ in range(4)]
    up.wait_for("streams decode", lambda: busy(up, "decoding"))
    victim = up.one("decode_worker")
    victim.send_signal(signal.SIGSTOP)
    try:
        up.wait_for("it is taken for lost", lambda: len(up.status().workers) == 3)
    finally:
        victim.send_signal(signal.SIGCONT)
    assert [stream.result() for stream in streams] == [expected] * 4
    up.wait_for("it has registered again", lambda: len(up.status().workers) == 4)
    up.wait_idle()


def test_killed_coordinator_breaks_no_stream(up: Live) -> None:
    """Running streams end with the right tokens although the coordinator is killed."""
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
    streams = [Background(up) for _ in range(4)]
    up.wait_for("streams decode", lambda: busy(up, "decoding"))
    up.one("coordinator").send_signal(signal.SIGKILL)
    assert [stream.result() for stream in streams] == [expected] * 4
    up.wait_registered(4)
    assert up.token_ids(PROMPT, TOKENS, ignore_eos=True) == expected
    up.wait_idle()


def test_resumed_coordinator_breaks_no_stream(up: Live) -> None:
    """A coordinator that was stopped and goes on starts afresh and breaks no stream."""
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
    stopped = up.one("coordinator")
    streams = [Background(up) for _ in range(8)]
    up.wait_for("streams decode", lambda: busy(up, "decoding"))
    stopped.send_signal(signal.SIGSTOP)
    try:
        time.sleep(2 * AWAY_S)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert [stream.result() for stream in streams] == [expected] * 8
    up.wait_registered(4)
    counters = up.status().counters
    assert counters["absences"] == 1 and not any(key.startswith("interrupted_") for key in counters), counters
    assert up.one("coordinator").pid == stopped.pid
    up.wait_idle()


def cut_transfers(up: Live) -> int:
    """Every connection of the data plane; how many there were."""
    known = {int(up.coordinator.rsplit(":", 1)[1]), int(up.tokens.rsplit(":", 1)[1]), up.port}
    cuts = 0
    for prefill in up.processes()["prefill_worker"]:
        for decode in up.processes()["decode_worker"]:
            for descriptor in [*sockets_between(prefill, decode, known), *shm_connections(prefill)]:
                try:
                    cut(prefill, descriptor)
                except PermissionError:
                    pytest.skip("not permitted to touch another process's sockets")
                except OSError:
                    continue
                cuts += 1
    return cuts


def test_cut_transfer_group_is_replaced(up: Live) -> None:
    """A transfer group that is cut is replaced by a new one, and answers stay the same."""
    prompts = [[30 + number, *PROMPT] for number in range(5)]  # none is cached
    answers = [up.token_ids(prompts[0], 20, ignore_eos=True)]
    moved_before = up.wait_idle().counters["kv_bytes_moved"]
    assert cut_transfers(up) > 0, "there was no connection to cut"
    answers += [up.token_ids(prompt, 20, ignore_eos=True) for prompt in prompts[1:]]
    assert up.wait_idle().counters["kv_bytes_moved"] > moved_before
    assert [up.token_ids(prompt, 20, ignore_eos=True) for prompt in prompts] == answers, "computed where their KV is"


def test_transfers_broken_midway_change_no_token(up: Live) -> None:
    prompts = [[20 + (number + at) % 200 for at in range(400)] for number in range(6)]
    expected = [up.token_ids(prompt, 30, ignore_eos=True) for prompt in prompts]
    up.wait_idle()
    again = [[5 + number, *prompt[1:]] for number, prompt in enumerate(prompts)]  # nothing of these is cached
    alone = [up.token_ids(prompt, 30, ignore_eos=True) for prompt in again[:1]]
    streams = [Background(up, prompt=prompt, tokens=30) for prompt in again + prompts]
    up.wait_for("prompts are computed and sent", lambda: busy(up, "prefilling"))
    cut_transfers(up)
    answers = [stream.result() for stream in streams]
    assert answers[6:] == expected and answers[:1] == alone
    up.wait_idle()


def test_service_returns_after_decode_kills(up: Live) -> None:
    """Requests are served again after all decode workers were killed."""
    killed = {victim.pid for victim in up.processes()["decode_worker"]}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    up.wait_for("others are in their place", lambda: without(up, killed))
    up.wait_ready()
    assert len(up.token_ids(PROMPT, 5, ignore_eos=True)) == 5
