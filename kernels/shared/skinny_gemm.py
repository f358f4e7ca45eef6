"""Skinny GEMM in Triton: up to four weights of one input in one launch, each read once.

A program owns BLOCK_N rows of one weight and runs over all of K; which weight follows from its index, so sibling projections
need no packing. With one row of input a product would leave the tensor cores idle, so it multiplies and adds instead
(BLOCK_M = 1); otherwise M is padded to BLOCK_M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm(
    x, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, M, stride_x, N0, N1, N2, N3,
    K: tl.constexpr, COUNT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    w, b, y, n, first, which = w0, b0, y0, N0, tile * 0, tile * 0
    end = tl.cdiv(N0, BLOCK_N)
    if COUNT > 1:
        if tile >= end:
            w, b, y, n, first, which = w1, b1, y1, N1, end, which + 1
        end += tl.cdiv(N1, BLOCK_N)
    if COUNT > 2:
        if tile >= end:
            w, b, y, n, first, which = w2, b2, y2, N2, end, which + 2
        end += tl.cdiv(N2, BLOCK_N)
    if COUNT > 3:
        if tile >= end:
            w, b, y, n, first, which = w3, b3, y3, N3, end, which + 3
    rn = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    rm = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rk = tl.arange(0, BLOCK_K)
    inside_n, inside_m = rn < n, rm < M
    w_tile = w + rn.to(tl.int64)[:, None] * K + rk[None, :]
    if BLOCK_M == 1:
        x_tile = x + tl.program_id(1).to(tl.int64) * stride_x + rk
        wide = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                wv = tl.load(w_tile, mask=inside_n[:, None], other=0.0, eviction_policy="evict_first")
                xv = tl.load(x_tile)
            else:
                wv = tl.load(w_tile, mask=inside_n[:, None] & (rk < K - k)[None, :], other=0.0, eviction_policy="evict_first")
                xv = tl.load(x_tile, mask=rk < K - k, other=0.0)
            wide += wv.to(tl.float32) * xv.to(tl.float32)[None, :]
            w_tile += BLOCK_K
            x_tile += BLOCK_K
        acc = tl.sum(wide, axis=1)[None, :]
    else:
        x_tile = x + rm.to(tl.int64)[:, None] * stride_x + rk[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                wv = tl.load(w_tile, mask=inside_n[:, None], other=0.0, eviction_policy="evict_first")
                xv = tl.load(x_tile, mask=inside_m[:, None], other=0.0)
            else:
                wv = tl.load(w_tile, mask=inside_n[:, None] & (rk < K - k)[None, :], other=0.0, eviction_policy="evict_first")
                xv = tl.load(x_tile, mask=inside_m[:, None] & (rk < K - k)[None, :], other=0.0)
            acc = tl.dot(xv, tl.trans(wv), acc, input_precision="ieee")
            w_tile += BLOCK_K
            x_tile += BLOCK_K
    if BIAS != 0:
        if ((BIAS >> which) & 1) != 0:
            acc += tl.load(b + rn, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    y_tile = y + rm.to(tl.int64)[:, None] * n + rn[None, :]
    tl.store(y_tile, acc.to(y.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


def skinny_gemm(x, parameters, BLOCK_M, BLOCK_N, BLOCK_K, WARPS, STAGES):
    """x: (..., K); parameters: weights (N, K), each followed by its bias (N,) if it has one. Returns one (..., N) a weight."""
    K = x.shape[-1]
    flat = x.reshape(-1, K)
    M = flat.shape[0]
    weights, biases = [], []
    for tensor in parameters:
        if tensor.dim() == 2:
            weights.append(tensor.contiguous())
            biases.append(None)
        else:
            biases[-1] = tensor.contiguous()
    count = len(weights)
    sizes = [w.shape[0] for w in weights]
    outputs = [torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device) for n in sizes]
    bias = sum(1 << i for i, b in enumerate(biases) if b is not None)
    pad = 4 - count
    grid = (sum(triton.cdiv(n, BLOCK_N) for n in sizes), triton.cdiv(M, BLOCK_M))
    _skinny_gemm[grid](
        flat, *weights, *([weights[0]] * pad), *[w if b is None else b for w, b in zip(weights, biases)], *([weights[0]] * pad),
        *outputs, *([outputs[0]] * pad), M, flat.stride(0), *sizes, *([sizes[0]] * pad),
        K=K, COUNT=count, BIAS=bias, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return tuple(outputs)
