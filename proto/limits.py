"""Every bound on what a peer may put on the wire. Receivers enforce them before anything is allocated."""

from collections.abc import Mapping
from typing import Any, Final

PROTOCOL_VERSION = 1
"""Grows by one with every release that changes a message. Processes whose versions differ by one work together
(`proto.versions`). `docs/protocol.md` says how to change a message."""
MIN_PROTOCOL_VERSION = 1  # the oldest version this one can work with

MAX_FRAME_BYTES = 8 << 20  # a single ZeroMQ frame; sockets set it as MAXMSGSIZE; a packed prompt of 1M tokens is 4 MiB
MAX_FRAMES = 2  # a message is one MessagePack frame and at most one binary frame

MAX_ID_CHARS = 64
MAX_TEXT_CHARS = 512  # for reasons, addresses and names
MAX_CONTEXT_TOKENS = 1 << 20
MAX_CHOICES = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_GRAMMAR_CHARS = 1 << 16
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 1_000_000
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 32
MAX_PROMPT_LOGPROBS = 512  # of one `PromptLogprobs`
MAX_CHUNKS_PER_STEP = 256
MAX_PREFIX_PARTS = 16  # The most parts of one prompt. Blocks after these parts count as not shared.
MAX_BLOCKS_PER_REQUEST = MAX_CONTEXT_TOKENS
HASH_BYTES = 16  # of one KV block's contents, in the prefix cache
MAX_BLOCK_HASHES = 1 << 16
"""The most hashes of one prompt. The rest of a longer prompt is always computed. 1 MiB of a frame; a prompt of 1M tokens in
blocks of 16."""
MAX_CACHE_CHANGES = 4096  # of one `CacheEvents`
MAX_MODELS = 64
MAX_CLASSES_SHOWN = 64  # priority classes with a target, in one status
MAX_POLICY_CHARS = 4 << 20  # tables of a tenants file in JSON, without keys: some ten thousand tenants
MAX_POLICY_VERSIONS = 100
MAX_FLIPS_AT_ONCE = 64
MAX_SEGMENTS = 4096
MAX_SEGMENTS_ANNOUNCED = 256
KV_TIMEOUT_MS = 10_000  # without progress, after which a KV transfer is given up and its request tried again
MAX_TOKEN_ITEMS = 4096
MAX_TOKENS_PER_ITEM = 64
MAX_VOCAB = 1 << 24


def flips_at_once(workers: int) -> int:
    """How many of so many workers of one model may change their role at once."""
    return min(max(8, workers // 8), MAX_FLIPS_AT_ONCE)


_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_BY_LENGTH: Final = ("longrope", "su", "dynamic")
"""Rotary embeddings whose frequencies change with the longest sequence of a forward. Beyond the original context, KV that was
computed before would have other frequencies, and one stream would change another."""


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """Returns the longest context that computes the same for every batch; None if the configuration does not say.

    `config` is that of config.json or of transformers' class. YaRN extends its original context by its factor, as vLLM has it.
    Models with `longrope` and `dynamic` rotary embeddings keep their original context.
    """
    text = {**config, **(config.get("text_config") or {})}
    limit = next((length for key in _KEYS if (length := _length(text.get(key)))), None)
    if limit is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    extended: list[int] = []
    bounds = [MAX_CONTEXT_TOKENS]
    for one in (rope, *rope.values()):
        kind = one.get("rope_type", one.get("type")) if isinstance(one, Mapping) else None
        if kind in (*_BY_LENGTH, "yarn"):
            name = "original_max_position_embeddings"
            original, factor = _length(one.get(name)) or _length(text.get(name)) or limit, one.get("factor")
            if kind in _BY_LENGTH:
                bounds.append(original)
            elif isinstance(factor, int | float) and factor > 0:
                extended.append(max(1, int(original * factor)))
    return min(*(extended or [limit]), *bounds)


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
