"""The kernels between a decoder's matrix products, in Triton. All compute in float32, whatever they read and write."""

import triton
import triton.language as tl

from engine.attention.triton_kernels import PER_BATCH


@triton.jit
def add_norm(x, delta, weight, out, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """Program: one row. x += delta if ADDS; out = x / sqrt(mean(x²) + epsilon) * weight. Rows are contiguous."""
    at = tl.arange(0, PADDED)
    keep = at < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + at
    values = tl.load(x + row, mask=keep, other=0.0)
    if ADDS:
        values = (values.to(tl.float32) + tl.load(delta + row, mask=keep, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(x + row, values, mask=keep)
    values = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    normed = values * scale * tl.load(weight + at, mask=keep, other=0.0)
    tl.store(out + row, normed.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _rotated_head(
    head, norm, cosine, sine, epsilon, dims, DIM: tl.constexpr, ROTARY: tl.constexpr, NORMS: tl.constexpr
):
    """One head [DIM], normed and rotated. Each dimension is computed from two, which are both loaded."""
    half = ROTARY // 2
    is_rotated = dims < ROTARY
    pair = tl.where(dims < half, dims + half, dims - half)
    pair = tl.where(is_rotated, pair, dims)
    own = tl.load(head + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    other = tl.load(head + pair, mask=dims < DIM, other=0.0).to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, 0) / DIM + epsilon)
        own = own * scale * tl.load(norm + dims, mask=dims < DIM, other=0.0)
        other = other * scale * tl.load(norm + pair, mask=dims < DIM, other=0.0)
    other = tl.where(dims < half, -other, other)
    cosines = tl.load(cosine + dims, mask=is_rotated, other=1.0)
    sines = tl.load(sine + dims, mask=is_rotated, other=0.0)
    return own * cosines + other * sines


@triton.jit(do_not_specialize=PER_BATCH)
def rotate_and_write(qkv, q, kv, slots, positions, query_norm, key_norm, cosine, sine, epsilon, v_distance,
                     HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                     ROTARY: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr):  # fmt: skip
    """Program (row, head of HEADS + KV_HEADS): a query goes to q [rows, HEADS, DIM]; a key and its value go to the row's slot,
    if it has one."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    keep = dims < DIM
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    place = tl.load(positions + row) * ROTARY
    if head < HEADS:
        turned = _rotated_head(source, query_norm, cosine + place, sine + place, epsilon, dims, DIM, ROTARY, QUERY_NORM)
        tl.store(q + (row * HEADS + head) * DIM + dims, turned.to(q.dtype.element_ty), mask=keep)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            turned = _rotated_head(source, key_norm, cosine + place, sine + place, epsilon, dims, DIM, ROTARY, KEY_NORM)
            target = kv + (slot * KV_HEADS + head - HEADS) * DIM + dims
            tl.store(target, turned.to(kv.dtype.element_ty), mask=keep)
            tl.store(target + v_distance, tl.load(source + KV_HEADS * DIM + dims, mask=keep), mask=keep)


@triton.jit
def activate(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    """Program (row, part): activation(gate) * up; SiLU, or GELU in its tanh form, which is x * sigmoid of a polynomial."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    keep = at < INNER
    gate = tl.load(gate_up + row * 2 * INNER + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + at, mask=keep, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = 1.595769122 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * INNER + at, (gate * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=keep)
