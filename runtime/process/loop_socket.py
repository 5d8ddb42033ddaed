"""A ZeroMQ socket on the event loop, for links. Available messages are read without a turn of the loop for each, and sending
is one call.

libzmq's descriptor becomes readable when the socket has internal work, not when there is a message. Reading the socket's
events clears this signal, and so does every send, even one that fails. So a waiting reader is woken by the descriptor and
after every send.
"""

import asyncio
from typing import Any

import zmq

from proto.limits import MAX_FRAMES

_BIND_AGAIN_S = 0.02
_IN = int(zmq.POLLIN)
_NOW, _NOW_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Plain numbers, since joining two of pyzmq's flags takes as long as sending a frame."""


TURN_FRAMES = 256  # of one message, read before the rest of the process gets its turn


class LoopSocket(zmq.Socket[bytes]):
    """A socket with one reader, made and used on the event loop's thread."""

    frames_max: int = MAX_FRAMES + 2
    """The most frames of a message that are kept, with a routing id. If a message has more, this number is too large for the
    codec, which refuses the message."""
    _amid: bool = False  # the rest of a message that is too long has still to be read, and dropped

    _waiter: "asyncio.Future[None] | None" = None
    _loop: asyncio.AbstractEventLoop | None = None

    async def bind_within(self, address: str, within_s: float) -> None:
        """Bind to `address`. If the port is in use, try again for `within_s` seconds, since libzmq releases ports in the
        background. Raises `zmq.ZMQError`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while True:
            try:
                self.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or loop.time() >= until:
                    raise
            await asyncio.sleep(_BIND_AGAIN_S)

    @property
    def is_draining(self) -> bool:
        """A message that is too long is being read and dropped. Until its end no other peer's message can be read."""
        return self._amid

    async def receive(self, copy: bool = True) -> list[Any]:
        """The frames of the next message, the first `frames_max` of them. Waits only where none is there."""
        while True:
            if self._amid:
                await self._drop_rest()
            if not self._has_message():
                await self._readable()
            try:
                frame = self.recv(_NOW, copy=False)
            except zmq.Again:
                continue
            # Not `recv_multipart`, which asks the socket whether there are more frames. That takes as long as reading a frame,
            # and the frame knows it already.
            frames = [frame]
            while frame.more and len(frames) < self.frames_max:
                frame = self.recv(_NOW, copy=False)
                frames.append(frame)
            if frame.more:
                self._amid = True
                await self._drop_rest()
            return [frame.bytes for frame in frames] if copy else frames

    async def _drop_rest(self) -> None:
        count = 0
        while self._amid:
            self._amid = bool(self.recv(_NOW, copy=False).more)
            count += 1
            if count % TURN_FRAMES == 0:
                await asyncio.sleep(0)

    def try_send(self, frames: list[bytes]) -> str | None:
        """Send without waiting; the reason if it could not be."""
        failure = None
        try:
            for frame in frames[:-1]:
                self.send(frame, _NOW_MORE)
            self.send(frames[-1], _NOW)
        except zmq.ZMQError as error:
            failure = f"send failed: {error}"
        if self._waiter is not None and not self.closed:
            self._look()
        return failure

    def close(self, linger: int | None = None) -> None:
        if self._loop is not None and not self.closed and not self._loop.is_closed():
            self._loop.remove_reader(self.FD)
        self._loop = None
        super().close(linger)

    async def _readable(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.FD, self._look)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        # Call `_has_message` even if no reader waits, since it clears the descriptor's signal.
        if self._has_message() and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _has_message(self) -> bool:
        return bool(int(self.getsockopt(zmq.EVENTS)) & _IN)


class LoopContext(zmq.Context[LoopSocket]):
    """Makes such sockets."""

    _socket_class = LoopSocket
    _instance = None
