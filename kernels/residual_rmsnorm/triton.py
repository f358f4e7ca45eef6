"""Triton: residual add and RMSNorm, one program a row. The norm reads the sum before it is rounded to the model's type, which is
nearer to the exact result than the model itself (and is what Inductor does)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _residual_rmsnorm(
    residual, delta, weight, total, normed, stride_r, stride_d, N, EPS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    r = tl.load(residual + row * stride_r + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(delta + row * stride_d + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    x = r + d
    tl.store(total + row * N + column, x.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + EPS)
    tl.store(normed + row * N + column, (x * scale * (w + OFFSET)).to(normed.dtype.element_ty), mask=inside)


def run(residual, delta, weight, eps, offset, WARPS):
    N = residual.shape[-1]
    r, d = residual.reshape(-1, N), delta.reshape(-1, N)
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(total)
    _residual_rmsnorm[(r.shape[0],)](
        r, d, weight, total, normed, r.stride(0), d.stride(0), N,
        EPS=eps, OFFSET=offset, BLOCK=triton.next_power_of_2(N), num_warps=WARPS,
    )  # fmt: skip
    return total, normed
