"""Two coordinators on one PostgreSQL: one leads, the other takes over, and clients see the same tokens and exact sums."""

import os
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.admin.tenants import new_key
from launcher.local.ports import free_port
from runtime.lease.lease import LEASE_S
from tests.e2e.netns import Network, network
from tests.e2e.parts import Parts, parts
from tests.postgres_server import PostgresServer, postgres_server

PROMPT, TOKENS = list(range(20, 60)), 160
ROUNDS = int(os.environ.get("CROSSDOCK_LEADER_FAULTS", "12"))
FAULTS = ("kill", "cut", "stop", "restart", "end", "outage")
ADMITTED_S = 5.0  # on a machine that other tests share


class Standbys(Parts):
    """Coordinators `one` and `two`, at addresses of their own."""

    binds: dict[str, str]
    server: PostgresServer
    net: Network | None
    options: tuple[str, ...] = ()
    key = ""

    def begin(self, server: PostgresServer, folder: Path, net: Network | None = None) -> None:
        """`net`: each coordinator is on a host of its own."""
        self.server, self.net = server, net
        self.binds = {
            name: f"tcp://{net.host(name) if net else '127.0.0.1'}:{free_port('127.0.0.1')}" for name in ("one", "two")
        }
        self.coordinator = ",".join(self.binds.values())
        (self.key, key_hash), (self.limited_key, limited_hash) = new_key(), new_key()
        file = folder / "tenants.toml"
        file.write_text(
            f'[tenants.many]\nkeys = ["{key_hash}"]\n'
            f'[tenants.few]\nkeys = ["{limited_hash}"]\nlimits = {{ tokens_per_day = 50 }}\n'
        )
        self.options = ("--tenants", str(file))
        for name in self.binds:
            self.begin_coordinator(name)
        self.start("gateway", *self.options)
        self.start("prefill_worker")
        self.start("decode_worker")
        self.wait_registered(2)

    def begin_coordinator(self, name: str) -> None:
        every, self.coordinator = self.coordinator, self.binds[name]
        options = (*self.options, "--database", self.server.url, "--step-tokens", "64", "--insecure")
        self.start("coordinator", *options, name=name, inside=self.net.inside(name) if self.net else ())
        self.coordinator = every

    @property
    def leader(self) -> str:
        ((holder,),) = self.rows("SELECT holder FROM lease")
        return str(holder).partition("@")[0]

    def ask(self, number: int, key: str = "", max_tokens: int = TOKENS) -> httpx.Response:
        body = {
            "model": self.model_id,
            "prompt": [*PROMPT, 60 + number % 40],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.post(f"{self.base_url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)

    def rows(self, statement: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server.url, options="-c search_path=crossdock") as db:
            return db.execute(statement).fetchall()

    def wait_closed(self) -> None:
        """Until the ledger has no open row."""
        self.wait_idle()
        self.wait_for("no row is open", lambda: not self.rows("SELECT 1 FROM usage WHERE outcome IS NULL"))


class Clients:
    """Four that send one request after another; each answer must be the one from before the faults."""

    def __init__(self, up: Standbys) -> None:
        self.up = up
        self.expected = [self._tokens(up.ask(number)) for number in range(4)]
        self.ended_at: list[float] = []
        self.used = Counter(requests=4, tokens=4 * (len(PROMPT) + 1 + TOKENS))
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._running = [self._pool.submit(self._run, number) for number in range(4)]

    def _tokens(self, answer: httpx.Response) -> list[int]:
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def _run(self, number: int) -> None:
        while not self._enough.is_set():
            answer = self.up.ask(number)
            with self._lock:
                if answer.status_code != 200 or self._tokens(answer) != self.expected[number]:
                    self.wrong.append(answer.text[:300])
                used = answer.json().get("usage", {})
                self.used.update(requests=1, tokens=used.get("total_tokens", 0))
                self.ended_at.append(time.monotonic())

    def wait_for_more(self, count: int = 8) -> None:
        before = len(self.ended_at)
        self.up.wait_for("answers come", lambda: len(self.ended_at) >= before + count)

    def stop(self) -> None:
        self._enough.set()
        for one in self._running:
            one.result(120)
        assert not self.wrong


@contextmanager
def standbys(model: Path, folder: Path) -> Iterator[Standbys]:
    with postgres_server() as server, parts(model, kind=Standbys) as up:
        up.begin(server, folder)
        yield up


def admitted_after(up: Standbys) -> float:
    """Seconds until a new request has its answer."""
    began = time.monotonic()
    assert up.ask(0, max_tokens=1).status_code == 200
    return time.monotonic() - began


def check_sums(up: Standbys, clients: Clients, more: int = 0) -> None:
    """The ledger has what clients got, each request once. `more`: further answers of one token."""
    up.wait_closed()
    amounts = "prompt_tokens + cached_tokens + output_tokens", "prompt_tokens + output_tokens", "charged_tokens"
    sums = ", ".join(f"SUM({amount})::bigint" for amount in amounts)
    ((requests, tokens, *charged),) = up.rows(f"SELECT COUNT(*), {sums} FROM usage WHERE tenant = 'many'")
    expected = clients.used + Counter(requests=more, tokens=more * (len(PROMPT) + 2))
    assert (requests, tokens) == (expected["requests"], expected["tokens"])
    totals = up.rows(
        "SELECT SUM(requests)::bigint, SUM(charged_tokens)::bigint FROM usage_totals WHERE tenant = 'many'"
    )
    assert totals == [(requests, charged[0])] and charged[0] == charged[1]


def probed(up: Standbys, name: str) -> dict[str, int]:
    """The statuses of a coordinator's probes, at the metrics port that it named last."""
    named = [line for line in up.output if line.startswith(f"{name}: ") and "address" in line and "metrics" in line]
    [address] = re.findall(r"127\.0\.0\.1:\d+", named[-1])
    return {path: httpx.get(f"http://{address}{path}", timeout=10.0).status_code for path in ("/live", "/ready")}


@pytest.mark.timeout(180)
def test_standby_takes_over_from_killed_leader(tiny: Path, tmp_path: Path) -> None:
    """The leader is killed under load: answers have the same tokens, sums and rates are exact, and new requests come in."""
    with standbys(tiny, tmp_path) as up:
        assert up.ask(0, up.limited_key, 1).status_code == 200
        clients = Clients(up)
        clients.wait_for_more()
        leader = up.leader
        standby = "two" if leader == "one" else "one"
        assert probed(up, standby) == {"/live": 200, "/ready": 503}, "a supervisor sees that it is alive"
        up.kill(leader)
        took_s = admitted_after(up)
        limited = up.ask(0, up.limited_key, 1)
        assert limited.status_code == 429 and "tokens_per_day" in limited.text
        clients.wait_for_more()
        assert up.leader == standby and probed(up, standby) == {"/live": 200, "/ready": 200}
        clients.stop()
        assert took_s < ADMITTED_S, took_s
        check_sums(up, clients, more=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_hosts_of_leaders_die_again_and_again(tiny: Path, tmp_path: Path) -> None:
    """Leaders are killed, cut off, stopped and told to end, and the database restarts: the same tokens, and exact sums."""
    took: dict[str, list[float]] = defaultdict(list)
    with network() as net:
        address = net.host("db")
        with postgres_server(address, tuple(net.inside("db"))) as server, parts(tiny, kind=Standbys) as up:
            up.begin(server, tmp_path, net)
            clients = Clients(up)
            for number in range(ROUNDS):
                clients.wait_for_more(4)
                leader, fault = up.leader, FAULTS[number % len(FAULTS)]
                hurt(up, leader, fault)
                took[fault].append(admitted_after(up))
                if fault not in ("restart", "outage"):
                    assert up.leader != leader
                mend(up, leader, fault)
            clients.stop()
            check_sums(up, clients, more=ROUNDS)
            terms = sum("leads" in line and '"term"' in line for line in up.output)
            assert up.rows("SELECT term FROM lease") == [(terms,)], "each term had one leader"
    print({fault: [round(one, 1) for one in sorted(times)] for fault, times in took.items()})  # noqa: T201
    every = sorted(one for times in took.values() for one in times)
    assert every[int(0.99 * len(every))] < 2 * ADMITTED_S


def hurt(up: Standbys, leader: str, fault: str) -> None:
    match fault:
        case "kill":
            up.kill(leader)
        case "cut":
            assert up.net is not None
            up.net.cut(leader)
        case "stop":
            up.processes[leader].send_signal(signal.SIGSTOP)
        case "end":
            up.processes[leader].send_signal(signal.SIGTERM)
            assert up.processes.pop(leader).wait(30) == 0
        case "restart" | "outage":
            up.server.stop()
            time.sleep(0.5 if fault == "restart" else LEASE_S + 1.0)
            up.server.start()


def mend(up: Standbys, leader: str, fault: str) -> None:
    """Afterwards the former leader stands by."""
    match fault:
        case "kill" | "end":
            up.begin_coordinator(leader)
            before = len(up.output)
            up.wait_for("it stands by", lambda: any("standing by" in line for line in up.output[before:]))
        case "cut":
            assert up.net is not None
            up.net.heal(leader)
        case "stop":
            up.processes[leader].send_signal(signal.SIGCONT)
