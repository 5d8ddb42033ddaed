"""Sessions of several turns as traffic: each turn comes some time after the end of the one before. Pure.

Each client plays one session after the other, so the load depends on how fast answers come.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from lab.play.request import Sent, clients_of
from launcher.sessions import LoadSession, in_turn

SHIFT = 0.618  # of the trace, by which requests of no session come later when they come again
TPOT_S, TOKEN_S = 0.03, 0.0005  # assumed, to estimate when a turn might come and choose parts of the traffic


def played(
    sessions: Sequence[LoadSession], clients: int, context_tokens: int, duration_s: float
) -> tuple[list[Sent], int]:
    """Returns the turns sorted by about when they come, and how many are left out because they do not fit the context. Turns
    that might come after `duration_s` are not played."""
    rows: list[tuple[int, Sent]] = []
    number = left_out = 0
    for client, own in enumerate(in_turn(sessions, clients)):
        at_s = 0.0
        for session in own:
            reused = 0
            for place, turn in enumerate(session.turns):
                if not place or turn.restarts:
                    reused, number = 0, number + 1
                prompt = (reused or session.system_tokens) + turn.new_tokens
                if prompt + turn.output_tokens > context_tokens:
                    left_out += len(session.turns) - place
                    break
                at_s += turn.think_s
                if at_s > duration_s:
                    break
                one = Sent(at_s, prompt, turn.output_tokens, session=number, reused_tokens=reused, think_s=turn.think_s)
                rows.append((client, one))
                at_s += TOKEN_S * turn.new_tokens + TPOT_S * turn.output_tokens
                reused = prompt + turn.output_tokens
    return chained(rows), left_out


def chained(rows: Iterable[tuple[int, Sent]]) -> list[Sent]:
    """Returns the turns sorted by their times; each follows the one before it of the same client."""
    last: dict[int, int] = {}
    found = []
    for number, (client, one) in enumerate(sorted(rows, key=lambda row: row[1].at_s)):
        found.append(one._replace(follows=last.get(client, -1)))
        last[client] = number
    return found


def beside(turns: Iterable[tuple[int, Sent]], single: Iterable[Sent]) -> list[Sent]:
    """Returns the turns, with the numbers of their clients, together with requests of no session."""
    return chained([*turns, *((-1 - number, one) for number, one in enumerate(single))])


def apart(sent: Sequence[Sent]) -> tuple[list[tuple[int, Sent]], list[Sent]]:
    """Returns what `beside` took."""
    turns = [(client, one) for client, one in zip(clients_of(sent), sent, strict=True) if one.session]
    return turns, [one for one in sent if not one.session]


def first_turns(sent: Sequence[Sent], requests: int) -> list[Sent]:
    """Returns about `requests` requests: the first turns of each client, and the first of the requests of no session."""
    share = requests / len(sent)
    turns, single = apart(sent)
    counts = Counter(client for client, _ in turns)
    seen = Counter[int]()
    rows = []
    for client, one in turns:
        seen[client] += 1
        if seen[client] <= max(share * counts[client], 1):
            rows.append((client, one))
    return beside(rows, single[: round(share * len(single))])


def more_clients(sent: Sequence[Sent], factor: float) -> list[Sent]:
    """Returns the traffic of `factor` times as many clients: the same clients again, with sessions of their own, or fewer of
    them. There are also `factor` times as many requests of no session."""
    turns, single = apart(sent)
    names = sorted({client for client, _ in turns})
    many = max(round(factor * len(names)), 1)
    sessions = max(one.session for one in sent) + 1
    rows = []
    for copy in range(-(-many // len(names))):
        chosen = set(names[: many - copy * len(names)])
        for client, one in turns:
            if client in chosen:
                rows.append((client + copy * len(sent), one._replace(session=one.session + copy * sessions)))
    return beside(rows, _more(single, factor))


def _more(single: Sequence[Sent], factor: float) -> list[Sent]:
    """Returns `factor` times as many requests in the same time: some are left out, or come again at other moments."""
    found = []
    for copy in range(ceil(factor) if single else 0):
        begin_s, span_s = single[0].at_s, single[-1].at_s - single[0].at_s + 1e-9
        share = min(factor - copy, 1.0)
        for number, one in enumerate(single):
            if int((number + 1) * share) > int(number * share):
                later_s = one.at_s - begin_s + SHIFT * copy * span_s
                found.append(one._replace(at_s=begin_s + later_s % span_s))
    return found
