"""Blocks of a decode worker's pool that several attempts may hold, as its messages name them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits


class PrefixPart(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Blocks that an attempt holds of a chain: one that some attempt brought to this worker, one block after the other."""

    chain: Annotated[int, Meta(ge=0, lt=1 << 40)]
    """Never used again in the life of the process."""
    blocks: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """The first so many of it. Attempts with parts of the same chain hold the same blocks of the pool."""


PrefixParts = Annotated[tuple[PrefixPart, ...], Meta(max_length=limits.MAX_PREFIX_PARTS)]
