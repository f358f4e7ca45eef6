"""Triton: residual add and RMSNorm, one program a row. The norm reads the sum before it is rounded to the model's type, which is
nearer to the exact result than the model itself (and is what Inductor does)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _residual_rmsnorm(
    residual, earlier, delta, weight, total, normed, stride_r, stride_e, stride_d, N,
    EPS: tl.constexpr, OFFSET: tl.constexpr, EARLIER: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    r = tl.load(residual + row * stride_r + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(delta + row * stride_d + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    x = r + d
    if EARLIER:
        x = r + tl.load(earlier + row * stride_e + column, mask=inside, other=0.0).to(tl.float32) + d
    if SUM:
        tl.store(total + row * N + column, x.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + EPS)
    tl.store(normed + row * N + column, (x * scale * (w + OFFSET)).to(normed.dtype.element_ty), mask=inside)


def run(residual, *others, eps, offset, SUM, WARPS):
    *earlier, delta, weight = others
    N = residual.shape[-1]
    r, d = residual.reshape(-1, N), delta.reshape(-1, N)
    e = earlier[0].reshape(-1, N) if earlier else d
    normed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed) if SUM else normed
    _residual_rmsnorm[(r.shape[0],)](
        r, e, d, weight, total, normed, r.stride(0), e.stride(0), d.stride(0), N,
        EPS=eps, OFFSET=offset, EARLIER=bool(earlier), SUM=SUM, BLOCK=triton.next_power_of_2(N), num_warps=WARPS,
    )  # fmt: skip
    return (total, normed) if SUM else normed
