"""KV between two real processes, byte for byte; and the survivor's side of a SIGKILL amid the stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.ports import ReceiverOwner
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Accept, Announce, Commit, Offer
from proto.messages import Message
from tests.kvtransfer import ends, far_end
from tests.kvtransfer.ends import FIRST, announces, filled_pool, pool_in, same_bytes, shuffled
from tests.kvtransfer.far_end import BLOCKS, ENDLESS_BLOCKS, FAR_INCARNATION, LAYOUT, SETTINGS, SOURCE_SEED, Wire
from tests.kvtransfer.owners import Sends

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("transport")]
WAIT_S = 60.0


@asynccontextmanager
async def far_process(role: str, attempt: int = 1) -> AsyncIterator[tuple[asyncio.subprocess.Process, Wire]]:
    variables = {"CROSSDOCK_TEST_TRANSPORT": ends.TRANSPORT, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    async with far_end.far_module(far_end.__name__, role, str(attempt), wait_s=WAIT_S, **variables) as far:
        yield far


class NearReceiver(ReceiverOwner):
    """The receiver under test, with all that it reported."""

    def __init__(self, segment_timeout_ms: int = SETTINGS.segment_timeout_ms) -> None:
        self.memory = ends.memory_of(ends.TRANSPORT)
        self.pool = pool_in(self.memory, LAYOUT, BLOCKS, 12)
        self.free = shuffled(BLOCKS, BLOCKS, seed=13)
        self.arrived: dict[str, list[int]] = {}
        self.failed: dict[str, tuple[list[int], str]] = {}
        self.quarantined: dict[str, list[int]] = {}
        self.wire: Wire | None = None
        self.changed = asyncio.Event()
        self.receiver = KvReceiver(
            layout=LAYOUT,
            pool=self.pool,
            incarnation=far_end.NEAR_INCARNATION,
            clock=time.monotonic,
            listen_host="127.0.0.1",
            owner=self,
            settings=replace(ends.settings_for(ends.TRANSPORT, SETTINGS), segment_timeout_ms=segment_timeout_ms),
            memory=self.memory,
        )

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        if self.wire is not None:
            self.wire.send(peer_incarnation, message, blob)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted:
        taken, self.free = self.free[: offer.blocks], self.free[offer.blocks :]
        return OfferAccepted(tuple(taken))

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        self.arrived[commit.request_id] = block_ids
        self.changed.set()

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        self.failed[request_id] = (block_ids, reason)
        self.free += block_ids
        self.changed.set()

    def in_doubt(self, request_id: str, attempt: int, block_ids: list[int]) -> None:
        self.quarantined[request_id] = block_ids
        self.changed.set()

    async def until_known(self, request_ids: set[str]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not request_ids <= self.arrived.keys() | self.failed.keys():
                self.changed.clear()
                await self.changed.wait()


async def until_killed(near: NearReceiver, incarnation: int, attempt: int, word_of_it: bool) -> None:
    """Serve a far sender until all its transfers are in, kill it amid `endless`, and see that failure reported.

    Without `word_of_it` the data plane has to notice by itself.
    """
    source = filled_pool(LAYOUT, BLOCKS, SOURCE_SEED)
    amid = asyncio.Event()

    def handle(message: Message, blob: bytes) -> None:
        near.receiver.handle(incarnation, message, blob)
        if announces(message, "endless", 2):
            amid.set()

    async with far_process("sender", attempt) as (process, wire):
        near.wire = wire
        pump = asyncio.create_task(wire.pump(handle))
        async with asyncio.timeout(WAIT_S):
            await amid.wait()
        process.kill()
        await pump
        expected = far_end.request_ids()
        await near.until_known(set(expected))
        if word_of_it:
            near.receiver.peer_lost(incarnation, "killed")
        await near.until_known({"endless"})
    assert near.arrived.keys() == expected.keys()
    for request_id, ids in expected.items():
        assert same_bytes(near.pool[near.arrived[request_id]], source[ids]), request_id
    block_ids, _ = near.failed["endless"]
    assert len(block_ids) == ENDLESS_BLOCKS


def test_killed_sender_costs_open_sessions():
    """A killed sender costs its open sessions only, and a new sender is served."""

    async def main() -> None:
        near = NearReceiver()
        await until_killed(near, incarnation=21, attempt=1, word_of_it=True)
        near.free = shuffled(BLOCKS, BLOCKS, seed=14)
        near.arrived, near.failed = {}, {}
        await until_killed(near, incarnation=22, attempt=2, word_of_it=False)
        assert near.receiver.counters["pairs"] == near.receiver.counters["pairs_lost"] == 2
        await near.receiver.close()

    asyncio.run(main())


def test_killed_receiver_is_reported():
    """Sessions with a killed receiver fail, and the next receiver is served."""

    async def main() -> None:
        wires: dict[int, Wire] = {}
        results: dict[str, KvSent | KvFailed] = {}
        changed = asyncio.Event()

        def on_result(result: KvSent | KvFailed) -> None:
            results[result.request_id] = result
            changed.set()

        async def until_known(request_id: str) -> None:
            async with asyncio.timeout(WAIT_S):
                while request_id not in results:
                    changed.clear()
                    await changed.wait()

        sender = KvSender(
            layout=LAYOUT,
            pool=filled_pool(LAYOUT, BLOCKS, SOURCE_SEED).to("cuda" if ends.TRANSPORT in ends.ON_GPU else "cpu"),
            incarnation=far_end.NEAR_INCARNATION,
            clock=time.monotonic,
            owner=Sends(
                lambda incarnation, message, blob: wires[incarnation].send(incarnation, message, blob), on_result
            ),
            settings=ends.settings_for(ends.TRANSPORT, SETTINGS),
        )
        for incarnation in (FAR_INCARNATION, FAR_INCARNATION + 1):
            accepted = asyncio.Event()

            def handle(
                message: Message, blob: bytes, incarnation: int = incarnation, accepted: asyncio.Event = accepted
            ) -> None:
                sender.handle(incarnation, message, blob)
                if isinstance(message, Accept) and message.request_id.startswith("cut"):
                    accepted.set()

            async with far_process("receiver") as (process, wires[incarnation]):
                pump = asyncio.create_task(wires[incarnation].pump(handle))
                whole, cut = f"whole-{incarnation}", f"cut-{incarnation}"
                for request_id, given in ((whole, 100), (cut, 300)):
                    sender.open(request_id, 1, incarnation, given)
                    sender.blocks_ready(request_id, 1, 0, shuffled(BLOCKS, given, seed=incarnation))
                sender.commit(whole, 1, FIRST, [1, 2, 3])
                await until_known(whole)
                async with asyncio.timeout(WAIT_S):
                    await accepted.wait()
                process.kill()
                sender.commit(cut, 1, FIRST, [])
                await pump
                if incarnation != FAR_INCARNATION:  # the first time, the data plane has to notice by itself
                    sender.peer_lost(incarnation, "killed")
                await until_known(cut)
            assert isinstance(results[whole], KvSent), results
            assert isinstance(results[cut], KvFailed), results
        await sender.close()

    asyncio.run(main())


def test_far_end_leaves_cleanly():
    """Threads, groups and stores end with the process: status 0, no crash at exit."""

    async def main() -> None:
        near = NearReceiver()
        async with far_process("sender") as (process, wire):
            near.wire = wire
            amid = asyncio.Event()

            def handle(message: Message, blob: bytes) -> None:
                near.receiver.handle(31, message, blob)
                if isinstance(message, Announce) and message.request_id == "endless":
                    amid.set()

            pump = asyncio.create_task(wire.pump(handle))
            async with asyncio.timeout(WAIT_S):
                await amid.wait()
            assert process.stdin is not None
            process.stdin.close()
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0
            await pump
            await near.until_known({"endless"})
        await near.receiver.close()

    asyncio.run(main())


def test_exited_far_end_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what this process finds by PYTHONPATH."""
    (tmp_path / "carried.py").write_text("raise SystemExit('not on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> None:
        async with far_end.far_module("carried", "sender", wait_s=WAIT_S):
            pass

    with pytest.raises(AssertionError, match="status is 1\nnot on this machine"):
        asyncio.run(main())
