"""Triton: decode attention, split over the cache. One program takes one block of keys for all query heads that share them, and does
nothing but read the mask where the block is empty; a second kernel joins the blocks of a head."""

import torch
import triton
import triton.language as tl


@triton.jit
def _block(
    q, k, v, mask, part, peak, weight, q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, S, SCALE,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = split * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(mask + row * mask_b + token, mask=token < S, other=0) != 0
    group = tl.arange(0, PADDED)
    column = tl.arange(0, WIDTH)
    slot = ((row * HEADS + head) * tl.num_programs(0) + split) * GROUP + group
    if tl.sum(live.to(tl.int32), axis=0) == 0:
        tl.store(peak + slot, tl.full((PADDED,), float("-inf"), tl.float32), mask=group < GROUP)
        return
    wide = column < D
    heads = head * GROUP + group
    queries = tl.load(q + row * q_b + heads[:, None] * q_h + column[None, :], mask=(group < GROUP)[:, None] & wide[None, :], other=0.0)
    seen = live[:, None] & wide[None, :]
    keys = tl.load(k + row * k_b + head * k_h + token[:, None] * k_s + column[None, :], mask=seen, other=0.0)
    values = tl.load(v + row * v_b + head * v_h + token[:, None] * v_s + column[None, :], mask=seen, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
    scores = tl.where(live[None, :], scores, float("-inf"))
    top = tl.max(scores, axis=1)
    share = tl.exp(scores - top[:, None])
    tl.store(peak + slot, top, mask=group < GROUP)
    tl.store(weight + slot, tl.sum(share, axis=1), mask=group < GROUP)
    sums = tl.dot(share.to(values.dtype), values, input_precision="ieee")
    tl.store(part + slot[:, None] * D + column[None, :], sums, mask=(group < GROUP)[:, None] & wide[None, :])


@triton.jit
def _join(part, peak, weight, out, SPLITS, HEADS, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split = tl.arange(0, PADDED)
    slot = ((row * HEADS + head // GROUP) * SPLITS + split) * GROUP + head % GROUP
    peaks = tl.load(peak + slot, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(peaks, axis=0)
    live = peaks > float("-inf")
    scale = tl.where(live, tl.exp(peaks - top), 0.0)
    total = tl.sum(scale * tl.load(weight + slot, mask=live, other=0.0), axis=0)
    column = tl.arange(0, WIDTH)
    parts = tl.load(part + slot[:, None] * D + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)
    joined = tl.sum(parts * scale[:, None], axis=0) / total
    tl.store(out + (row * HEADS * GROUP + head) * D + column, joined.to(out.dtype.element_ty), mask=column < D)


def run(q, k, v, mask, scale, BLOCK, WARPS, STAGES):
    batch, heads, _, width = q.shape
    shared, capacity = k.shape[1], k.shape[2]
    group, splits = heads // shared, triton.cdiv(capacity, BLOCK)
    part = torch.empty((batch, shared, splits, group, width), dtype=torch.float32, device=q.device)
    peak = torch.empty((batch, shared, splits, group), dtype=torch.float32, device=q.device)
    weight = torch.empty_like(peak)
    out = torch.empty((batch, heads, 1, width), dtype=q.dtype, device=q.device)
    bits = mask.view(torch.uint8)
    power = triton.next_power_of_2(width)
    _block[(splits, shared, batch)](
        q, k, v, bits, part, peak, weight, q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], bits.stride(0), capacity, scale,
        HEADS=shared, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), D=width, WIDTH=max(16, power), BLOCK=BLOCK,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _join[(heads, batch)](
        part, peak, weight, out, splits, shared, GROUP=group, D=width, WIDTH=power, PADDED=triton.next_power_of_2(splits), num_warps=4
    )
    return out
