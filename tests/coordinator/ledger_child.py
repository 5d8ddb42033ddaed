"""A process that writes the ledger as fast as it can until it is killed. It says on stdout what it may: `ack ID` once the
opening is on disk, as a coordinator would acknowledge the request; `close ID` before it asks for a closing."""

import asyncio
import random
import sys
from pathlib import Path

from coordinator.accounting.ledger import Ledger
from coordinator.accounting.sqlite_store import SqliteStore
from runtime.storage.errors import StorageError
from tests.coordinator.ledger_words import closed, opened


def say(word: str, request_id: str) -> None:
    sys.stdout.write(f"{word} {request_id}\n")
    sys.stdout.flush()


async def main(path: Path, run: str) -> None:
    rng = random.Random(run)
    acknowledged: asyncio.Queue[str] = asyncio.Queue()

    def on_committed(ids: list[str]) -> None:
        for request_id in ids:
            say("ack", request_id)
            acknowledged.put_nowait(request_id)

    def on_failed(error: StorageError) -> None:
        raise SystemExit(str(error))

    ledger = Ledger(SqliteStore(path), on_committed=on_committed, on_failed=on_failed)
    await ledger.start(0)
    number = 0
    while True:
        if ledger.behind:  # a coordinator admits no more then
            await asyncio.sleep(0.05)
        for _ in range(0 if ledger.behind else rng.randrange(1, 20)):
            ledger.write(opened(f"{run}-{number}"))
            number += 1
        request_id = await acknowledged.get()
        if rng.random() < 0.8:
            say("close", request_id)
            ledger.write(closed(request_id))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
