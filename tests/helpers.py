"""Small models, graphs and problems that tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from jasperk_inductor import api, trace
from jasperk_inductor.contract import Problem, TensorSpec, Tolerance

FAMILIES = (
    "attn_output", "attn_qkv", "ffn_down", "ffn_gate_up", "gated_rmsnorm", "gdn_input", "qk_norm_rope", "residual_rmsnorm", "silu_mul",
)  # fmt: skip

# torch 2.11's Inductor, with no help from us, writes past its buffers when it compiles this model for a CPU (2.13 does not; nor does
# 2.11 with config.cpp.simdlen = 1). The heap breaks some calls later, so nothing after it could be trusted.
whole_model_on_a_cpu = pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11's Inductor overruns buffers here")

PROBLEMS = (*FAMILIES, "residual_rmsnorm/normed")


class RMSNorm(nn.Module):
    """Zero-centred, in fp32, as Qwen3.5 has it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).type_as(x)


class MLP(nn.Module):
    """A SwiGLU feed-forward: families A, B and G."""

    def __init__(self, width: int = 64, inner: int = 128, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Residual, norm, feed-forward: families A, B, F and G."""

    def __init__(self, width: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(width), MLP(width, inner)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + y
        return x + self.mlp(self.norm(x))


def graphs(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[fx.GraphModule]:
    """The Dynamo graphs of one call."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=keep, dynamic=dynamic)(*args, **kwargs)
    return found


def sites(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> tuple[list[Any], list[Any]]:
    """Sites and kept matches of a function's only graph."""
    with torch.no_grad():
        (gm,) = graphs(function, *args, dynamic=dynamic)
        return trace.sites(gm.graph)


def counts(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> dict[str, int]:
    found: dict[str, int] = {}
    for site in sites(function, *args, dynamic=dynamic)[0]:
        found[site.family] = found.get(site.family, 0) + 1
    return found


def card_problems(batch: int = 2, dtype: str = "float32", phase: str = "decode", **changes: Any) -> dict[str, Any]:
    """A site for each distinct problem of the tiny Qwen3.8, by family; a family's further ones as "family/outputs"."""
    found: dict[str, Any] = {}
    for site in api.distinct(api.Workload("qwen3_8", "tiny", batch=batch, dtype=dtype, phase=phase, **changes).sites()):
        further = f"{site.family}/{'+'.join(t.role for t in site.problem.outputs)}"
        found[further if site.family in found else site.family] = site
    assert set(found) == set(PROBLEMS)
    return found


def scale_problem(width: int = 64, tolerance: Tolerance | None = None, **kinds: str) -> Problem:
    """y = x * 2 + 1: the smallest problem that a kernel can get wrong in every way."""
    return Problem(
        family="scale",
        reference="import torch\n\ndef reference(x):\n    return (x * 2 + 1,)\n",
        inputs=(TensorSpec("x", ("r0", width), "float32", **kinds),),
        outputs=(TensorSpec("y", ("r0", width), "float32"),),
        tolerance=tolerance or Tolerance(),
    )


SCALE_CPP = """
extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const float* x = JK_DATA(x);
  float* y = JK_DATA(y);
  for (int64_t r = 0; r < JK_SIZE(x, 0); r++)
    for (int64_t i = 0; i < JK_SIZE(x, 1); i++) y[r * JK_SIZE(y, 1) + i] = x[r * JK_STRIDE(x, 0) + i] * 2 + 1;
  return 0;
}
"""
