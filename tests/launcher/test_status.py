"""`crossdock status` against a link server, and against nobody."""

import asyncio
import io
import json

import msgspec
import pytest
from rich.console import Console

from launcher.status import NoAnswer, as_dict, ask, show
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Message, Role, StatusReport, StatusRequest, WorkerStatus
from runtime import clock
from runtime.link import LinkServer, Peer

WORKER = WorkerStatus("decode-0", Role.DECODE, "tiny", "here", 7, 100, 3, 2, 0, 12_345)
REPORT = StatusReport((WORKER,), ("gateway-0",), 4, {"decoding": 2}, {"finished": 9}, {"protocol_errors": 1})


def test_the_answer_of_the_coordinator_is_what_is_shown() -> None:
    roles: list[Role] = []

    async def scene() -> StatusReport:
        def on_message(peer: Peer, message: Message, _blob: bytes) -> None:
            assert isinstance(message, StatusRequest)
            roles.append(peer.hello.role)
            peer.send(REPORT)

        server = LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=Hello(version=PROTOCOL_VERSION, role=Role.COORDINATOR, epoch=clock.new_epoch(), name="coordinator"),
            accept=lambda hello: None,
            on_up=lambda peer: None,
            on_message=on_message,
            on_down=lambda peer, reason: None,
        )
        address = await server.start()
        try:
            return await ask(address, 20_000)
        finally:
            await server.close()

    assert asyncio.run(scene()) == REPORT
    assert roles == [Role.OBSERVER]


def test_nobody_there_is_said_with_the_address() -> None:
    with pytest.raises(NoAnswer, match=r"127\.0\.0\.1:1\b.*--coordinator"):
        asyncio.run(ask("tcp://127.0.0.1:1", 100))


def test_the_table_and_the_json_hold_every_figure() -> None:
    out = io.StringIO()
    show(REPORT, Console(file=out, width=160))
    for text in (
        "decode-0",
        "tiny",
        "12,345",
        "gateway-0",
        "Queued: 4",
        "2 decoding",
        "9 finished",
        "1 protocol_errors",
    ):
        assert text in out.getvalue()
    parsed = json.loads(msgspec.json.encode(as_dict(REPORT)))
    assert parsed["workers"][0]["kv_blocks_used"] == 3
    assert parsed["running"] == {"decoding": 2}
