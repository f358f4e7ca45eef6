"""Triton: silu(gate) * up, a block of one row a program."""

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(gate, up, out, stride_g, stride_u, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    g = tl.load(gate + row * stride_g + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_u + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def run(gate, up, BLOCK, WARPS):
    N = gate.shape[-1]
    g, u = gate.reshape(-1, N), up.reshape(-1, N)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _silu_mul[(g.shape[0], triton.cdiv(N, BLOCK))](g, u, out, g.stride(0), u.stride(0), N, BLOCK=BLOCK, num_warps=WARPS)
    return out
