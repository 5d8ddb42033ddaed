"""The key of a cluster's block hashes: all gateways have one, it outlives the coordinator, and it is written nowhere."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from coordinator.main import Coordinator
from gateway.text.block_hashes import BlockNames, block_hashes
from proto.codec import pack_tokens
from proto.limits import HASH_BYTES, PROTOCOL_VERSION
from proto.messages import ClusterState, Hello, Role
from runtime.process.driver import Stop
from runtime.settings.roles import CoordinatorSettings
from tests.helpers import until
from tests.runtime.test_link import FAST, End, run

Join = Callable[[Hello], Awaitable[ClusterState]]


def gateway(incarnation: int, key: bytes = b"") -> Hello:
    return Hello(PROTOCOL_VERSION, Role.GATEWAY, incarnation, f"gateway-{incarnation}", model="m", hash_key=key)


def with_coordinator(scene: Callable[[Join], Awaitable[None]], event_log: str = "") -> None:
    async def body() -> None:
        coordinator, stop = (
            Coordinator(CoordinatorSettings(bind="tcp://127.0.0.1:0", metrics="off", event_log=event_log)),
            Stop(),
        )
        running, clients = asyncio.create_task(coordinator.run(stop)), []
        await until(lambda: bool(coordinator.server._tasks))
        address = coordinator.server._socket.getsockopt_string(zmq.LAST_ENDPOINT)

        async def join(hello: Hello) -> ClusterState:
            end = End()
            clients.append(end.client(address, hello=hello, settings=FAST))
            await clients[-1].start()
            while True:
                kind, said = await end.next()
                if kind == "message":
                    assert isinstance(said, ClusterState)
                    return said

        await scene(join)
        for client in clients:
            await client.close()
        stop.set()
        assert await running == 0

    run(body)


def test_gateways_share_lasting_hash_key(tmp_path: Path) -> None:
    """Gateways share one random hash key that outlives the coordinator and is not in its log."""
    log, keys = tmp_path / "events", []

    async def first(join: Join) -> None:
        keys.extend([(await join(gateway(21))).hash_key, (await join(gateway(22))).hash_key])

    async def after_a_restart(join: Join) -> None:
        """A gateway that was there before is the first to come, then a new one."""
        keys.extend([(await join(gateway(21, keys[0]))).hash_key, (await join(gateway(23))).hash_key])
        assert (await join(gateway(24, b"x" * 32))).hash_key == keys[0]

    async def another_cluster(join: Join) -> None:
        keys.append((await join(gateway(21))).hash_key)

    with_coordinator(first, str(log))
    with_coordinator(after_a_restart, str(log))
    with_coordinator(another_cluster)
    assert len(keys[0]) == 32 and keys[:4] == [keys[0]] * 4 and keys[4] != keys[0]
    recorded = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"gateway-21" in recorded and keys[0] not in recorded


def test_hashes_reveal_nothing_without_key() -> None:
    """Not even to somebody who knows the cache group and all of a prompt but one block."""
    rng, key = random.Random(3), b"k" * 32
    prompt = pack_tokens([rng.randrange(1 << 15) for _ in range(64)])
    seen = BlockNames.of(prompt, 16, "tenant:acme", key)
    guessed = [block_hashes(prompt, 16, "tenant:acme", cluster_key=guess) for guess in (b"", b"K" * 32, b"k" * 31)]
    whole = {seen.hashes[at : at + HASH_BYTES] for at in range(0, 64, HASH_BYTES)}
    assert not any(guess[at : at + HASH_BYTES] in whole for guess in guessed for at in range(0, 64, HASH_BYTES))
    assert block_hashes(prompt, 16, "tenant:acme", cluster_key=key) == seen.hashes
    longer = prompt + pack_tokens(list(range(32)))
    assert seen.extended(longer) == BlockNames.of(longer, 16, "tenant:acme", key)
    assert "kkkk" not in repr(seen)


@pytest.mark.parametrize("key", [b"", b"n" * 32])
def test_gateway_uses_told_hash_key(key: bytes) -> None:
    """A gateway hashes with the key it was told, and keeps it if a coordinator tells none."""
    from tests.gateway.fakes import make_site

    async def body() -> None:
        site = make_site()
        site.gateway.backend.coordinator_message(None, ClusterState((), (), b"o" * 32), b"")  # type: ignore[arg-type]
        site.gateway.backend.coordinator_message(None, ClusterState(("tiny",), (16,), key), b"")  # type: ignore[arg-type]
        assert site.gateway.backend.hash_key == (key or b"o" * 32), "an older coordinator says none"
        site.gateway.threads.shutdown()
        await site.gateway.models[0].grammars.close()

    asyncio.run(body())
