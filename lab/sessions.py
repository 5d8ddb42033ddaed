"""Sessions of several turns as traffic: each turn comes some time after the end of the one before. Pure.

Each client plays one session after the other, so the load depends on how fast answers come.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lab.play.request import Sent, clients_of
from launcher.sessions import LoadSession, in_turn

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


def first_turns(sent: Sequence[Sent], requests: int) -> list[Sent]:
    """Returns about `requests` turns: the first ones of each client."""
    share = requests / len(sent)
    clients = np.array(clients_of(sent))
    counts = dict(zip(*np.unique(clients, return_counts=True), strict=True))
    seen: dict[int, int] = {}
    rows = []
    for client, one in zip(clients.tolist(), sent, strict=True):
        seen[client] = seen.get(client, 0) + 1
        if seen[client] <= max(share * counts[client], 1):
            rows.append((client, one))
    return chained(rows)


def more_clients(sent: Sequence[Sent], factor: float) -> list[Sent]:
    """Returns the traffic of `factor` times as many clients: the same clients again, with sessions of their own, or fewer of
    them."""
    clients = clients_of(sent)
    names = sorted(set(clients))
    many = max(round(factor * len(names)), 1)
    sessions = max(one.session for one in sent) + 1
    rows = []
    for copy in range(-(-many // len(names))):
        chosen = set(names[: many - copy * len(names)])
        for client, one in zip(clients, sent, strict=True):
            if client in chosen:
                session = one.session + copy * sessions if one.session else 0
                rows.append((client + copy * len(sent), one._replace(session=session)))
    return chained(rows)
