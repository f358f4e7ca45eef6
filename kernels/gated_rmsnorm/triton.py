"""Triton: rms_norm(x) * silu(gate), HEADS rows of one head each a program."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _gated_rmsnorm(
    x, weight, gate, out, M, stride_x, stride_g, N,
    EPS: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    v = tl.load(x + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row[:, None] * stride_g + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET
    scale = tl.rsqrt(tl.sum(v * v, axis=1) / N + EPS)
    result = v * scale[:, None] * w[None, :] * (g * tl.sigmoid(g))
    tl.store(out + row[:, None] * N + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def run(x, weight, gate, eps, offset, HEADS, WARPS):
    N = x.shape[-1]
    rows, gates = x.reshape(-1, N), gate.reshape(-1, N)
    M = rows.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _gated_rmsnorm[(triton.cdiv(M, HEADS),)](
        rows, weight, gates, out, M, rows.stride(0), gates.stride(0), N,
        EPS=eps, OFFSET=offset, HEADS=HEADS, BLOCK=triton.next_power_of_2(N), num_warps=WARPS,
    )  # fmt: skip
    return out
