"""Random faults between real processes: `python -m tools.kv_faults --rounds 200 --seed 1`, or `scripts/kv_faults`.

Two senders and two receivers. Each round breaks one transfer from the first sender to the first receiver. Meanwhile an
innocent pair, which shares the process that stays whole, goes on. Then the request is tried again. These conditions must hold:

- bytes that were committed are those of the attempt that was sent, whatever was done;
- a survivor hears of a killed peer within `KILL_NOTICED_S`, of a stopped one within `STOP_NOTICED_S`;
- every block is back when the round is over, and the innocent pair's transfers all arrive;
- the request arrives, at a later attempt.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.kvtransfer import node

POINTS = ("before_offer", "after_accept", "mid_segment", "before_commit", "after_commit")
KILLS = tuple(f"{side}_killed_{point}" for side in ("sender", "receiver") for point in POINTS)
STOPS = ("sender_stopped", "receiver_stopped")
MESSAGES = ("corrupt", "wrong_length", "duplicate", "reorder", "late_incarnation", "unreachable", "cut")
FAULTS = KILLS + STOPS + MESSAGES
TRANSPORTS = ("gloo", "shm", "tcp", "tcp-plain")

KILL_NOTICED_S = 2.0
STOP_NOTICED_S = 2.0  # seconds in which missed heartbeats alone show a stopped peer
STOPPED_S = 5.0
WAIT_S = 60.0
INNOCENT_TRANSFERS = 3
ATTEMPTS_MAX = 4  # the second attempt may still meet a pair that is about to be given up
REQUEST_BLOCKS_MAX, INNOCENT_BLOCKS_MAX = 120, 30
assert ATTEMPTS_MAX * REQUEST_BLOCKS_MAX + INNOCENT_TRANSFERS * INNOCENT_BLOCKS_MAX <= node.BLOCKS
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload([node.__name__])


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Handle:
    """A node, seen from here."""

    role: str
    incarnation: int
    transport: str
    events: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    async def start(self) -> None:
        self.pipe, far = _FORK.Pipe()
        self.process = _FORK.Process(
            target=node.main, args=(self.role, self.incarnation, far, self.transport), daemon=True
        )
        self.process.start()
        far.close()
        self.changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._read)
        self.address = (await self.event("up"))["address"]

    def _read(self) -> None:
        try:
            while self.pipe.poll():
                self.events.append(json.loads(self.pipe.recv_bytes()))
        except (EOFError, ConnectionError):
            self.events.append({"event": "gone", "at": time.monotonic()})
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.changed.set()

    def tell(self, do: str, **more: Any) -> None:
        self.pipe.send_bytes(json.dumps({"do": do, **more}).encode())

    def find(self, event: str, **fields: Any) -> dict[str, Any] | None:
        return next(
            (e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())), None
        )

    async def event(self, event: str, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self.until(lambda: self.find(event, **fields), f"{event} {fields}")
        return found

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        try:
            async with asyncio.timeout(WAIT_S):
                while not (found := condition()):
                    if self.process.exitcode == 1:
                        raise Broken(f"{self.role} {self.incarnation} broke an assertion of its own")
                    self.changed.clear()
                    await self.changed.wait()
                return found
        except TimeoutError:
            raise Broken(f"{self.role} {self.incarnation}: not in {WAIT_S:.0f} s: {what}; {self.events[-5:]}") from None

    async def report(self) -> dict[str, Any]:
        self.events = [e for e in self.events if e["event"] != "report"]
        self.tell("report")
        return await self.event("report")

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        """Whatever state it is in."""
        asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


@dataclass
class FaultCounts:
    """The counts of one fault."""

    rounds: int = 0
    first_attempts_arrived: int = 0
    detection_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """Seconds from the fault until the survivor's blocks were back."""

    def add(self, other: "FaultCounts") -> None:
        self.rounds += other.rounds
        self.first_attempts_arrived += other.first_attempts_arrived
        self.detection_s += other.detection_s
        self.recovery_s += other.recovery_s


class Cluster:
    """The four nodes, and rounds on them. Those that were killed are started again when they are needed."""

    def __init__(self, transport: str, seed: int, number: int) -> None:
        self.transport, self.seed, self.number = transport, seed, number
        self.random = random.Random(f"{transport} {seed} {number}")
        self.incarnations = 0
        self.rounds = 0
        self.nodes: dict[str, Handle] = {}
        self.tallies: dict[str, FaultCounts] = defaultdict(FaultCounts)

    async def close(self) -> None:
        for handle in self.nodes.values():
            handle.end()

    async def ready(self, name: str, fresh: bool = False) -> Handle:
        handle = self.nodes.get(name)
        if handle is not None and (fresh or not handle.alive):
            handle.end()
            handle = None
        if handle is None:
            self.incarnations += 1
            role = "sender" if name[0] == "s" else "receiver"
            handle = self.nodes[name] = Handle(role, self.incarnations, self.transport)
            await handle.start()
        return handle

    async def round(self, fault: str) -> None:
        """Raises `Broken`."""
        self.rounds += 1
        sender, receiver, other_sender, other_receiver = [await self.ready(n) for n in ("s1", "r1", "s2", "r2")]
        for handle in self.nodes.values():
            handle.events.clear()
        tally = self.tallies[fault]
        request_id, blocks = f"r{self.rounds}", self.random.randint(1, REQUEST_BLOCKS_MAX)
        victim, survivor = (receiver, sender) if fault.startswith("receiver") else (sender, receiver)
        innocent = (sender, other_receiver) if victim is receiver else (other_sender, receiver)
        names = [f"i{self.rounds}.{index}" for index in range(INNOCENT_TRANSFERS)]
        _send(*innocent, names[0], 1, self.random.randint(1, INNOCENT_BLOCKS_MAX))

        if fault in KILLS or fault in STOPS:
            await self._hurt(fault, victim, survivor, sender, receiver, request_id, blocks, tally)
        elif fault == "late_incarnation":
            await self._late(sender, receiver, request_id, blocks)
        else:
            if fault in ("unreachable", "cut"):
                if fault == "unreachable":  # a rendezvous comes first
                    receiver = await self.ready("r1", fresh=True)
                    receiver.tell("unreachable")
                innocent = (other_sender, other_receiver)
                names = names[1:]
            sender.tell("harm", request_id=request_id)
            _send(sender, receiver, request_id, 1, blocks, fault)
            await sender.event("result", request_id=request_id, attempt=1)
        for name in names[1 if len(names) == INNOCENT_TRANSFERS else 0 :]:
            _send(*innocent, name, 1, self.random.randint(1, INNOCENT_BLOCKS_MAX))

        done = sender.find("result", request_id=request_id, attempt=1)
        tally.first_attempts_arrived += bool(done and done["ok"])
        sender, receiver = await self.ready("s1"), await self.ready("r1")
        for attempt in range(2, ATTEMPTS_MAX + 1):
            if attempt > 2 or fault != "late_incarnation":
                _send(sender, receiver, request_id, attempt, blocks)
            again = await sender.event("result", request_id=request_id, attempt=attempt)
            if again["ok"]:
                break
        else:
            raise Broken(f"attempt {ATTEMPTS_MAX} failed too: {again['reason']}")
        for name in names:
            result = await innocent[0].event("result", request_id=name)
            if not result["ok"]:
                raise Broken(f"the innocent pair's {name} failed: {result['reason']}")
        if fault == "cut":
            await asyncio.sleep(0.03)  # longer than a cut waits before it strikes
            await self.connect(sender, receiver, other_receiver)
        await self._all_back()
        tally.rounds += 1

    async def connect(self, sender: Handle, *receivers: Handle) -> None:
        """Sends a block over each link, so that the links of a round exist: only a link that exists can be lost. A cut takes
        all connections of its sender, also those to innocent receivers, and some only after the transfer."""
        for number, receiver in enumerate(receivers):
            name = f"m{self.rounds}.{number}"
            for attempt in range(1, ATTEMPTS_MAX + 1):
                _send(sender, receiver, name, attempt, 1)
                if (await sender.event("result", request_id=name, attempt=attempt))["ok"]:
                    break
            else:
                raise Broken(f"{name} does not arrive")

    async def _hurt(
        self, fault: str, victim: Handle, survivor: Handle, sender: Handle, receiver: Handle, request_id: str,
        blocks: int, tally: FaultCounts,
    ) -> None:  # fmt: skip
        stops = fault in STOPS
        point = self.random.choice(POINTS) if stops else fault.split("_killed_")[1]
        late = self.random.uniform(0.0, node.MID_SEGMENT_S) if point in ("mid_segment", "after_commit") else 0.0
        victim.tell(
            "harm", request_id=request_id, point=point, action="stop" if stops else "kill", delay_s=late,
            segments_left=self.random.randrange(-(-blocks // 16)),
        )  # fmt: skip
        await victim.event("armed")  # the order comes by another way than the transfer that it is about
        _send(sender, receiver, request_id, 1, blocks)
        struck = (await victim.event("struck"))["at"]
        lost = await survivor.event("lost", peer=victim.incarnation)
        tally.detection_s.append(lost["at"] - struck)
        if tally.detection_s[-1] > (STOP_NOTICED_S if stops else KILL_NOTICED_S):
            raise Broken(f"the {victim.role}'s loss was noticed after {tally.detection_s[-1]:.2f} s")
        if stops:
            # Blocks that a stopped process may still write to stay in quarantine until it says that it is done, or that is
            # certain.
            await asyncio.sleep(max(0.0, struck + STOPPED_S - time.monotonic()))
            assert victim.process.pid is not None
            os.kill(victim.process.pid, signal.SIGCONT)
        ends = ("result",) if survivor is sender else ("committed", "failed")
        begun = survivor is sender or point not in ("before_offer",)
        if begun:
            end = await survivor.until(
                lambda: next((e for kind in ends if (e := survivor.find(kind, request_id=request_id))), None),
                f"an end of {request_id} that began at {point}",
            )
            tally.recovery_s.append(max(0.0, end["at"] - struck))
        if stops:
            await victim.event("lost", peer=survivor.incarnation)
            if victim is sender:
                await sender.event("result", request_id=request_id, attempt=1)
        else:
            victim.process.join(10)

    async def _late(self, sender: Handle, receiver: Handle, request_id: str, blocks: int) -> None:
        """Stops the sender amid a transfer, replaces it, and lets it go on while its successor is at the second attempt. The
        receiver also gets all messages of the stopped sender once more, as if they had been under way until then."""
        sender.tell("harm", request_id=request_id, point=self.random.choice(POINTS), action="stop", segments_left=0)
        _send(sender, receiver, request_id, 1, blocks)
        await sender.event("struck")
        await receiver.event("lost", peer=sender.incarnation)
        del self.nodes["s1"]
        successor = await self.ready("s1")
        try:
            _send(successor, receiver, request_id, 2, blocks)
            receiver.tell("replay", incarnation=sender.incarnation)
            assert sender.process.pid is not None
            os.kill(sender.process.pid, signal.SIGCONT)
            await successor.event("result", request_id=request_id, attempt=2)
            await sender.event("result", request_id=request_id, attempt=1)
        finally:
            sender.end()

    async def _all_back(self) -> None:
        for name, handle in self.nodes.items():
            deadline = time.monotonic() + WAIT_S
            while (report := await handle.report())["held"]:
                if time.monotonic() > deadline:
                    raise Broken(f"{name} still holds {report['held']} blocks")
                await asyncio.sleep(0.02)
            if report["free"] != node.BLOCKS:
                raise Broken(f"{name} has {report['free']} of {node.BLOCKS} blocks free and holds none")
            wrong = [e for e in handle.events if e["event"] == "committed" and not e["right"]]
            if wrong:
                raise Broken(f"{name} committed wrong bytes: {wrong}")


def _send(sender: Handle, receiver: Handle, request_id: str, attempt: int, blocks: int, fault: str = "") -> None:
    where = {"address": receiver.address, "incarnation": receiver.incarnation}
    sender.tell("send", request_id=request_id, attempt=attempt, blocks=blocks, fault=fault, **where)


async def run(
    transport: str,
    faults: tuple[str, ...],
    rounds: int,
    seed: int,
    on_round: Callable[[str], None] = lambda fault: None,
    at_once: int = 1,
) -> dict[str, FaultCounts]:
    """`rounds` of each fault, mixed, dealt out to `at_once` clusters. Raises `Broken`, with what it takes to run it again."""
    order = [fault for fault in faults for _ in range(rounds)]
    random.Random(f"{transport} {seed}").shuffle(order)
    clusters = [Cluster(transport, seed, number) for number in range(at_once)]
    try:
        async with asyncio.TaskGroup() as group:
            for cluster in clusters:
                group.create_task(_rounds(cluster, order[cluster.number :: at_once], on_round))
    except* Broken as broken:
        raise broken.exceptions[0] from None
    total: dict[str, FaultCounts] = defaultdict(FaultCounts)
    for cluster in clusters:
        for fault, tally in cluster.tallies.items():
            total[fault].add(tally)
    return total


async def _rounds(cluster: Cluster, order: list[str], on_round: Callable[[str], None]) -> None:
    try:
        await cluster.connect(await cluster.ready("s1"), await cluster.ready("r1"))
        for number, fault in enumerate(order):
            try:
                await cluster.round(fault)
            except Broken as error:
                where = f"{cluster.transport}, seed {cluster.seed}, cluster {cluster.number}, round {number}"
                raise Broken(f"{where} ({fault}): {error}") from None
            on_round(fault)
    finally:
        await cluster.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="kv_faults", description="Break KV transfers between real processes, at random."
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each fault (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: every one")
    parser.add_argument("--fault", choices=FAULTS, action="append", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="clusters side by side (default 1); most rounds wait"
    )
    asked = parser.parse_args()
    if asked.rounds < 1 or asked.at_once < 1:
        parser.error(f"--{'rounds' if asked.rounds < 1 else 'at-once'}: at least 1")
    console, status = Console(), 0
    faults = tuple(asked.fault or FAULTS)
    for transport in asked.transport or TRANSPORTS:
        try:
            _show(transport, _with_progress(transport, faults, asked, console), console)
        except Broken as error:
            console.print(f"[red]broken[/red] {escape(str(error))}", highlight=False)
            status = 1
    return status


def _with_progress(
    transport: str, faults: tuple[str, ...], asked: argparse.Namespace, console: Console
) -> dict[str, FaultCounts]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(transport, total=len(faults) * asked.rounds)
        return asyncio.run(
            run(transport, faults, asked.rounds, asked.seed, lambda fault: progress.advance(task), asked.at_once)
        )


def _show(transport: str, tallies: dict[str, FaultCounts], console: Console) -> None:
    table = Table(
        "fault", "rounds", "arrived at once", "noticed, p50", "noticed, max", "blocks back, max", title=transport
    )
    for fault, tally in sorted(tallies.items(), key=lambda item: FAULTS.index(item[0])):
        noticed = tally.detection_s
        shown = [f"{statistics.median(noticed) * 1e3:.0f} ms", f"{max(noticed) * 1e3:.0f} ms"] if noticed else ["", ""]
        back = f"{max(tally.recovery_s) * 1e3:.0f} ms" if tally.recovery_s else ""
        table.add_row(fault, str(tally.rounds), str(tally.first_attempts_arrived), *shown, back)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
