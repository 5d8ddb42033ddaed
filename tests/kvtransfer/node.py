"""One process of the fault tests: a KV sender or receiver on real links, which does to itself what it is told.

Orders come as JSON over a pipe, and what happened goes back the same way; `faults` is the other end of it. A node hurts
itself at a named point of the protocol, since only it knows when it is there:

    before_offer   the Offer is about to be sent, or has just come
    after_accept   the Accept has just come, or was just sent
    mid_segment    a segment was announced; a random moment later
    before_commit  the Commit is about to be sent, or has just come
    after_commit   the Commit was just sent; the Ack was just sent
"""

import asyncio
import json
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch
import xxhash

import tests.kvtransfer.gloo  # noqa: F401 - a stand-in for NCCL
from engine.kv.allocator import BlockAllocator, OutOfBlocks
from kvtransfer.memory.layout import KvLayout
from kvtransfer.ports import ReceiverOwner, SenderOwner
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Accept, Ack, Announce, Commit, Offer, PairListen
from proto.limits import PROTOCOL_VERSION
from proto.messages import Destination, Hello, Message, Role
from runtime.link.connection_pool import ConnectionPool
from runtime.link.server import LinkServer, LinkSettings, Peer
from tests.kvtransfer.ends import FIRST, same_bytes, settings_for, shuffled
from tests.kvtransfer.harm import Harm, corrupt_one, cut

LAYOUT = KvLayout(layers=2, kv_heads=4, head_dim=64, block_size=16, dtype="float32")  # 64 KiB per block
BLOCKS = 576
"""Room for every attempt of a round's request, whose predecessors may all be in quarantine still, and for innocents beside."""
LINKS = LinkSettings(heartbeat_ms=500)
MID_SEGMENT_S = 0.004  # in which random moments lie; a segment takes about as long
_SENDER_POINTS = {"before_offer": Offer, "mid_segment": Announce, "before_commit": Commit, "after_commit": Commit}
_RECEIVER_POINTS = {"before_offer": Offer, "mid_segment": Announce, "before_commit": Commit}


def settings(transport: str) -> KvSettings:
    common = KvSettings(
        segment_bytes=1 << 20,
        segment_timeout_ms=1_500,
        rendezvous_timeout_ms=1_500,
        demote_ms=1,
        window_bytes=4 << 20,  # so that a request is announced in several frames
    )
    return settings_for(transport, common)


def source_pool(incarnation: int) -> torch.Tensor:
    """What a sender or a receiver has at first: nothing that another one has. Cheap, since a loop waits for it."""
    words = torch.arange(incarnation, incarnation + BLOCKS * LAYOUT.block_bytes // 8)
    return words.mul_(incarnation * 0x9E3779B97F4A7C15 % (1 << 63) | 1).view(torch.float32).view(LAYOUT.shape(BLOCKS))


def source_blocks(request_id: str, attempt: int, blocks: int) -> list[int]:
    """Where in it, for this attempt. In runs and scattered."""
    seed = xxhash.xxh32_intdigest(f"{request_id} {attempt}".encode())
    start = seed % (BLOCKS - blocks)
    return list(range(start, start + blocks)) if seed & 1 else shuffled(BLOCKS, blocks, seed)


def _segments(message: Message) -> int:
    return len(message.blocks) if isinstance(message, Announce) else 1


class Node:
    """What both roles share."""

    def __init__(self, role: Role, incarnation: int, pipe: Connection, transport: str) -> None:
        self.incarnation = incarnation
        self.pipe = pipe
        self.settings = settings(transport)
        self.harm = Harm(self.say)
        self.hello = Hello(PROTOCOL_VERSION, role, incarnation, f"{role}-{incarnation}")
        self.done = asyncio.Event()
        self.allocator = BlockAllocator(BLOCKS)

    def say(self, event: str, **more: Any) -> None:
        self.pipe.send_bytes(json.dumps({"event": event, "at": time.monotonic(), **more}).encode())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self.pipe.fileno(), self._read)
        await self.start()
        await self.done.wait()
        loop.remove_reader(self.pipe.fileno())
        await self.close()
        self.say("closed")

    def _read(self) -> None:
        while self.pipe.poll():
            try:
                order = json.loads(self.pipe.recv_bytes())
            except EOFError:
                self.done.set()
                return
            getattr(self, "do_" + order.pop("do"))(**order)

    def do_harm(self, **what: Any) -> None:
        for name, value in what.items():
            setattr(self.harm, name, value)
        self.say("armed")

    def do_report(self) -> None:
        self.allocator.check_invariants()
        counters = self.end.counters
        held = self.allocator.held_count + self.allocator.quarantined_count
        self.say("report", held=held, free=self.allocator.free_count, **counters)

    def do_close(self) -> None:
        self.done.set()

    end: KvSender | KvReceiver

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class SenderNode(Node, SenderOwner):
    async def start(self) -> None:
        self.outbound = ConnectionPool(
            hello=self.hello, to=Role.DECODE, on_message=self._heard, on_lost=self._lost, settings=LINKS
        )
        self.to: dict[int, Destination] = {}
        self.held: dict[tuple[str, int], list[int]] = {}
        self.kept: tuple[int, Message, bytes] | None = None
        self.fault = ""
        self.end = self.sender = KvSender(
            layout=LAYOUT,
            pool=source_pool(self.incarnation),
            incarnation=self.incarnation,
            clock=time.monotonic,
            owner=self,
            settings=self.settings,
        )
        self.say("up", address="")

    async def close(self) -> None:
        await self.sender.close()
        await self.outbound.close()

    def do_send(
        self, request_id: str, attempt: int, address: str, incarnation: int, blocks: int, fault: str = ""
    ) -> None:
        self.fault = fault
        self.to[incarnation] = Destination(address, incarnation)
        if fault == "corrupt":
            corrupt_one(self.harm.dice)
        elif fault == "cut":
            asyncio.get_running_loop().call_later(
                self.harm.dice.uniform(0.0, 0.02),
                cut,  # type: ignore[arg-type]
                self.sender,
                urlsplit(address).port,  # type: ignore[arg-type]
            )
        self.held[(request_id, attempt)] = self.allocator.allocate(blocks)
        ids = source_blocks(request_id, attempt, blocks)
        self.sender.open(request_id, attempt, incarnation, blocks)
        for start in range(0, blocks, 40):
            self.sender.blocks_ready(request_id, attempt, start, ids[start : start + 40])
        self.sender.commit(request_id, attempt, FIRST, [])

    def sent(self, result: KvSent | KvFailed) -> None:
        ok = isinstance(result, KvSent)
        self.allocator.free(self.held.pop((result.request_id, result.attempt)))
        self.allocator.check_invariants()
        reason = "" if isinstance(result, KvSent) else result.reason
        self.say("result", request_id=result.request_id, attempt=result.attempt, ok=ok, reason=reason)

    def _lost(self, incarnation: int, reason: str) -> None:
        self.to.pop(incarnation, None)
        self.sender.peer_lost(incarnation, reason)
        self.say("lost", peer=incarnation, reason=reason)

    def _heard(self, peer: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, Accept):
            self.harm.reach("after_accept", message.request_id)
        self.sender.handle(peer.incarnation, message, blob)

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Through the faults to the link. Some are late, and then those after them come first."""
        request_id = getattr(message, "request_id", "")
        mine = bool(self.fault) and request_id == self.harm.request_id
        for point in ("before_offer", "before_commit"):
            if isinstance(message, _SENDER_POINTS[point]):
                self.harm.reach(point, request_id)
        if mine and self.fault == "wrong_length" and isinstance(message, Announce):
            counts = list(message.blocks)
            at = self.harm.dice.randrange(len(counts))
            counts[at] += self.harm.dice.choice([1, 1_000] if counts[at] == 1 else [-1, 1, 1_000])
            message = msgspec.structs.replace(message, blocks=tuple(counts))
        if mine and self.fault == "reorder" and self.kept is None and self.harm.dice.random() < 0.3:
            self.kept = (peer_incarnation, message, blob)
            asyncio.get_running_loop().call_later(0.05, self._release)
            return
        self._pass_on(peer_incarnation, message, blob)
        if mine and self.fault == "duplicate" and self.harm.dice.random() < 0.5:
            self._pass_on(peer_incarnation, message, blob)
        self._release()
        for point in ("mid_segment", "after_commit"):
            if isinstance(message, _SENDER_POINTS[point]):
                self.harm.reach(point, request_id, _segments(message))

    def _release(self) -> None:
        if self.kept is not None:
            kept, self.kept = self.kept, None
            self._pass_on(*kept)

    def _pass_on(self, incarnation: int, message: Message, blob: bytes) -> None:
        if incarnation in self.to:
            self.outbound.send(self.to[incarnation], message, blob)


class ReceiverNode(Node, ReceiverOwner):
    async def start(self) -> None:
        self.heard: dict[int, list[tuple[Message, bytes]]] = {}
        self.doubtful: dict[tuple[str, int], list[int]] = {}
        self.peers: dict[int, Peer] = {}
        self.sources: dict[int, torch.Tensor] = {}
        self.unreachable = False
        self.pool = torch.zeros(LAYOUT.shape(BLOCKS), dtype=torch.float32)
        self.server = LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=self.hello,
            accept=lambda hello: None,
            on_up=self._up,
            on_message=self._heard,
            on_down=self._down,
            settings=LINKS,
        )
        self.end = self.receiver = KvReceiver(
            layout=LAYOUT,
            pool=self.pool,
            incarnation=self.incarnation,
            clock=time.monotonic,
            listen_host="127.0.0.1",
            owner=self,
            settings=self.settings,
        )
        self.say("up", address=await self.server.start())

    async def close(self) -> None:
        await self.receiver.close()
        await self.server.close()

    def do_unreachable(self) -> None:
        """The next rendezvous is at a port that nobody listens on."""
        self.unreachable = True

    def _up(self, peer: Peer) -> None:
        self.peers[peer.incarnation] = peer

    def _down(self, peer: Peer, reason: str) -> None:
        if self.peers.get(peer.incarnation) is peer:
            del self.peers[peer.incarnation]
            self.receiver.peer_lost(peer.incarnation, reason)
            self.say("lost", peer=peer.incarnation, reason=reason)

    def do_replay(self, incarnation: int) -> None:
        """What this incarnation of a sender had said, once more and in any order, though it is gone."""
        late = self.heard.get(incarnation, [])[-60:]
        self.harm.dice.shuffle(late)
        for message, blob in late:
            self.receiver.handle(incarnation, message, blob)
        self.say("replayed", frames=len(late), stale=self.receiver.counters["stale_frames"])

    def _heard(self, peer: Peer, message: Message, blob: bytes) -> None:
        request_id = getattr(message, "request_id", "")
        self.heard.setdefault(peer.incarnation, []).append((message, blob))
        for point, kind in _RECEIVER_POINTS.items():
            if isinstance(message, kind):
                self.harm.reach(point, request_id, _segments(message))
        self.receiver.handle(peer.incarnation, message, blob)

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        if self.unreachable and isinstance(message, PairListen):
            self.unreachable = False
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                message = msgspec.structs.replace(message, port=free.getsockname()[1], secret="nobody")
        peer = self.peers.get(peer_incarnation)
        if peer is not None:
            peer.send(message, blob)
        if isinstance(message, Accept):
            self.harm.reach("after_accept", message.request_id)
        elif isinstance(message, Ack):
            self.harm.reach("after_commit", message.request_id)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str:
        try:
            return OfferAccepted(tuple(self.allocator.allocate(offer.blocks)))
        except OutOfBlocks as error:
            return str(error)

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        """Looks at every byte, then gives the blocks back."""
        if peer_incarnation not in self.sources:
            self.sources = {**dict(list(self.sources.items())[-2:]), peer_incarnation: source_pool(peer_incarnation)}
        expected = source_blocks(commit.request_id, commit.attempt, len(block_ids))
        right = same_bytes(self.pool[block_ids], self.sources[peer_incarnation][expected])
        self._free(block_ids)
        self.say("committed", request_id=commit.request_id, attempt=commit.attempt, right=right)

    def in_doubt(self, request_id: str, attempt: int, block_ids: list[int]) -> None:
        self.doubtful[(request_id, attempt)] = block_ids
        self.allocator.quarantine(block_ids)
        self.allocator.check_invariants()

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        doubtful = self.doubtful.pop((request_id, attempt), [])
        self.allocator.unquarantine(doubtful)
        self._free([block for block in block_ids if block not in doubtful])
        self.say("failed", request_id=request_id, attempt=attempt, reason=reason)

    def _free(self, block_ids: list[int]) -> None:
        self.allocator.free(block_ids)
        self.allocator.check_invariants()


def main(role: str, incarnation: int, pipe: Connection, transport: str) -> None:
    """The entry point of the process."""
    torch.set_num_threads(1)

    def died(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A broken assertion is not to pass for a fault that was asked for."""
        loop.default_exception_handler(context)
        os._exit(1)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(died)
        node = SenderNode if role == "sender" else ReceiverNode
        await node(Role.PREFILL if role == "sender" else Role.DECODE, incarnation, pipe, transport).run()

    asyncio.run(run())
    os._exit(0)
