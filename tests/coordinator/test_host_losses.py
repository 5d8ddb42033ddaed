"""Hosts that are lost with all their workers: no request fails for it, and none is resumed on a host that is going."""

import msgspec
import pytest

from coordinator.events import PeerDown, PeerUp
from proto.errors import Reject
from proto.messages import HandedOver, Rejected, Role, Step, StepDone
from proto.progress import DecodeProgress, Joined
from scheduler.request import Suspicion
from tests.coordinator.test_suspects import let_go
from tests.coordinator.world import Harness, submit, worker_hello

SILENT = "no heartbeat for 1.8 s"


class Hosts:
    """Hosts "a", "b", ... with workers of both roles around a real core, and one stream that moves between them."""

    def __init__(self, hosts: str, prefill: int = 1, decode: int = 1) -> None:
        self.h = Harness.make(prefill=0, decode=0)
        self.attempt = 1
        self.hosts: dict[int, str] = {}
        for at, host in enumerate(hosts):
            for number in range(prefill):
                self.start(Role.PREFILL, 100 * (at + 1) + number, host)
            for number in range(decode):
                self.start(Role.DECODE, 100 * (at + 1) + 50 + number, host)
        self.h.receive(1, submit("a", max_tokens=2000))

    def start(self, role: Role, incarnation: int, host: str) -> None:
        self.hosts[incarnation] = host
        self.h.post(PeerUp(incarnation, msgspec.structs.replace(worker_hello(role, incarnation), host=host)))

    def lose(self, incarnation: int, reason: str = "send failed: Host unreachable") -> None:
        self.h.post(PeerDown(incarnation, reason))
        let_go(self.h)

    def resume(self, tokens: int = 0) -> None:
        """The gateway submits the stream again, with so many tokens of its answer."""
        self.attempt += 1
        self.h.receive(1, submit("a", 10 + tokens, attempt=self.attempt, max_tokens=2000, resumed=tokens))

    def decode(self, tokens: int) -> None:
        """Computes the prompt, hands it over, and emits `tokens`."""
        prefill = self.at_prefill
        while self.h.core.cluster.requests["a"].state == "prefilling":
            for step in self.h.take(Step, prefill):
                assert isinstance(step, Step)
                self.h.receive(prefill, StepDone(step.step_id, step.chunks, 10.0, 0))
        self.h.receive(prefill, HandedOver("a", self.attempt, 100, 1.0))
        if tokens:
            progress = DecodeProgress(tokens, 0, 0, joined=(Joined("a", self.attempt, 0),))
            self.h.receive(self.at_decode, progress)

    @property
    def at_prefill(self) -> int:
        return self.h.core.cluster.requests["a"].prefill_incarnation

    @property
    def at_decode(self) -> int:
        return self.h.core.cluster.requests["a"].decode_incarnation

    def of_host(self, host: str) -> list[int]:
        return [incarnation for incarnation, its in self.hosts.items() if its == host]

    @property
    def lives(self) -> bool:
        return not self.h.ended and not self.h.take(Rejected)


@pytest.mark.parametrize("reason", [SILENT, "send failed: Host unreachable"])
def test_lost_host_ends_no_stream(reason: str) -> None:
    """The decode worker of a host goes, the stream is resumed, and then the prefill worker that has its prompt goes."""
    hosts = Hosts("a", decode=2)
    hosts.decode(900)
    hosts.lose(hosts.at_decode, reason)
    hosts.resume(900)
    hosts.h.now += 0.05
    hosts.lose(hosts.at_prefill, reason)
    assert hosts.lives and hosts.h.core.cluster.requests["a"].state == "interrupted"
    assert hosts.h.core.cluster.requests["a"].losses == (0 if reason == SILENT else 1)


@pytest.mark.parametrize("reason", [SILENT, "send failed: Host unreachable"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_stream_survives_losses_of_all_hosts(reason: str, first: str) -> None:
    """Hosts are lost one after the other, each while the stream's prompt is computed there."""
    hosts = Hosts("abcdef")
    hosts.decode(900)
    for host in "abcde":
        state = hosts.h.core.cluster.requests["a"].state
        on = hosts.at_decode if state == "decoding" else hosts.at_prefill
        of_host = sorted(hosts.of_host(hosts.hosts[on]), reverse=first == "decode")
        for incarnation in of_host:
            hosts.lose(incarnation, reason)
            hosts.h.now += 0.02
            if hosts.h.core.cluster.requests["a"].state == "interrupted":
                hosts.resume(900)
                assert hosts.hosts[hosts.at_prefill] != hosts.hosts[on] or host == "e"
        assert hosts.lives and hosts.h.core.cluster.requests["a"].suspicion is None, host
    hosts.decode(10)
    assert hosts.h.core.cluster.requests["a"].state == "decoding"


def test_other_hosts_get_resumed_streams() -> None:
    """A stream is not resumed on a host that has just lost a worker, in either role, though that has the least to do."""
    hosts = Hosts("ab", prefill=2, decode=2)
    hosts.decode(900)
    gone = hosts.hosts[hosts.at_decode]
    hosts.lose(hosts.at_decode)
    hosts.resume(900)
    assert gone not in (hosts.hosts[hosts.at_prefill], hosts.hosts[hosts.at_decode])


def test_lost_prefill_host_keeps_no_room() -> None:
    """Room is not kept on a decode worker whose host goes, and is kept where there is no other host."""
    for names in ("a", "ab"):
        hosts = Hosts(names, prefill=2)
        host = hosts.hosts[hosts.at_decode]
        while hosts.hosts[hosts.at_prefill] != host:
            hosts.lose(hosts.at_prefill, SILENT)
            hosts.resume()
        hosts.lose(hosts.at_prefill)
        assert bool(hosts.h.core.cluster.pools["m"].retained) == (names == "a")


def test_host_with_two_lost_decode_workers() -> None:
    """A stream that loses two decode workers of one host has lost one, and the third loss there counts again."""
    hosts = Hosts("a", decode=4)
    for losses in (1, 1, 2):
        hosts.decode(0)
        hosts.lose(hosts.at_decode)
        assert hosts.h.core.cluster.requests["a"].suspicion == Suspicion(losses) if losses == 1 else not hosts.lives
        if losses == 1:
            hosts.resume()
    assert hosts.h.ended == {"a": ["failed"]}


def test_deadly_prompt_on_many_hosts_fails() -> None:
    """A prompt that ends one worker of each host fails with the second host."""
    hosts = Hosts("abc")
    for _ in range(2):
        hosts.lose(hosts.at_prefill)
        if hosts.h.core.cluster.requests:
            hosts.resume()
    assert [said.reason for said in hosts.h.take(Rejected) if isinstance(said, Rejected)] == [Reject.LOSES_WORKERS]


def test_reconnected_process_counts_for_nothing() -> None:
    """A worker whose connection broke joins again: its requests did not end it."""
    hosts = Hosts("ab")
    lost = hosts.at_prefill
    hosts.lose(lost)
    assert hosts.h.core.cluster.requests["a"].suspicion is not None
    hosts.start(Role.PREFILL, lost, hosts.hosts[lost])
    assert hosts.h.core.cluster.requests["a"].suspicion is None and not hosts.h.core.cluster.pools["m"].suspects


def test_restarted_workers_count_again_later() -> None:
    """The workers of one supervisor are restarted: what ends them again some seconds later is counted."""
    hosts = Hosts("a")
    hosts.lose(hosts.at_prefill)
    hosts.h.now += 8.0
    hosts.start(Role.PREFILL, 101, "a")
    hosts.resume()
    hosts.lose(101)
    assert hosts.h.ended == {"a": ["failed"]}


def test_begun_answer_fails_with_third_loss() -> None:
    """A stream whose answer had begun is not at fault for two losses, as a prompt would be, but for three."""
    hosts = Hosts("abcd")
    hosts.decode(900)
    hosts.lose(hosts.at_decode)
    hosts.resume(900)
    hosts.lose(hosts.at_prefill)
    assert hosts.lives and hosts.h.core.cluster.requests["a"].losses == 2
    hosts.resume(900)
    hosts.lose(hosts.at_prefill)
    assert hosts.h.ended == {"a": ["failed"]}
