"""Logs that a process waits for its coordinator. The first line comes soon, so that a wrong address is noticed. Later lines
are rare, so that they do not fill the log."""

import asyncio
from collections.abc import Callable

from runtime.process import clock
from runtime.process.log import Log

FIRST_S = 2.0
AGAIN_S = 30.0


class WaitNotice:
    """Tells of a wait between `begin` and `end`: one line at info after `FIRST_S`, and one at warning every `AGAIN_S` from
    then on."""

    def __init__(self, log: Log, address: str, why: Callable[[], str]) -> None:
        self._log = log
        self._address = address
        self._why = why
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.end()
        self._since = clock.now()
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._say, self._log.info)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, emit: Callable[..., None]) -> None:
        waited_s = round(clock.now() - self._since, 1)
        emit(f"waiting for the coordinator at {self._address}", waited_s=waited_s, why=self._why() or "no answer yet")
        self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._say, self._log.warning)
