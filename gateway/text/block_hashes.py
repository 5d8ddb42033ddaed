"""Names a prompt's KV blocks: one hash for each full block. The hash identifies the block's tokens and all tokens before them.
Pure.

    hash[i] = BLAKE2b-128(hash[i-1] + tokens of block i, key = group key)
    group key = BLAKE2b-256(block size and cache group, key = the cluster's random key)

- **Chained**: equal hashes mean equal beginnings of prompts, from the first token on, which is what makes KV equal.
- **Keyed by the cache group**: the tenant, unless the operator lets several share one. The hashes of two groups are unrelated
  128-bit numbers. So a tenant cannot detect another tenant's cached prompts, neither by speed nor in usage figures.
- **Keyed by the cluster**: all gateways have one random key, which they and the coordinator keep in memory only. Without the
  key, hashes reveal nothing about a prompt, even to someone who guesses the prompt block by block.
- **128 bits of a cryptographic hash**: among 10^9 cached blocks the chance of an accidental collision is 10^-21. No known
  attack makes a collision with fewer than 2^64 hashes, and it would only affect prompts of the attacker's own group.
- The number of tokens in a block is part of the key: caches of another block size are another name space.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from proto.codec import pack_tokens
from proto.kv import kept_names
from proto.limits import HASH_BYTES, MAX_BLOCK_HASHES


def session_name(given: str) -> bytes:
    """Returns the name that a conversation has on the wire, made from the name that its client gives it. The tenant is not
    part of it."""
    return blake2b(given.encode(errors="replace"), digest_size=HASH_BYTES).digest()


@dataclass(frozen=True)
class BlockNames:
    """The names of one prompt's blocks, and the parameters that they were computed with."""

    block_size: int
    cache_group: str
    hashes: bytes
    cluster_key: bytes = field(default=b"", repr=False)

    @staticmethod
    def of(packed: bytes, block_size: int, cache_group: str, cluster_key: bytes = b"") -> "BlockNames":
        hashes = block_hashes(packed, block_size, cache_group, cluster_key=cluster_key)
        return BlockNames(block_size, cache_group, hashes, cluster_key)

    def extended(self, packed: bytes) -> "BlockNames":
        """The hashes of a prompt that begins with this one."""
        hashes = block_hashes(packed, self.block_size, self.cache_group, self.hashes, self.cluster_key)
        return replace(self, hashes=hashes)

    def behind(self, packed: bytes, output: Sequence[int]) -> bytes:
        """Returns the names of the full blocks after the packed prompt's own blocks, which this object names. These later
        blocks end in the answer."""
        done, stride = len(self.hashes) // HASH_BYTES, 4 * self.block_size
        tail = (packed[done * stride :] + pack_tokens(output))[: (MAX_BLOCK_HASHES - done) * stride]
        last = self.hashes[-HASH_BYTES:]
        return chained(last, tail, self.block_size, self.cache_group, self.cluster_key)

    def of_kept(self, request_id: str, attempt: int, before: int, tokens: int) -> "BlockNames | None":
        """Returns the hashes for the next attempt's context, because the worker of this attempt may have kept its KV. This
        attempt had these names for `before` tokens. Returns None if not all full blocks of those tokens had names."""
        if len(self.hashes) // HASH_BYTES < before // self.block_size:
            return None
        hashes = kept_names(self.hashes, request_id, attempt, self.block_size, tokens)
        return replace(self, hashes=hashes[: MAX_BLOCK_HASHES * HASH_BYTES])


def group_key(cache_group: str, block_size: int, cluster_key: bytes = b"") -> bytes:
    """The key of one group's hashes: 32 bytes. `block_size` is in tokens."""
    text = f"{block_size}:{cache_group}".encode()
    return blake2b(text, digest_size=32, key=cluster_key, person=b"crossdock-prefix").digest()


def block_hashes(
    packed: bytes, block_size: int, cache_group: str, known: bytes = b"", cluster_key: bytes = b""
) -> bytes:
    """Returns 16 bytes for each full block of the packed token ids (little-endian int32), joined. Only the first
    `MAX_BLOCK_HASHES` blocks are hashed. `known`: hashes of the first blocks, which are not computed again."""
    assert block_size >= 1 and len(known) % HASH_BYTES == 0
    stride = 4 * block_size
    count = min(len(packed) // stride, MAX_BLOCK_HASHES)
    done = len(known) // HASH_BYTES
    rest = packed[done * stride : count * stride]
    return known + chained(known[-HASH_BYTES:], rest, block_size, cache_group, cluster_key)


def chained(before: bytes, packed: bytes, block_size: int, cache_group: str, cluster_key: bytes) -> bytes:
    """The hashes of full blocks of token ids that follow the block named `before`."""
    stride, found = 4 * block_size, []
    keyed = blake2b(digest_size=HASH_BYTES, key=group_key(cache_group, block_size, cluster_key))
    for start in range(0, len(packed) // stride * stride, stride):
        digest = keyed.copy()  # the key is taken in once
        digest.update(before + packed[start : start + stride])
        before = digest.digest()
        found.append(before)
    return b"".join(found)
