"""Metrics that several roles have."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import Counter

from runtime.link.peer import LinkCounters
from runtime.metrics.registry import Labels, MetricsRegistry


class Blocks(Protocol):
    """`engine.kv.allocator.BlockAllocator` is the real one."""

    @property
    def free_count(self) -> int: ...
    @property
    def held_count(self) -> int: ...
    @property
    def cached_count(self) -> int: ...
    @property
    def quarantined_count(self) -> int: ...


def link_counters(
    registry: MetricsRegistry, ends: Mapping[str, LinkCounters], coordinator_up: Callable[[], bool] | None = None
) -> None:
    """`ends`: ports of this process, and its link to the coordinator, by name."""

    def each(what: str) -> Callable[[], dict[str, float]]:
        return lambda: {name: getattr(counters, what) for name, counters in ends.items()}

    registry.by(
        "counter",
        "crossdock_link_protocol_errors",
        "Frames that were not valid or not allowed; each ended its peer's link.",
        "port",
        each("protocol_errors"),
    )
    registry.by(
        "counter",
        "crossdock_link_failed_checks",
        "Messages whose check met a bug of this process, before anything had changed; each ended its peer's link.",
        "port",
        each("failed_checks"),
    )
    registry.read(
        "counter",
        "crossdock_link_silent",
        "Connections that were closed because no `Hello` came within 3 s, by the name of their key.",
        ("port", "key_name"),
        lambda: [((name, key), n) for name, counters in ends.items() for key, n in counters.silent.items()],
    )
    registry.by(
        "counter",
        "crossdock_link_unknown_messages",
        "Unknown messages from peers of a newer version; they were ignored.",
        "port",
        each("unknown_messages"),
    )
    registry.read(
        "counter",
        "crossdock_link_turned_away",
        "Peers rejected, by reason: plain (without a key), with an unknown key, in a role that is not their key's, or with a"
        " key that has too many connections.",
        ("port", "reason"),
        lambda: [
            ((name, reason), count)
            for name, counters in ends.items()
            for reason, count in counters.turned_away().items()
        ],
    )
    registry.by("counter", "crossdock_link_refused", "Handshakes that were refused.", "port", each("refused"))
    registry.by(
        "counter",
        "crossdock_link_lost",
        "Links that ended without `Bye`, or were ended by this process.",
        "port",
        each("lost"),
    )
    registry.by("counter", "crossdock_link_received_messages", "Messages received.", "port", each("messages_in"))
    registry.by("counter", "crossdock_link_sent_messages", "Messages sent.", "port", each("messages_out"))
    if coordinator_up is not None:
        registry.gauge("crossdock_link_coordinator_up", "1 while the coordinator's link is up.", coordinator_up)


def step_tokens(registry: MetricsRegistry, phase: str) -> Counter:
    """`phase`: prefill or decode."""
    help_ = "Tokens in forward passes that ended well: of prompts in prefill, one for each sequence in decode."
    return registry.counter("crossdock_step_tokens", help_, "phase").labels(phase)


def kv_blocks(registry: MetricsRegistry, blocks: Blocks, block_size: int) -> None:
    registry.by(
        "gauge",
        "crossdock_kv_blocks",
        "KV blocks of this worker: free, held by requests, cached (room, if needed), or quarantined after a failed transfer.",
        "state",
        lambda: {
            "free": blocks.free_count,
            "held": blocks.held_count,
            "cached": blocks.cached_count,
            "quarantined": blocks.quarantined_count,
        },
    )
    registry.gauge("crossdock_kv_block_tokens", "Tokens in a KV block of this worker.", lambda: block_size)


def kv_transfers(registry: MetricsRegistry, direction: str, counters: Mapping[str, int]) -> None:
    """`counters`: of a driver of `kvtransfer`; `direction`: sent or received."""

    def of(prefix: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
        return lambda: [
            ((direction, key.removeprefix(prefix)), count)
            for key, count in counters.items()
            if key.startswith(prefix) and key.removeprefix(prefix) not in ("lost", "failed", "declined")
        ]

    def total(*keys: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
        return lambda: [((direction,), sum(counters.get(key, 0) for key in keys))]

    labels = ("direction", "transport")
    registry.read("counter", "crossdock_kv_bytes", "KV transferred and digested.", labels, of("bytes_"))
    registry.read("counter", "crossdock_kv_pairs", "Connections made between pairs of workers.", labels, of("pairs_"))
    registry.read(
        "counter",
        "crossdock_kv_pairs_broken",
        "Connections that broke. The sender then avoids that transport with that peer, for longer each time.",
        labels,
        of("broken_"),
    )
    for name, help_, keys in (
        ("pairs_refused", "Connections not made, because no descriptor or thread was left.", ("refused_pairs",)),
        ("segments", "Segments transferred.", ("segments",)),
        ("transfers", "Hand-overs that began.", ("sessions",)),
        ("transfers_failed", "Hand-overs that failed.", ("sessions_failed",)),
        ("stale_frames", "Frames for hand-overs or pairs that are over.", ("stale_frames",)),
        ("violations", "Frames that broke the hand-over's protocol.", ("violations",)),
    ):
        registry.read("counter", f"crossdock_kv_{name}", help_, ("direction",), total(*keys))


def prefix_cache(registry: MetricsRegistry, asked: Callable[[], int], found: Callable[[], int]) -> None:
    registry.total(
        "crossdock_prefix_cache_queried_tokens", "Prompt tokens looked up in this worker's prefix cache.", asked
    )
    registry.total("crossdock_prefix_cache_hit_tokens", "Prompt tokens that were found there.", found)
