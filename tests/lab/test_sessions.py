"""Sessions in the simulator: turns come when answers have come, and what a turn begins with need not be computed again."""

from pathlib import Path

import numpy as np
import pytest

from lab.advise import Slo, Workers
from lab.commands.settings import TuneSettings
from lab.commands.traffic import fitted_traffic
from lab.commands.tune import as_it_came, usual_stall_share
from lab.goals import Goals
from lab.play.options import RunOptions
from lab.play.player import Player
from lab.play.request import Sent, clients_of
from lab.search import Space, draws, search
from lab.sessions import apart, beside, first_turns, more_clients, played
from lab.traffic import at_load, excerpt
from launcher.sessions import LoadSession, SessionTurn
from runtime.settings.options import SettingsError
from tests.lab.profiles import GPU

CONTEXT = 32_768
LAYOUTS = (Workers(1, 1), Workers(1, 3), Workers(2, 2), Workers(0, 0, 2))


def agents(sessions: int, turns: int, think_s: float = 1.0) -> list[Sent]:
    one = [SessionTurn(2000, 80), *(SessionTurn(200, 80, think_s) for _ in range(turns - 1))]
    return played([LoadSession(tuple(one))] * sessions, sessions, CONTEXT, 1e9)[0]


@pytest.mark.parametrize("workers", LAYOUTS)
@pytest.mark.parametrize("stall_share", [0.0, 0.5])
def test_turn_waits_for_the_answer(workers: Workers, stall_share: float) -> None:
    """A turn comes after the end of the turn before it and its think time."""
    sent = agents(6, 8)
    player = Player(GPU, workers, sent, RunOptions(stall_share=stall_share))
    outcome = player.run()
    assert not np.isnan(outcome.ttft_ms).any()
    for job in player.jobs:
        before = job.sent.follows
        if before >= 0:
            assert job.at_s == pytest.approx(player.jobs[before].end_s + job.sent.think_s)
    assert outcome.clients == tuple(clients_of(sent))


@pytest.mark.parametrize("workers", LAYOUTS)
@pytest.mark.parametrize("stall_share", [0.0, 0.5])
def test_reused_prefix_is_computed_once(workers: Workers, stall_share: float) -> None:
    """The reused part of a turn's prompt is computed once if there is room."""
    sent = agents(4, 8)
    outcome = Player(GPU, workers, sent, RunOptions(stall_share=stall_share)).run()
    reused = np.array([one.reused_tokens for one in sent])
    later = reused > 0
    assert (outcome.cached_tokens <= reused).all()
    assert (outcome.cached_tokens[later] > reused[later] - 100).mean() > 0.9
    forgotten = [one._replace(session=0, reused_tokens=0) for one in sent]
    without = Player(GPU, workers, forgotten, RunOptions()).run()
    assert np.median(outcome.ttft_ms[later]) < np.median(without.ttft_ms[later])


def test_evicted_prefix_is_recomputed() -> None:
    """Prefixes are computed again where there is no room to keep them."""
    small = GPU.replaced(
        **{name: type(GPU.decode_capacity)(600, 16, 64, 8192) for name in ("prefill_capacity", "decode_capacity")}
    )
    few, many = agents(2, 8), agents(12, 8)
    shares = [
        outcome.cached_tokens.sum() / outcome.prompt_tokens.sum()
        for outcome in (Player(small, Workers(1, 1), sent).run() for sent in (few, many))
    ]
    assert shares[0] > 2 * shares[1]


def test_new_conversation_reuses_nothing() -> None:
    """A restarted conversation reuses nothing, and turns that do not fit the context are counted."""
    turns = [
        SessionTurn(1000, 100),
        SessionTurn(50, 100),
        SessionTurn(500, 100, restarts=True),
        SessionTurn(30_000, 100),
    ]
    sent, left_out = played(
        [LoadSession((*turns, SessionTurn(1, 1))), LoadSession((SessionTurn(7, 5),))], 1, 20_000, 1e9
    )
    assert [(one.prompt_tokens, one.reused_tokens) for one in sent] == [(1000, 0), (1150, 1100), (500, 0), (7, 0)]
    assert left_out == 2
    assert [one.follows for one in sent] == [-1, 0, 1, 2]
    assert sent[0].session == sent[1].session
    assert len({one.session for one in sent}) == 3


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 2.0, 3.0])
def test_load_scales_the_clients(factor: float) -> None:
    """The load factor scales the number of clients."""
    sent = agents(8, 5)
    more = at_load(sent, factor)
    assert len(set(clients_of(more))) == round(8 * factor)
    assert len(more) == round(len(sent) * factor)
    assert len({one.session for one in more}) == round(8 * factor)
    assert more == more_clients(sent, factor)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 2.0, 3.0])
def test_chats_beside_sessions_are_scaled(factor: float) -> None:
    """The load factor scales single requests together with the sessions beside them, in the same time; an excerpt has the first
    of both, and no session waits for a single request."""
    chats = [Sent(0.1 * number, 300 + number, 20) for number in range(400)]
    sent = beside(apart(agents(8, 5))[0], chats)
    more = at_load(sent, factor)
    turns, single = apart(more)
    assert len(turns) == round(40 * factor) and len(single) == 400 * factor
    assert len({client for client, _ in turns}) == round(8 * factor)
    assert max(one.at_s for one in single) < 40.0 and len({one.at_s for one in single}) > 0.9 * len(single)
    assert all(one.session and more[one.follows].session == one.session for one in more if one.follows >= 0)
    assert at_load(sent, 1.0) == sent
    turns, single = apart(excerpt(sent, 220, 30.0))
    assert (len(turns), len(single)) == (16, 200) and single == chats[:200]
    outcome = Player(GPU, Workers(1, 1), sent).run()
    assert len(set(draws(outcome, outcome.ttft_ms, 0))) > 100


def test_excerpt_has_first_turns() -> None:
    """An excerpt has the first turns of each client."""
    sent = agents(8, 10)
    part = excerpt(sent, 24, 30.0)
    assert part == first_turns(sent, 24)
    assert len(part) == 24
    assert len(set(clients_of(part))) == 8


def test_search_counts_turns_per_second() -> None:
    """A search over sessions reports the turns per second of its simulated run."""
    sent = agents(12, 6, 0.2)
    found = search(GPU, sent, Goals(Slo(300.0, 30.0)), Space(2, seqs_max=(0, 8)))
    outcome = found.best.outcome
    assert outcome is not None and found.best.whole
    assert found.requests_per_s_of(found.best) == pytest.approx(len(sent) / outcome.span_s)
    assert found.rates[1.0] == found.requests_per_s_of(found.best)
    assert found.rates[0.5] < found.rates[1.0] < found.rates[2.0]
    assert len({one.candidate for one in found.ranked}) == len(found.ranked) > 2
    came = as_it_came(sent, outcome)
    assert [one.at_s for one in came] == sorted(outcome.at_s.tolist())


def settings(file: Path, **options: object) -> TuneSettings:
    return TuneSettings(trace=str(file), **options)  # type: ignore[arg-type]


def test_session_file_is_recognised(tmp_path: Path) -> None:
    """A file of sessions is recognised by its columns, and a speed is refused for it."""
    file = tmp_path / "agents.csv"
    file.write_text(
        "session,turn,t_s,prompt_tokens,reused_tokens,output_tokens,think_s\n"
        "a,0,0,900,0,50,0\na,1,9,1000,900,50,4\nb,0,0,800,0,60,0\n"
    )
    found = fitted_traffic(settings(file), GPU)
    assert len(found.sent) == 3
    assert max(clients_of(found.sent)) > 0
    assert max(clients_of(fitted_traffic(settings(file, sessions=1), GPU).sent)) == 0
    with pytest.raises(SettingsError, match="not for sessions"):
        fitted_traffic(settings(file, speed=2.0), GPU)
    lines = tmp_path / "agents.jsonl"
    lines.write_text('{"session_id": "a", "input_length": 900, "output_length": 50}\n' * 2)
    assert len(fitted_traffic(settings(lines), GPU).sent) == 2


def test_stall_share_follows_the_device() -> None:
    """The usual stall share is above zero only where workers run on CPUs."""
    assert usual_stall_share(GPU) == 0
    assert usual_stall_share(GPU.replaced(about={"device": "cpu"})) == 0.5


def test_impossible_limits_get_an_answer() -> None:
    """A search recommends one worker and names a limit where no request can keep the SLO."""
    found = search(GPU, agents(4, 4), Goals(Slo(0.1, 0.1)), Space(3))
    assert found.best.attainment == 0
    assert found.best.candidate.workers.total == 1, "more workers serve no more"
    assert found.best.limit.name and not found.headroom
