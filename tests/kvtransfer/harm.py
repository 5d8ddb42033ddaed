"""What a node of the fault tests does to itself and to what it sends."""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch

from kvtransfer.memory.copying import Copier
from kvtransfer.memory.pool import PoolRows
from kvtransfer.sender import KvSender
from kvtransfer.transports import shm

Say = Callable[..., None]


@dataclass
class Harm:
    """What this node is to do to itself, once, for one request."""

    say: Say
    request_id: str = ""
    point: str = ""
    action: str = ""
    delay_s: float = 0.0
    dice: random.Random = field(default_factory=random.Random)
    segments_left: int = 0

    def reach(self, point: str, request_id: str, segments: int = 1) -> None:
        """`segments` are announced at this point, where that is `mid_segment`."""
        if not self.action or point != self.point or request_id != self.request_id:
            return
        if point == "mid_segment":
            self.segments_left -= segments
            if self.segments_left >= 0:
                return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._strike)
        else:
            self._strike()

    def _strike(self) -> None:
        action, self.action = self.action, ""
        if action:
            self.say("struck", action=action)
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def cut(sender: KvSender, link_port: int) -> None:
    """Shut all of the data plane's connections, as a broken cable would."""
    for one in sender._pairs:
        if isinstance(one._channel, shm.ShmWriter):
            one._channel._connection._socket.shutdown(socket.SHUT_RDWR)
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port != link_port and connection.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as broken:
                broken.shutdown(socket.SHUT_RDWR)


def corrupt_one(dice: random.Random) -> None:
    """The next segment is another one where it arrives than where it was digested."""
    packed, copy = PoolRows.packed, Copier.copy

    def packed_and_spoiled(rows: PoolRows, block_ids: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        PoolRows.packed = packed  # type: ignore[method-assign]
        spoiled = packed(rows, block_ids, buffer).clone()
        _spoil(spoiled, dice)
        return spoiled

    def copy_and_spoil(
        copier: Copier, source: Sequence[int], target: Sequence[int], go_on: Callable[[int], bool], known: bytes = b""
    ) -> bytes:
        Copier.copy = copy  # type: ignore[method-assign]
        made = copy(copier, source, target, go_on, known)
        where = copier._target.flat_bytes[target[0] * copier._target.layout.block_bytes :][
            : copier._target.layout.block_bytes
        ]
        _spoil(torch.from_numpy(where), dice)
        return made

    # What `gloo` and `tcp` send, and what `shm` copies.
    PoolRows.packed, Copier.copy = packed_and_spoiled, copy_and_spoil  # type: ignore[method-assign, assignment]


def _spoil(data: torch.Tensor, dice: random.Random) -> None:
    flat = data.view(torch.uint8).view(-1)
    flat[dice.randrange(flat.numel())] ^= 0x40
