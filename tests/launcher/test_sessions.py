"""Sessions of several turns: from traces, with the names of their blocks, and played in virtual time."""

from collections import Counter
from pathlib import Path

import pytest

from lab.cluster.run import Played, play
from lab.scenarios.build import build
from lab.scenarios.scenario import parse
from launcher.bench.agents import dealt
from launcher.load.tenants import LoadTenant
from launcher.load.traces import read_sessions
from launcher.sessions import LoadSession, SessionTurn, in_turn, named, synthetic
from proto.limits import HASH_BYTES
from runtime.settings.options import SettingsError

CSV = """session,turn,t_s,prompt_tokens,reused_tokens,output_tokens,think_s
a,0,0,1000,0,50,0
b,0,3,400,0,10,0
a,1,9,1300,1000,20,4.5
a,2,20,500,100,5,2
a,3,30,400,400,5,2
"""


def test_trace_gives_what_each_turn_adds(tmp_path: Path) -> None:
    """A session trace gives the tokens that each turn adds to the conversation before it."""
    file = tmp_path / "agents.csv"
    file.write_text(CSV)
    first, second = read_sessions(str(file))
    assert first.turns == (
        SessionTurn(1000, 50), SessionTurn(250, 20, 4.5), SessionTurn(500, 5, 2.0, restarts=True), SessionTurn(1, 5, 2.0)
    ), "a prompt that is shorter than what came before it adds one token at least"  # fmt: skip
    assert second.turns == (SessionTurn(400, 10),)
    assert read_sessions(str(file), 0.1)[0].turns[1] == SessionTurn(25, 2, 4.5)


def test_json_lines_group_by_session_id(tmp_path: Path) -> None:
    """JSON lines are grouped into sessions by session_id."""
    file = tmp_path / "agents.jsonl"
    line = '{"session_id": "%s", "input_length": %d, "output_length": 7, "delay": 1500, "hash_ids": [1]}\n'
    file.write_text(line % ("x", 10) + "\n" + line % ("y", 5) + line % ("x", 3))
    assert [session.turns for session in read_sessions(str(file))] == [
        (SessionTurn(10, 7, 1.5), SessionTurn(3, 7, 1.5)),
        (SessionTurn(5, 7, 1.5),),
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "session,turn\n", "line 1: no column prompt_tokens"),
        ("a.csv", CSV.replace("1300", "many"), "line 4: not three numbers of tokens"),
        ("a.csv", CSV.replace("4.5", "-4.5"), "line 4: a length or a time is out of bounds"),
        ("a.csv", CSV.splitlines()[0], "has no sessions"),
        ("a.jsonl", '{"session_id": 3}\n', "line 1: "),
        ("missing.csv", None, "cannot read"),
    ],
)
def test_bad_session_trace_names_its_line(tmp_path: Path, name: str, text: str | None, expected: str) -> None:
    """A bad session trace is refused with --trace and the line."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match="--trace: ") as raised:
        read_sessions(str(tmp_path / name))
    assert expected in str(raised.value)


def test_turn_extends_the_hashes_before_it() -> None:
    """A turn's hashes begin with those of the turn before it and of its answer, unless it restarts."""
    session = LoadSession(
        (SessionTurn(40, 20), SessionTurn(30, 6), SessionTurn(100, 4, restarts=True)), system_tokens=32
    )
    first, second, third = named(session, "s", 16, 10_000)
    assert [turn.prompt_tokens for turn in (first, second, third)] == [72, 122, 132]
    assert len(first.prompt_hashes) == 4 * HASH_BYTES and len(first.answer_hashes) == HASH_BYTES
    assert second.prompt_hashes.startswith(first.prompt_hashes + first.answer_hashes)
    assert third.prompt_hashes[: 2 * HASH_BYTES] == first.prompt_hashes[: 2 * HASH_BYTES], "the system prompt"
    assert third.prompt_hashes[2 * HASH_BYTES :][:HASH_BYTES] not in second.prompt_hashes
    other = next(named(session, "t", 16, 10_000))
    assert other.prompt_hashes != first.prompt_hashes
    assert [turn.prompt_tokens for turn in named(session, "s", 16, 100)] == [72], "up to what fits the context"


def test_sessions_go_to_clients_in_turn() -> None:
    """Sessions are dealt to clients in turn."""
    sessions = [LoadSession((SessionTurn(number + 1, 1),)) for number in range(5)]
    assert in_turn(sessions, 2) == [[sessions[0], sessions[2], sessions[4]], [sessions[1], sessions[3]]]
    assert len(in_turn(sessions, 9)) == 5
    made = synthetic(3, 2, 100, 10, 5, 0.5)
    assert made == [LoadSession((SessionTurn(10, 5), SessionTurn(10, 5, 0.5)), 100)] * 3


def test_sessions_follow_tenant_shares() -> None:
    """Sessions are dealt to tenants by their shares."""
    tenants = [LoadTenant("a", share=3.0), LoadTenant("b"), LoadTenant("c", share=2.0)]
    assert Counter(tenant.name for tenant in dealt(tenants, 12)) == {"a": 6, "b": 2, "c": 4}


SCENARIO = """
duration_s = 60.0
[[workers]]
role = "prefill"
prefill_tokens_per_s = 400
[[workers]]
role = "decode"
prefill_tokens_per_s = 400
computes_suffixes = {computes}
fetches = {computes}
[[traffic]]
tenant = "default"
arrivals = "sessions"
trace = "agents.csv"
clients = 12
"""


def played(folder: Path, computes: str) -> Played:
    rows = [
        f"s{number},{turn},0,{800 + 90 * turn},{800 + 90 * (turn - 1)},40,0.5"
        for turn in range(20)
        for number in range(12)
    ]
    (folder / "agents.csv").write_text(
        "\n".join(["session,turn,t_s,prompt_tokens,reused_tokens,output_tokens,think_s", *rows])
    )
    return play(build(parse(SCENARIO.format(computes=computes).encode()), folder))


def test_decode_side_suffixes_speed_sessions_up(tmp_path: Path) -> None:
    """Sessions finish more turns if decode workers compute suffixes, and a seed repeats the run."""
    turns = {computes: len(played(tmp_path, computes).outcomes) for computes in ("true", "false")}
    assert turns["true"] > 1.3 * turns["false"], turns
    again = played(tmp_path, "true")
    assert len(again.outcomes) == turns["true"], "the same file and seed give the same run"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('trace = "agents.csv"\n', ""), "needs a file in trace"),
        (('arrivals = "sessions"', 'arrivals = "closed"'), "trace has no effect"),
        (('role = "prefill"', 'role = "prefill"\ncomputes_suffixes = true'), "computes_suffixes has no effect"),
    ],
)
def test_session_key_without_effect_is_refused(change: tuple[str, str], expected: str) -> None:
    """A trace key that is missing or has no effect in a session scenario is refused."""
    with pytest.raises(ValueError, match=expected):
        parse(SCENARIO.format(computes="true").replace(*change, 1).encode())
