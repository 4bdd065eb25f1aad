# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of attention with dropout; see `attention.py`, which imports them when they are first needed.

Letters: M members, B rows of a batch, H heads, Q queries, K keys, D the width of a head. Each program has one head of
one row of one member. Elements of the dropout mask are those of `randomness.counter_bits`, computed where they are
used, so the mask is never in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stream(seeds, steps, sites, member):
    """Return the two keys of a member's draw."""
    seed = tl.load(seeds + member)
    step = tl.load(steps + member).to(tl.uint32)
    site = tl.load(sites + member).to(tl.uint32)
    key = _mix(seed.to(tl.uint32) ^ _mix((seed >> 32).to(tl.uint32)))
    key = _mix(key ^ _mix(step + 0x9E3779B9))
    key = _mix(key ^ _mix((site + 1) * 0x85EBCA6B))
    return key, _mix(key + 0x9E3779B9)


@triton.jit
def _mask(first, queries, keys, num_keys, key, again, limit, one):
    """Return the dropout mask [Q, K]: `one` where an element is kept, zero elsewhere."""
    element = (first + queries[:, None] * num_keys + keys[None, :]).to(tl.uint32)
    bits = _mix(_mix(element ^ key) ^ again)
    below = (bits <= (limit - 1).to(tl.uint32)) & (limit > 0)
    return tl.where(below, one, 0.0)


@triton.jit
def _scores(
    q, k, queries, keys, num_queries, num_keys, scale, mask, mask_q, mask_k,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the scaled products [Q, K] with the additive mask, minus infinity where a key is not attended to."""
    scores = tl.dot(q, tl.trans(k)) * scale
    inside = (queries[:, None] < num_queries) & (keys[None, :] < num_keys)
    if HAS_MASK:
        places = mask + queries[:, None].to(tl.int64) * mask_q + keys[None, :].to(tl.int64) * mask_k
        scores += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        inside = inside & (keys[None, :] <= queries[:, None])
    return tl.where(inside, scores, float("-inf"))


@triton.jit
def _rows(pointer, places, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to rows [places, D] and which elements exist."""
    if ALIGNED:
        stride = tl.multiple_of(stride, 8)
    columns = tl.arange(0, BLOCK_D)
    inside = (places[:, None] < count) & (columns[None, :] < D)
    return pointer + places[:, None].to(tl.int64) * stride + columns[None, :], inside


@triton.jit
def _head(pointer, member, row, head, of_member, of_row, of_head, ALIGNED: tl.constexpr):
    """Return the pointer to a head."""
    offset = member * of_member + row * of_row + head * of_head
    if ALIGNED:
        offset = tl.multiple_of(offset, 8)
    return pointer + offset


INTEGERS = (
    "batch", "heads", "num_queries", "num_keys", "qm", "qb", "qh", "qt", "km", "kb", "kh", "kt", "vm", "vb", "vh", "vt",
    "mm", "mb", "mh", "mq", "mk",
)  # fmt: skip
"""Arguments that a kernel is not compiled again for: sizes and strides."""


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    q_at, k_at, v_at, mask_at, out_at, stats_at, seeds, steps, sites, limits, ones,
    batch, heads, num_queries, num_keys, scale,
    qm, qb, qh, qt, km, kb, kh, kt, vm, vb, vh, vt, mm, mb, mh, mq, mk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the output [M, B, Q, H, D], and each query's largest score and sum of exponentials [2, M, B, H, Q]."""
    place = tl.program_id(0)
    head, row, member = place % heads, (place // heads) % batch, place // (heads * batch)
    head, row, member = head.to(tl.int64), row.to(tl.int64), member.to(tl.int64)
    key, again = _stream(seeds, steps, sites, member)
    limit, one = tl.load(limits + member), tl.load(ones + member).to(tl.float32)
    first = ((row * heads + head) * num_queries * num_keys).to(tl.int32)
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_at = _head(q_at, member, row, head, qm, qb, qh, ALIGNED)
    q_places, q_exists = _rows(q_at, queries, qt, num_queries, D, BLOCK_D, ALIGNED)
    q = tl.load(q_places, mask=q_exists, other=0.0)
    k_at = _head(k_at, member, row, head, km, kb, kh, ALIGNED)
    v_at = _head(v_at, member, row, head, vm, vb, vh, ALIGNED)
    mask_at += member * mm + row * mb + head * mh
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (tl.program_id(1) + 1) * BLOCK_Q)
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_places, exists = _rows(k_at, keys, kt, num_keys, D, BLOCK_D, ALIGNED)
        k = tl.load(k_places, mask=exists, other=0.0)
        scores = _scores(q, k, queries, keys, num_queries, num_keys, scale, mask_at, mq, mk, CAUSAL, HAS_MASK)
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        share = tl.exp2((scores - base[:, None]) * LOG2E)
        shrink = tl.exp2((largest - base) * LOG2E)
        total = total * shrink + tl.sum(share, 1)
        share = share * _mask(first, queries, keys, num_keys, key, again, limit, one)
        v_places, exists = _rows(v_at, keys, vt, num_keys, D, BLOCK_D, ALIGNED)
        v = tl.load(v_places, mask=exists, other=0.0)
        out = tl.dot(share.to(v.dtype), v, out * shrink[:, None])
        largest = larger
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.where(total == 0.0, 1.0, total)
    out = out / total[:, None]
    out_at += (member * batch + row) * num_queries * heads * D + head * D
    out_places, _ = _rows(out_at, queries, heads * D, num_queries, D, BLOCK_D, False)
    tl.store(out_places, out.to(out_at.dtype.element_ty), mask=q_exists)
    stats_at += place.to(tl.int64) * num_queries + queries
    tl.store(stats_at, base, mask=queries < num_queries)
    tl.store(stats_at + tl.num_programs(0).to(tl.int64) * num_queries, total, mask=queries < num_queries)


@triton.jit
def _shares(
    q, k, v, out, grad, stats_at, all_heads, queries, keys, num_queries, num_keys, scale, mask, mask_q, mask_k, first,
    key, again, limit, one, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return for a tile [Q, K] the shares after dropout, and the gradient of the scaled products."""
    exists = queries < num_queries
    largest = tl.load(stats_at + queries, mask=exists, other=0.0)
    total = tl.load(stats_at + all_heads + queries, mask=exists, other=1.0)
    scores = _scores(q, k, queries, keys, num_queries, num_keys, scale, mask, mask_q, mask_k, CAUSAL, HAS_MASK)
    share = tl.exp2((scores - largest[:, None]) * LOG2E) * (1.0 / total)[:, None]
    dropout = _mask(first, queries, keys, num_keys, key, again, limit, one)
    of_share = tl.dot(grad, tl.trans(v)) * dropout
    together = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    return share * dropout, share * (of_share - together[:, None]) * scale


@triton.jit(do_not_specialize=INTEGERS)
def backward(
    q_at, k_at, v_at, mask_at, out_at, stats_at, grad_at, dq_at, dk_at, dv_at, seeds, steps, sites, limits, ones,
    batch, heads, num_queries, num_keys, scale,
    qm, qb, qh, qt, km, kb, kh, kt, vm, vb, vh, vt, mm, mb, mh, mq, mk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr, ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and their values; and of the queries, if the block has all keys.

    Output, its gradient and those written are contiguous [M, B, Q, H, D] and [M, B, K, H, D].
    """
    place = tl.program_id(0)
    head, row, member = place % heads, (place // heads) % batch, place // (heads * batch)
    head, row, member = head.to(tl.int64), row.to(tl.int64), member.to(tl.int64)
    key, again = _stream(seeds, steps, sites, member)
    limit, one = tl.load(limits + member), tl.load(ones + member).to(tl.float32)
    first = ((row * heads + head) * num_queries * num_keys).to(tl.int32)
    q_at = _head(q_at, member, row, head, qm, qb, qh, ALIGNED)
    mask_at += member * mm + row * mb + head * mh
    of_query = (member * batch + row) * num_queries * heads * D + head * D
    of_key = (member * batch + row) * num_keys * heads * D + head * D
    stats_at += place.to(tl.int64) * num_queries
    all_heads = tl.num_programs(0).to(tl.int64) * num_queries
    keys = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    k_at = _head(k_at, member, row, head, km, kb, kh, ALIGNED)
    v_at = _head(v_at, member, row, head, vm, vb, vh, ALIGNED)
    k_places, k_exists = _rows(k_at, keys, kt, num_keys, D, BLOCK_D, ALIGNED)
    v_places, _ = _rows(v_at, keys, vt, num_keys, D, BLOCK_D, ALIGNED)
    k = tl.load(k_places, mask=k_exists, other=0.0)
    v = tl.load(v_places, mask=k_exists, other=0.0)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    begin = 0
    if CAUSAL:
        begin = (tl.program_id(1) * BLOCK_K) // BLOCK_Q * BLOCK_Q
    for start in range(begin, num_queries, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        places, exists = _rows(q_at, queries, qt, num_queries, D, BLOCK_D, ALIGNED)
        q = tl.load(places, mask=exists, other=0.0)
        offsets, exists = _rows(of_query, queries, heads * D, num_queries, D, BLOCK_D, False)
        out = tl.load(out_at + offsets, mask=exists, other=0.0)
        grad = tl.load(grad_at + offsets, mask=exists, other=0.0)
        dropped, of_scores = _shares(
            q, k, v, out, grad, stats_at, all_heads, queries, keys, num_queries, num_keys, scale, mask_at, mq, mk,
            first, key, again, limit, one, CAUSAL, HAS_MASK,
        )  # fmt: skip
        of_scores = of_scores.to(q.dtype)
        dv = tl.dot(tl.trans(dropped.to(grad.dtype)), grad, dv)
        dk = tl.dot(tl.trans(of_scores), q, dk)
        if ALL_KEYS:
            tl.store(dq_at + offsets, tl.dot(of_scores, k).to(dq_at.dtype.element_ty), mask=exists)
    key_offsets, _ = _rows(of_key, keys, heads * D, num_keys, D, BLOCK_D, False)
    tl.store(dk_at + key_offsets, dk.to(dk_at.dtype.element_ty), mask=k_exists)
    tl.store(dv_at + key_offsets, dv.to(dv_at.dtype.element_ty), mask=k_exists)


@triton.jit(do_not_specialize=INTEGERS)
def backward_of_queries(
    q_at, k_at, v_at, mask_at, out_at, stats_at, grad_at, dq_at, seeds, steps, sites, limits, ones,
    batch, heads, num_queries, num_keys, scale,
    qm, qb, qh, qt, km, kb, kh, kt, vm, vb, vh, vt, mm, mb, mh, mq, mk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries, from all keys."""
    place = tl.program_id(0)
    head, row, member = place % heads, (place // heads) % batch, place // (heads * batch)
    head, row, member = head.to(tl.int64), row.to(tl.int64), member.to(tl.int64)
    key, again = _stream(seeds, steps, sites, member)
    limit, one = tl.load(limits + member), tl.load(ones + member).to(tl.float32)
    first = ((row * heads + head) * num_queries * num_keys).to(tl.int32)
    k_at = _head(k_at, member, row, head, km, kb, kh, ALIGNED)
    v_at = _head(v_at, member, row, head, vm, vb, vh, ALIGNED)
    mask_at += member * mm + row * mb + head * mh
    of_query = (member * batch + row) * num_queries * heads * D + head * D
    stats_at += place.to(tl.int64) * num_queries
    all_heads = tl.num_programs(0).to(tl.int64) * num_queries
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_at = _head(q_at, member, row, head, qm, qb, qh, ALIGNED)
    q_places, q_exists = _rows(q_at, queries, qt, num_queries, D, BLOCK_D, ALIGNED)
    q = tl.load(q_places, mask=q_exists, other=0.0)
    offsets, _ = _rows(of_query, queries, heads * D, num_queries, D, BLOCK_D, False)
    out = tl.load(out_at + offsets, mask=q_exists, other=0.0)
    grad = tl.load(grad_at + offsets, mask=q_exists, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (tl.program_id(1) + 1) * BLOCK_Q)
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_places, exists = _rows(k_at, keys, kt, num_keys, D, BLOCK_D, ALIGNED)
        k = tl.load(k_places, mask=exists, other=0.0)
        v_places, exists = _rows(v_at, keys, vt, num_keys, D, BLOCK_D, ALIGNED)
        v = tl.load(v_places, mask=exists, other=0.0)
        _dropped, of_scores = _shares(
            q, k, v, out, grad, stats_at, all_heads, queries, keys, num_queries, num_keys, scale, mask_at, mq, mk,
            first, key, again, limit, one, CAUSAL, HAS_MASK,
        )  # fmt: skip
        dq = tl.dot(of_scores.to(k.dtype), k, dq)
    tl.store(dq_at + offsets, dq.to(dq_at.dtype.element_ty), mask=q_exists)
