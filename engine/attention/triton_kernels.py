"""The attention kernels, in Triton. Scores and sums are float32; offsets into the pool are 64 bits wide.

The pool is [blocks, layers, 2, block_size, kv_heads, head_dim]; `kv` points to the K of the layer in block 0. Kernels find the
KV of a position by its block table, so it needs neither contiguous blocks nor a size that is a power of two.
"""

import triton
import triton.language as tl

# Triton compiles a kernel anew for integers that are 1 or multiples of 16, and for pointers that are, or are not, aligned to 16
# bytes. Values that change from batch to batch must not make it compile while requests wait.
PER_BATCH = ["lengths", "positions", "row_starts", "slots", "table_stride", "tables", "tile_count", "tiles", "window"]


@triton.jit(do_not_specialize=PER_BATCH)
def write(k, v, kv, slots, k_stride, v_stride, v_distance, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """One program for each token: its K and V rows [WIDTH = kv_heads * head_dim] go to its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.arange(0, PADDED)
    keep = at < tl.where(slot >= 0, WIDTH, 0)
    target = kv + slot * WIDTH + at
    tl.store(target, tl.load(k + row * k_stride + at, mask=keep), mask=keep)
    tl.store(target + v_distance, tl.load(v + row * v_stride + at, mask=keep), mask=keep)


@triton.jit
def _tile_of_keys(kv, table, positions, is_seen, head, dims, block_stride, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
                  DIM: tl.constexpr):  # fmt: skip
    """Pointers to one head of some positions [positions, dims], and which of them may be read."""
    block = tl.load(table + positions // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
    rows = block * block_stride + ((positions % BLOCK_SIZE) * KV_HEADS + head) * DIM
    return kv + rows[:, None] + dims[None, :], is_seen[:, None] & (dims < DIM)[None, :]


@triton.jit
def _scores(q, key, scale, softcap, SOFTCAP: tl.constexpr):
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _add_tile(scores, value, highest, total, summed):
    """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): takes in the scores and values of some more keys."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - shift[:, None])
    fade = tl.exp(highest - shift)
    summed = summed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new_highest, total * fade + tl.sum(weights, 1), summed


@triton.jit
def _split_range(length, window, SPLITS: tl.constexpr, SPLIT_MIN: tl.constexpr):
    """(first key seen, keys of one split): they depend on this sequence alone, so its sums do not depend on its neighbours."""
    begin = tl.maximum(length - window, 0)
    keys = (length - begin + SPLITS - 1) // SPLITS
    return begin, tl.maximum((keys + SPLIT_MIN - 1) // SPLIT_MIN, 1) * SPLIT_MIN


@triton.jit(do_not_specialize=PER_BATCH)
def decode(q, kv, tables, lengths, sums, stats, scale, softcap, window, table_stride, block_stride, v_distance,
           SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
           DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """One token of each sequence over its KV, in splits (Flash-Decoding). Program (sequence, kv head, split); the query heads
    that share a KV head are the rows of one product. q [sequences, heads, DIM] → sums [sequences, heads, SPLITS, DIM_PAD] and
    stats [sequences, heads, SPLITS, 2] (largest score, sum of weights), both float32. Splits without keys write nothing."""
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin, keys = _split_range(length, window, SPLITS, TILE)
    first = begin + split * keys
    last = tl.minimum(first + keys, length)
    if first >= length:
        return
    dims, group = tl.arange(0, DIM_PAD), tl.arange(0, GROUP_PAD)
    heads = (sequence * KV_HEADS + head) * GROUP + group
    is_head = group < GROUP
    query = tl.load(q + heads[:, None] * DIM + dims[None, :], mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    summed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(first, last, TILE):
        positions = start + tl.arange(0, TILE)
        is_seen = positions < last
        pointers, mask = _tile_of_keys(
            kv,
            tables + sequence * table_stride,
            positions,
            is_seen,
            head,
            dims,
            block_stride,
            BLOCK_SIZE,
            KV_HEADS,
            DIM,
        )
        scores = _scores(query, tl.load(pointers, mask=mask, other=0.0), scale, softcap, SOFTCAP)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        value = tl.load(pointers + v_distance, mask=mask, other=0.0)
        highest, total, summed = _add_tile(scores, value, highest, total, summed)
    at = heads * SPLITS + split
    tl.store(sums + at[:, None] * DIM_PAD + dims[None, :], summed, mask=is_head[:, None])
    tl.store(stats + at * 2, highest, mask=is_head)
    tl.store(stats + at * 2 + 1, total, mask=is_head)


@triton.jit(do_not_specialize=PER_BATCH)
def join_splits(sums, stats, lengths, out, window, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                TILE: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Program (sequence, head): what `decode` left of its splits → out [sequences, HEADS, DIM]."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + sequence)
    begin, keys = _split_range(length, window, SPLITS, TILE)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM_PAD)
    is_used = begin + splits * keys < length
    at = (sequence * HEADS + head) * SPLITS + splits
    highest = tl.load(stats + at * 2, mask=is_used, other=float("-inf"))
    fade = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(tl.load(stats + at * 2 + 1, mask=is_used, other=0.0) * fade, 0)
    parts = tl.load(sums + at[:, None] * DIM_PAD + dims[None, :], mask=is_used[:, None], other=0.0)
    attended = tl.sum(parts * fade[:, None], 0) / total
    tl.store(out + (sequence * HEADS + head) * DIM + dims, attended.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=PER_BATCH)
def prefill(q, kv, tables, lengths, row_starts, tiles, out, scale, softcap, window, tile_count, table_stride, block_stride,
            v_distance, SOFTCAP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
            DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Chunks of prompts, or anything mixed, over the KV of their sequences, which is in the pool (FlashAttention-2,
    arXiv:2307.08691). Program (tile, head): ROWS consecutive tokens of one sequence. q and out [tokens, HEADS, DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + tile_count + tile)
    start = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - start
    before = tl.load(lengths + sequence) - count
    rows, dims = first + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    at = ((start + rows).to(tl.int64) * HEADS + head)[:, None] * DIM + dims[None, :]
    is_row = (rows < count)[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + at, mask=is_row, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    begin = tl.maximum(before + first - window + 1, 0) // TILE * TILE
    end = before + tl.minimum(first + ROWS, count)
    for key in range(begin, end, TILE):
        positions = key + tl.arange(0, TILE)
        pointers, mask = _tile_of_keys(
            kv, tables + sequence * table_stride, positions, positions < end, head // (HEADS // KV_HEADS), dims,
            block_stride, BLOCK_SIZE, KV_HEADS, DIM,
        )  # fmt: skip
        scores = _scores(query, tl.load(pointers, mask=mask, other=0.0), scale, softcap, SOFTCAP)
        own = (before + rows)[:, None]
        is_seen = (positions[None, :] <= own) & (positions[None, :] > own - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        value = tl.load(pointers + v_distance, mask=mask, other=0.0)
        highest, total, summed = _add_tile(scores, value, highest, total, summed)
    attended = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at, attended.to(out.dtype.element_ty), mask=is_row)
