"""A core that keeps its event log in memory."""

import io

from coordinator.core import Core
from coordinator.event_log.format import FAILED, Chain, Header, encode_end, encode_header, event_bytes
from coordinator.event_log.replay import Replay
from coordinator.events import Action, Event, Limits


class LoggedCore(Core):
    """Its clock begins at 0, as the worlds' do."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.records = [encode_header(Header(self.limits))]
        self._chain = Chain(self.records[0])

    def handle(self, event: Event, now: float) -> list[Action]:
        self._chain.add_event(event_bytes(event, now))
        try:
            actions = super().handle(event, now)
        except Exception as error:
            self.records.append(self._chain.record(FAILED, repr(error)))
            raise
        self.records.append(self._chain.record(len(actions), self._chain.add_actions(actions)))
        return actions

    def event_log(self, *, ended: bool = False) -> bytes:
        return b"".join(self.records) + (encode_end("stopped") if ended else b"")


def replay(log: bytes) -> Replay:
    return Replay(io.BytesIO(log))


def as_logged(core: Core) -> LoggedCore:
    assert isinstance(core, LoggedCore)
    return core
