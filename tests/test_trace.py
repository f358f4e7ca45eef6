"""Sites are found by what is computed: under any spelling, type, eps, stride, with modules or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import MLP, Layer, RMSNorm, counts, graphs, sites
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jasperk_inductor import reference, trace

LAYER = {"ffn_down": 1, "ffn_gate_up": 1, "residual_rmsnorm": 1, "silu_mul": 1}


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_layer_in_every_type_static_and_dynamic(dtype: torch.dtype, dynamic: bool | None) -> None:
    assert counts(Layer().to(dtype), x(2, 3, 64, dtype=dtype), x(2, 3, 64, dtype=dtype), dynamic=dynamic) == LAYER


def test_another_eps_and_fp32_norm_weights() -> None:
    layer = Layer().to(torch.bfloat16)
    layer.norm = RMSNorm(64, eps=3e-5)
    assert counts(layer, x(2, 3, 64, dtype=torch.bfloat16), x(2, 3, 64, dtype=torch.bfloat16)) == LAYER
    (norm,) = [
        s for s in sites(layer, x(1, 1, 64, dtype=torch.bfloat16), x(1, 1, 64, dtype=torch.bfloat16))[0] if s.family == "residual_rmsnorm"
    ]
    assert dict(norm.problem.params) == {"eps": 3e-5, "offset": 1.0}
    assert [t.dtype for t in norm.problem.inputs] == ["bfloat16", "bfloat16", "float32"]


def test_strided_inputs_are_found_and_their_layout_is_in_the_key() -> None:
    layer = Layer()
    dense = sites(layer, x(2, 3, 64), x(2, 3, 64))[0]
    turned = sites(layer, x(3, 2, 64).transpose(0, 1), x(3, 2, 64).transpose(0, 1))[0]
    assert [s.family for s in dense] == [s.family for s in turned]
    layouts = {s.family: [t.layout for t in s.problem.inputs] for s in turned}
    assert layouts["residual_rmsnorm"] == ["strided", "strided", "contiguous"]
    assert {s.family: s.problem.hash for s in dense}["residual_rmsnorm"] != {s.family: s.problem.hash for s in turned}["residual_rmsnorm"]


def test_a_slice_of_a_wider_tensor_is_pitched() -> None:
    def f(wide: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(wide[..., :32]) * up

    ((site,), _) = sites(f, x(2, 3, 48), x(2, 3, 32))
    assert [t.layout for t in site.problem.inputs] == ["pitched:48", "contiguous"]
    assert [t.align for t in site.problem.inputs] == [16, 16]
    ((odd,), _) = sites(f, x(2, 3, 49)[..., 1:], x(2, 3, 32))
    assert odd.problem.inputs[0].align == 4


def test_functions_without_any_module() -> None:
    def f(a, b, w, g, u, d):
        h = torch.add(a, b)
        n = h.float()
        n = n.mul(torch.rsqrt(torch.mean(torch.square(n), dim=-1, keepdim=True) + 1e-5)).to(h.dtype) * w
        return h + F.linear(F.linear(n, g).sigmoid() * 0 + F.silu(F.linear(n, g)) * F.linear(n, u), d)

    found = counts(lambda *t: _plain(*t), x(2, 64), x(2, 64), x(64), x(96, 64), x(96, 64), x(64, 96))
    assert found == LAYER
    assert "residual_rmsnorm" in counts(f, x(2, 64), x(2, 64), x(64), x(96, 64), x(96, 64), x(64, 96))


def _plain(a, b, w, g, u, d):
    h = torch.add(a, b)
    n = h * torch.rsqrt((h * h).mean((-1,), keepdim=True) + 1e-5) * w
    return h + F.linear(F.silu(F.linear(n, g)) * F.linear(n, u), d)


def test_torchs_own_rms_norm() -> None:
    def f(a, b, w):
        return F.rms_norm(a + b, (64,), w, 1e-6)

    ((site,), _) = sites(f, x(2, 64), x(2, 64), x(64))
    assert site.family == "residual_rmsnorm"
    assert dict(site.problem.params) == {"eps": 1e-6, "offset": 0.0}


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, kv: int = 2, transpose: bool = True) -> None:
        super().__init__()
        self.d, self.transpose = width // heads, transpose
        self.q, self.k, self.v = (nn.Linear(width, n * self.d, bias=False) for n in (heads, kv, kv))
        self.o, self.qn, self.kn = nn.Linear(width, width, bias=False), RMSNorm(self.d), RMSNorm(self.d)

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = h.shape
        q, k, v = (p(h).view(b, s, -1, self.d) for p in (self.q, self.k, self.v))
        q, k = self.qn(q), self.kn(k)
        if self.transpose:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = (t * cos + torch.cat((-t[..., self.d // 2 :], t[..., : self.d // 2]), -1) * sin for t in (q, k))
        if not self.transpose:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(b, s, -1))


@pytest.mark.parametrize("transpose", [True, False])
def test_attention_with_full_rotary_in_both_layouts(transpose: bool) -> None:
    shape = (1, 1, 5, 16) if transpose else (1, 5, 1, 16)
    found = sites(Attention(transpose=transpose), x(2, 5, 64), x(*shape), x(*shape))[0]
    assert sorted(s.family for s in found) == ["attn_output", "attn_qkv", "qk_norm_rope"]
    (rope,) = [s for s in found if s.family == "qk_norm_rope"]
    assert dict(rope.problem.params)["heads_first"] is transpose
    assert rope.problem.outputs[0].dims == (("r0", 4, "r1", 16) if transpose else ("r0", "r1", 4, 16))


def test_an_eps_that_is_a_graph_input_is_guarded() -> None:
    norm = RMSNorm(64, eps=1e-6)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return norm(a + b)

    found: list[float] = []

    def backend(gm, example_inputs):
        found.extend(dict(s.problem.params)["eps"] for s in trace.sites(gm.graph)[0])
        return gm.forward

    compiled = torch.compile(f, backend=backend, dynamic=True)
    with torch.no_grad():
        compiled(x(2, 64), x(2, 64))
        norm.eps = 1e-2
        compiled(x(2, 64), x(2, 64))
    assert found == [1e-6, 1e-2]


def test_a_gradient_keeps_a_site() -> None:
    (gm,) = graphs(MLP(), x(2, 64))
    found, kept = trace.sites(gm.graph)
    assert found == []
    assert {k.family for k in kept} == {"ffn_down", "ffn_gate_up", "silu_mul"}
    assert all("gradient" in k.reason for k in kept)


def test_autocast_keeps_a_site() -> None:
    def f(h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(h)

    model = MLP()
    _, kept = sites(f, x(2, 64))
    assert any("autocast" in k.reason for k in kept)


def test_a_model_with_no_known_family() -> None:
    assert counts(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x(1, 3, 8, 8)) == {}


def test_nothing_is_found_twice_and_no_site_overlaps() -> None:
    found = sites(Layer(), x(2, 3, 64), x(2, 3, 64))[0]
    nodes = [n for s in found for n in s.nodes]
    assert len(nodes) == len(set(nodes))


def test_same_computation_same_problem_wherever_it_stands() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MLP(), MLP()

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(h))

    found = [s for s in sites(Two(), x(2, 64))[0] if s.family == "ffn_down"]
    assert len(found) == 2
    assert found[0].problem.hash == found[1].problem.hash


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([8, 24, 64]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_written_reference_computes_what_the_graph_computes(b: int, s: int, width: int, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    layer = Layer(width, 2 * width).to(dtype)
    a, c = x(b, s, width, dtype=dtype), x(b, s, width, dtype=dtype)
    with torch.no_grad():
        (gm,) = graphs(layer, a, c)
        norm = next(s for s in trace.sites(gm.graph)[0] if s.family == "residual_rmsnorm")
        total, normed = reference.load(norm.problem.reference)(a, c, layer.norm.weight)
        assert torch.equal(total, a + c)
        assert torch.equal(normed, layer.norm(a + c))


def test_biases_tied_and_three_dimensional_weights() -> None:
    with_bias = {s.family: s for s in sites(MLP(bias=True), x(2, 64))[0]}
    assert [t.role for t in with_bias["ffn_gate_up"].problem.inputs] == ["x", "weight0", "bias0", "weight1", "bias1"]
    tied = MLP()
    tied.up.weight = tied.gate.weight
    assert "ffn_gate_up" not in counts(tied, x(2, 64))


class Stack(torch.nn.Module):
    """Two layers: four normed sums in a row, the last of which is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(RMSNorm(64) for _ in range(4))
        self.lins = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for norm, lin in zip(self.norms, self.lins, strict=True):
            h = h + y
            y = lin(norm(h))
        return h, y


def roles(function: Any, *args: torch.Tensor) -> list[tuple[list[str], list[str]]]:
    found, _ = sites(function, *args)
    return [([t.role for t in s.problem.inputs], [t.role for t in s.problem.outputs]) for s in found if s.family == "residual_rmsnorm"]


def test_of_two_sums_in_a_row_only_the_second_is_written() -> None:
    first, second = (["residual", "delta", "weight"], ["normed"]), (["residual", "earlier", "delta", "weight"], ["sum", "normed"])
    assert roles(Stack(), x(2, 3, 64), x(2, 3, 64)) == [first, second, first, second]


def test_a_sum_that_others_use_is_written() -> None:
    norms = [RMSNorm(64), RMSNorm(64)]

    def used(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = h + y
        b = a + norms[0](a).tanh()
        return a, norms[1](b)

    def doubled(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = h + y
        return norms[0](a), norms[1](a + a)

    plain = (["residual", "delta", "weight"], ["sum", "normed"])
    assert roles(used, x(2, 64), x(2, 64)) == [plain, plain]
    assert roles(doubled, x(2, 64), x(2, 64)) == [plain, plain]


def test_weights_of_another_type_are_kept_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, kept = sites(MLP(), x(2, 3, 64))
    assert not [s for s in found if s.family in ("ffn_gate_up", "ffn_down")]
    assert any("autocast" in k.reason for k in kept)


@pytest.mark.parametrize("how", ["linear", "pow", "silu", "mean", "rsqrt"])
def test_an_operation_spelt_by_keywords_costs_no_other_site(how: str) -> None:
    layer = Layer()

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = layer(a, b)
        if how == "linear":
            return F.linear(input=y, weight=layer.mlp.down.weight.T)
        if how == "pow":
            return y * torch.rsqrt(y.pow(exponent=2).mean(-1, keepdim=True) + 1e-6)
        if how == "silu":
            return F.silu(input=y) * y
        return torch.mean(input=y, dim=-1) if how == "mean" else torch.rsqrt(input=y)

    assert counts(run, x(2, 3, 64), x(2, 3, 64)).items() >= {"residual_rmsnorm": 1, "silu_mul": 1}.items()


def test_a_site_that_would_run_before_its_input_is_kept() -> None:
    def run(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = F.silu(g)
        s = x + a
        v = w.exp()
        product = gate * s
        n = s * torch.rsqrt((s * s).mean(-1, keepdim=True) + 1e-6)
        return product, n * (1.0 + v)

    from jasperk_inductor import backend

    args = (x(2, 32), x(2, 32), torch.rand(32), x(2, 32))
    fn = torch.compile(run, backend=lambda gm, e: backend.jasperk(gm, e, options={"identity": True, "strict": True}))
    with torch.no_grad():
        for got, wanted in zip(fn(*args), run(*args), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)


def test_a_strange_graph_costs_only_the_family_that_stumbles(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from jasperk_inductor.families import families

    def stumble(view: Any) -> Any:
        raise KeyError("strange")

    broken = {**families(), "silu_mul": dataclasses.replace(families()["silu_mul"], find=stumble)}
    with torch.no_grad():
        (gm,) = graphs(Layer(), x(2, 3, 64), x(2, 3, 64))
        found, kept = trace.sites(gm.graph, broken)
    assert {s.family for s in found} == {"residual_rmsnorm", "ffn_gate_up", "ffn_down"}
    assert [(k.family, "KeyError" in k.reason) for k in kept] == [("silu_mul", True)]


def test_function_transforms_are_kept_and_leave_no_trace() -> None:
    from torch.func import jvp, vmap

    from jasperk_inductor import backend

    def product(y: torch.Tensor) -> torch.Tensor:
        return F.silu(y) * (y * 2)

    one = x(4, 8)
    for run in (lambda t: jvp(product, (t,), (torch.ones_like(t),))[1], lambda t: vmap(product)(t)):
        torch._dynamo.reset()
        fn = torch.compile(run, backend=lambda gm, e: backend.jasperk(gm, e, options={"identity": True, "strict": True}))
        with torch.no_grad():
            assert torch.allclose(fn(one), run(one), atol=1e-5)
            assert torch.allclose(run(one), run(one))
