"""Triton: RMSNorm and rotary embedding of query and key heads, HEADS heads of one token a program, written as attention reads
them. The partner of a rotated channel is loaded again (it is in L1) rather than shuffled."""

import torch
import triton
import triton.language as tl


@triton.jit
def _qk_norm_rope(
    q, qw, k, kw, cos, sin, q_out, k_out, S, HQ, HK,
    q_b, q_s, q_h, k_b, k_s, k_h, c_b, c_s, s_b, s_s, oq_b, oq_s, oq_h, ok_b, ok_s, ok_h, D,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr, OFFSET: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.cdiv(HQ, HEADS)
    x, w, out, x_h, out_h, heads = q + b * q_b + s * q_s, qw, q_out + b * oq_b + s * oq_s, q_h, oq_h, HQ
    eps = Q_EPS
    if tile >= tiles:
        x, w, out, x_h, out_h, heads = k + b * k_b + s * k_s, kw, k_out + b * ok_b + s * ok_s, k_h, ok_h, HK
        eps = K_EPS
        tile -= tiles
    head = tile * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(channel < half, channel + half, channel - half)
    rotated = channel < ROTARY
    inside = (head < heads)[:, None] & (channel < D)[None, :]
    paired = (head < heads)[:, None] & rotated[None, :]
    v = tl.load(x + head[:, None] * x_h + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    p = tl.load(x + head[:, None] * x_h + partner[None, :], mask=paired, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=1) / D + eps)
    v = v * scale[:, None] * (tl.load(w + channel, mask=channel < D, other=0.0).to(tl.float32) + OFFSET)[None, :]
    p = p * scale[:, None] * (tl.load(w + partner, mask=rotated, other=0.0).to(tl.float32) + OFFSET)[None, :]
    c = tl.load(cos + b * c_b + s * c_s + channel, mask=rotated, other=1.0).to(tl.float32)
    d = tl.load(sin + b * s_b + s * s_s + channel, mask=rotated, other=0.0).to(tl.float32)
    d = tl.where(channel < half, -d, d)
    result = v * c[None, :] + p * d[None, :]
    tl.store(out + head[:, None] * out_h + channel[None, :], result.to(q_out.dtype.element_ty), mask=inside)


def _last_dense(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def run(q, q_weight, k, k_weight, cos, sin, eps, k_eps, offset, heads_first, rotary, HEADS, WARPS):
    q, k, cos, sin = _last_dense(q), _last_dense(k), _last_dense(cos), _last_dense(sin)
    B, S, HQ, D = q.shape
    HK = k.shape[2]
    shape = (lambda h: (B, h, S, D)) if heads_first else (lambda h: (B, S, h, D))
    q_out = torch.empty(shape(HQ), dtype=q.dtype, device=q.device)
    k_out = torch.empty(shape(HK), dtype=k.dtype, device=k.device)
    s, h = (2, 1) if heads_first else (1, 2)
    wide = (B, 1, S, rotary) if heads_first else (B, S, 1, rotary)
    cos, sin = cos.expand(wide), sin.expand(wide)
    grid = (B * S, triton.cdiv(HQ, HEADS) + triton.cdiv(HK, HEADS))
    _qk_norm_rope[grid](
        q, q_weight, k, k_weight, cos, sin, q_out, k_out, S, HQ, HK,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        cos.stride(0), cos.stride(s), sin.stride(0), sin.stride(s),
        q_out.stride(0), q_out.stride(s), q_out.stride(h), k_out.stride(0), k_out.stride(s), k_out.stride(h), D,
        Q_EPS=eps, K_EPS=k_eps, OFFSET=offset, ROTARY=rotary, HEADS=HEADS, BLOCK=triton.next_power_of_2(D), num_warps=WARPS,
    )  # fmt: skip
    return q_out, k_out
