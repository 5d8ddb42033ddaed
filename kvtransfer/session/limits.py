"""Limits of a transfer. Each says what happens when it is reached."""

from dataclasses import dataclass

from proto.limits import KV_TIMEOUT_MS, MAX_SEGMENTS_ANNOUNCED

AUTO = ("shm", "cuda_ipc", "nccl", "tcp")  # by default, best first
SHM_WINDOW_BYTES = 16 << 20
WINDOW_SEGMENTS_MAX = MAX_SEGMENTS_ANNOUNCED


def allowed_transports(option: str) -> tuple[str, ...]:
    """The transports that `--kv-transport` stands for."""
    return AUTO if option == "auto" else (option,)


def segment_bytes_on(device: str) -> int:
    """Largest segment for pools on a device of this type. A GPU's segments are larger, because a GPU copies a small one in
    less time than its messages take."""
    return (8 << 20) if device == "cpu" else (64 << 20)


FETCH_IDLE_MS = 10_000  # without progress, after which a fetch has failed: it never waits for computation
CPU_BYTES_PER_S = 256 << 20  # that a decode worker on a CPU takes in while streams run: more slows them


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Raises `ValueError` on values that cannot work together."""

    transports: tuple[str, ...] = AUTO
    """The allowed transports, best first. The sender proposes them, and the receiver takes the first that it can use."""
    demote_ms: int = 5_000  # not proposed again to a peer with which it broke; doubles with each further break
    demote_max_ms: int = 300_000
    segment_bytes: int = 8 << 20
    """Largest segment, on the sender: what it packs into one message; on the receiver: what it makes room for per pair.
    The smaller of the two holds. A block is never split, so a larger block makes a larger segment."""
    digest_every: int = 1  # segments per digest on a GPU, as the receiver's setting says; the CPU digests all
    pairs_bytes: int = 2 << 30  # estimated, of all pairs; above it, idle pairs are dropped, least recently used first
    window_segments: int = 4
    """Segments announced and not yet sent, per pair. If it were one, the receiver would be idle while the next segment is
    packed."""
    window_bytes: int = 32 << 20
    """More than `window_segments` small segments may be announced, up to so many bytes, because a round trip of the control
    link takes the same time for any size. An announced segment is sent even if its session is aborted, so this limits the
    waste. A transport that skips unwanted segments (`Transport.skips_unwanted`) may announce as many as a receiver queues."""
    shm_window_bytes: int = SHM_WINDOW_BYTES
    """Size of the memory that a receiver shares with one sender on its host, for segments in flight. The window holds at least
    two of the largest segments."""
    bytes_per_s: int = 0
    """The rate at which the receiver begins segments while it is busy, over all pairs; 0: no limit. A segment is held back for
    at most a quarter of `segment_timeout_ms`, counted from the pair's previous segment."""
    burst_bytes: int = 64 << 20  # after a pause, so many bytes are received at full speed
    rendezvous_timeout_ms: int = KV_TIMEOUT_MS  # a pair not connected by then is dropped, and its sessions fail
    segment_timeout_ms: int = 3_000
    """One segment must cross in this time, or its pair is given up. It bounds how long a killed peer goes unnoticed
    on the data plane, and so how long blocks stay untouchable after a failure."""
    decide_timeout_ms: int = 10_000  # an offer without a decision by then is declined
    accept_timeout_ms: int = 15_000
    """An offer without an answer after this time has failed. This is longer than the receiver's `decide_timeout_ms`, because
    the receiver's refusal gives the better reason."""
    idle_timeout_ms: int = 300_000
    """An accepted session without progress for this long has failed. Prefill computation does not count as progress, so this
    is a last resort: normally the coordinator ends the session first."""
    ack_timeout_ms: int = KV_TIMEOUT_MS  # a commit without an answer by then has failed; the receiver may have the KV
    sessions_max: int = 4_096  # live, per driver; more offers are declined
    pairs_max: int = 256  # per driver, dying ones included; each is a thread; more are refused
    remembered_max: int = 4_096  # ended sessions kept to answer late frames
    remembered_ms: int = 60_000  # longer than the wait for any answer
    remembers_digests: bool = True  # the sender keeps digests, told of changed blocks; else it digests in sending
    encrypt: bool = False  # KV crosses encrypted by `tcp` if either end wants it

    def __post_init__(self) -> None:
        if not self.transports:
            raise ValueError("no transport is allowed")
        for name in self.__dataclass_fields__:
            if name not in ("transports", "bytes_per_s", "encrypt", "remembers_digests") and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.bytes_per_s < 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}, and must not be negative")
        if self.digest_every > 1024:
            raise ValueError(f"digest_every is {self.digest_every}, and must be at most 1024")
        if self.window_segments > WINDOW_SEGMENTS_MAX:
            raise ValueError(
                f"window_segments is {self.window_segments}; a receiver queues at most {WINDOW_SEGMENTS_MAX}"
            )
