"""More conversations than the caches hold: some are paused, and the others find their KV."""

from pathlib import Path

from lab.cluster.run import Played, _Player
from lab.scenarios.build import build
from lab.scenarios.scenario import parse
from scheduler.lifecycle import RequestState
from scheduler.waiting.tenant_work import UNCOMPUTED, WAITING

SCENARIO = """
duration_s = 40.0
settle_s = {settle_s}

[priority_classes.standard]
weight = 1.0

[[workers]]
role = "prefill"
prefill_tokens_per_s = 10000
kv_tokens = 50000

[[workers]]
role = "decode"
prefill_tokens_per_s = 10000
kv_tokens = 50000

[[traffic]]
name = "agents"
arrivals = "closed"
clients = {clients}
turns = 12
think_s = 1.0
prompt_tokens = "uniform:800-1600"
output_tokens = "uniform:20-60"
"""


def player(clients: int, settle_s: float = 1.0) -> _Player:
    return _Player(build(parse(SCENARIO.format(clients=clients, settle_s=settle_s).encode()), Path()))


def turns_and_p90_s(played: Played) -> tuple[int, float]:
    came = [one for one in played.outcomes if one.came_s >= 10 and one.ttft_s is not None]
    return len(came), sorted(one.ttft_s or 0.0 for one in came)[len(came) * 9 // 10]


def test_conversations_beyond_caches_are_paused() -> None:
    """With three times the conversations that fit, most turns find their KV. Without pauses, 42 come, at a p90 of 13 s."""
    turns, p90_s = turns_and_p90_s(player(18).play(lambda now_s: None))
    assert turns > 48 and p90_s < 7.0


def test_paused_turns_can_be_cancelled() -> None:
    """A paused turn that is cancelled leaves nothing, and all others end."""
    playing, cancelled = player(18, 120.0), list[str]()

    def look(now_s: float) -> None:
        paused = playing._cluster.core.cluster.pools["m"].paused
        if len(paused) > 2 and len(cancelled) < 5:
            cancelled.append(list(paused)[1])
            playing._cluster.cancel(cancelled[-1])
            assert cancelled[-1] not in paused

    outcomes = playing.play(look).outcomes
    core = playing._cluster.core
    assert len(cancelled) == 5 and not core.cluster.requests and not core.cluster.pools["m"].paused
    work = core.cluster.queues["m"].line.work
    assert not work.total(WAITING) and not work.total(UNCOMPUTED)
    states = [one.state for one in outcomes]
    assert states.count(RequestState.CANCELLED) == 5 and states.count(RequestState.FINISHED) == len(states) - 5
