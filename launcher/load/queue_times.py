"""How long requests waited in the coordinator's queue, read from its event log."""

from collections.abc import Sequence
from pathlib import Path

from coordinator.event_log.felt import Felt
from coordinator.event_log.format import EventLogError
from coordinator.event_log.replay import Replay
from launcher.load.records import RequestRecord


def add_waits(path: Path, records: Sequence[RequestRecord]) -> str:
    """Sets `queue_ms` of the records whose requests are in the event log. Returns the reason if there are none, else an empty
    text. An event log that is still being written is read up to its last whole record.
    """
    try:
        with path.expanduser().open("rb") as file:
            again = Replay(file)
            felt = Felt(again.header.started, 1 << 30)
            difference = again.run(felt)
    except (OSError, EventLogError) as error:
        return f"no queue waits: {error}"
    if difference is not None:
        return f"no queue waits: the event log differs from event {difference.number} on; see crossdock replay"
    waited = {row.request: row.waited_s for row in felt.finish()[0]}
    for record in records:
        if record.request_id in waited:
            record.queue_ms = round(1000 * waited[record.request_id], 3)
    return ""
