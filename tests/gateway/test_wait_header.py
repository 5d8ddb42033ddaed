"""The header `x-crossdock-wait`: what an answer waited for, and why a request was rejected."""

import asyncio

import msgspec
import pytest

from gateway.streams.types import StreamLimits
from proto.errors import Reject, WaitReason
from proto.messages import Rejected, Submit, WaitReport, Waits
from tests.gateway.fakes import Site
from tests.gateway.http_words import on_site, post
from tests.helpers import until

HEADER = "x-crossdock-wait"


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_what_it_waited_for(stream: bool) -> None:
    """Answers in one piece and streams say what the coordinator reported before their first token."""

    async def test(site: Site) -> None:
        answer = await post(site, "/v1/completions", prompt="Hi", stream=stream)
        assert answer.headers[HEADER] == "own_queue=0.0, other_tenants=0.0, no_room=0.0, cold_start=0.0"
        site.cluster.hold = True
        asking = asyncio.create_task(post(site, "/v1/completions", prompt="Hi", stream=stream))
        await until(lambda: len(site.cluster.submits) == 2)
        submit, _ = site.cluster.submits[-1]
        backend = site.gateway.backend
        backend.coordinator_message(site.cluster, WaitReport(submit.request_id, 2, Waits(9.0)), b"")
        backend.coordinator_message(site.cluster, WaitReport(submit.request_id, 1, Waits(1.0, 2.25, 1000.0)), b"")
        site.cluster.submits = [(submit, [])]
        site.cluster.release()
        answer = await asking
        assert answer.headers[HEADER] == "own_queue=1.0, other_tenants=2.2, no_room=1000.0, cold_start=0.0"

    on_site(test)


def test_rejections_say_why() -> None:
    """A 429 or 503 has the reason that the coordinator gave, or else its own code."""
    told: dict[Reject, Rejected] = {}

    def reject(submit: Submit) -> Rejected:
        return msgspec.structs.replace(next(iter(told.values())), request_id=submit.request_id)

    async def header(site: Site, rejected: Rejected) -> str:
        told.clear()
        told[rejected.reason] = rejected
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert answer.status_code in (429, 503)
        return str(answer.headers[HEADER])

    async def test(site: Site) -> None:
        site.cluster.reject = reject
        quota = Rejected("r", 1, Reject.QUOTA, "", 1.0, because=WaitReason.QUOTA)
        assert (await header(site, quota)).endswith("cold_start=0.0, reason=quota")
        full = Rejected("r", 1, Reject.QUEUE_FULL, "", 1.0, None, Waits(no_room=70.0), WaitReason.NO_ROOM)
        assert (await header(site, full)).endswith("no_room=70.0, cold_start=0.0, reason=no_room")
        behind = Rejected("r", 1, Reject.STORAGE, "", 1.0)
        assert (await header(site, behind)).endswith("reason=storage_unavailable")

    on_site(test)


def test_wait_for_coordinator_is_cold_start() -> None:
    """A request that waited for a coordinator says so, whether one came or not."""

    async def test(site: Site) -> None:
        answer = await post(site, "/v1/completions", prompt="Hi")
        waited, reason = str(answer.headers[HEADER]).split(", ")[3:]
        assert reason == "reason=cold_start" and float(waited.removeprefix("cold_start=")) >= 100
        asking = asyncio.create_task(post(site, "/v1/completions", prompt="Hi"))
        await until(lambda: bool(site.gateway.backend.keeper.streams))
        await asyncio.sleep(0.05)
        site.cluster.connect()
        assert float(str((await asking).headers[HEADER]).rpartition("cold_start=")[2]) >= 50

    on_site(test, connected=False, limits=StreamLimits(link_wait_s=0.5))
