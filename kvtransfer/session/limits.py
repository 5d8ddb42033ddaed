"""Limits of a transfer. Each says what happens when it is reached."""

from dataclasses import dataclass

from proto.limits import MAX_SEGMENTS_ANNOUNCED

AUTO = ("shm", "cuda_ipc", "nccl", "tcp")
"""The transports that are used unless another one is asked for, best first."""
SHM_WINDOW_BYTES = 16 << 20
WINDOW_SEGMENTS_MAX = MAX_SEGMENTS_ANNOUNCED


def allowed_transports(option: str) -> tuple[str, ...]:
    """The transports that `--kv-transport` stands for."""
    return AUTO if option == "auto" else (option,)


def segment_bytes_on(device: str) -> int:
    """Largest segment for pools on a device of this type. A GPU copies it in less time than a hand-over of it takes."""
    return (8 << 20) if device == "cpu" else (64 << 20)


FETCH_IDLE_MS = 10_000
"""A fetch in which nothing moves for so long has failed: nothing is computed meanwhile that it would wait for."""
DIGEST_EVERY = {"full": 1, "sampled": 16}
"""The interval of digests that `--kv-digest` stands for, in blocks."""


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Raises `ValueError` on values that cannot work together."""

    transports: tuple[str, ...] = AUTO
    """Those allowed, best first. The sender proposes, and the receiver takes the first that it can use too."""
    demote_ms: int = 5_000
    """A transport that broke is not proposed to the same peer again for so long, and twice as long each further time."""
    demote_max_ms: int = 300_000
    """But never longer."""
    segment_bytes: int = 8 << 20
    """Largest segment, on the sender: what it packs into one message; on the receiver: what it makes room for per pair.
    The smaller of the two holds. A block is never split, so a larger block makes a larger segment."""
    digest_every: int = 1
    """Where KV is digested on a GPU: one segment in so many, as the receiver says. Digests made by the CPU are always made."""
    pairs_bytes: int = 2 << 30
    """Memory that pairs may take for buffers of their own, as estimated. Over it, idle ones are given up, those first whose
    last transfer is longest ago."""
    window_segments: int = 4
    """Segments announced and not yet sent, per pair. One would leave the receiver idle while the next is packed."""
    window_bytes: int = 32 << 20
    """Small segments may be more than `window_segments`, up to so many bytes: a round trip of the control link takes as long
    whatever their size. An announced segment is sent even if its session is aborted, so this bounds the waste; where it is
    skipped instead (`Transport.skips_unwanted`), as many as a receiver queues may be announced at once."""
    shm_window_bytes: int = SHM_WINDOW_BYTES
    """Bytes that a receiver shares with one sender of its host, and with no other, for what is under way between them. They
    have room for two of the largest segments at least."""
    bytes_per_s: int = 0
    """The receiver begins no more than this, of all pairs together, while it is busy; 0: no limit. A segment is held back for
    a quarter of `segment_timeout_ms` at most, counted from the pair's one before."""
    burst_bytes: int = 64 << 20
    """So much of it comes at full speed after a pause."""
    rendezvous_timeout_ms: int = 10_000
    """A pair that is not up by then is given up, and its sessions fail."""
    segment_timeout_ms: int = 3_000
    """One segment must cross in this time, or its pair is given up. It bounds how long a killed peer goes unnoticed
    on the data plane, and so how long blocks stay untouchable after a failure."""
    decide_timeout_ms: int = 10_000
    """An offer that nobody has decided on is declined."""
    accept_timeout_ms: int = 15_000
    """An offer without an answer has failed. Longer than the receiver's `decide_timeout_ms`, whose reason is better."""
    idle_timeout_ms: int = 300_000
    """An accepted session in which nothing moves for this long has failed. Prefill compute counts as standing still,
    so this is a last resort: the coordinator's word comes first."""
    ack_timeout_ms: int = 15_000
    """A commit without an answer has failed (for the sender: the receiver may have the KV)."""
    sessions_max: int = 4_096
    """Live sessions per driver; more offers are declined."""
    pairs_max: int = 256
    """Pairs per driver, dying ones included; each is a thread. A pair over the limit is refused."""
    remembered_max: int = 4_096
    """Ended sessions kept to answer late frames; what is older is answered as unknown."""
    remembered_ms: int = 60_000
    """And for how long. Longer than any answer is waited for."""
    remembers_digests: bool = True
    """The sender keeps the digests of its blocks, and is told of each that changes; else they are made in sending."""
    encrypt: bool = False
    """KV crosses encrypted by `tcp` if either end wants it."""

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
