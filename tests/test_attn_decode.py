"""Decode attention: found in a GPU's graph, and right in Triton's interpreter for masks of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import graphs, whole_model_on_a_cpu

from jasperk_inductor import api, trace
from jasperk_inductor.contract import Problem, Site
from jasperk_inductor.families import family

ROOT = Path(__file__).resolve().parent.parent


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers has it: cached heads repeated to query heads, then attention."""
    b, h, s, d = k.shape
    times = q.shape[1] // h
    k = k[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)
    v = v[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)


def problem(batch: int = 2, heads: int = 6, shared: int = 2, capacity: int = 80, width: int = 32, dtype: str = "float32") -> Problem:
    made = [torch.randn(batch, h, s, width, dtype=getattr(torch, dtype)) for h, s in ((heads, 1), (shared, capacity), (shared, capacity))]
    (site,) = found(attend, *made, torch.ones(batch, 1, 1, capacity, dtype=torch.bool))
    return site.problem


def found(function: object, *args: torch.Tensor) -> list[Site]:
    torch._dynamo.reset()  # other sizes are another static graph, not a dynamic one
    with torch.no_grad():
        (gm,) = graphs(function, *args)  # type: ignore[arg-type]
        return trace.sites(gm.graph, {"attn_decode": family("attn_decode")}, target="cuda")[0]


@pytest.mark.parametrize("batch", [1, 4])
def test_found_once_an_attention_layer_on_a_gpu_and_not_elsewhere(batch: int) -> None:
    work = api.Workload("qwen3_8", "tiny", batch=batch, dtype="bfloat16", capacity=100)
    (traced,) = work.sites(target_device="cuda")
    (site,) = [s for s in traced.sites if s.family == "attn_decode"]
    assert {t.role: t.shape(site.sizes) for t in site.problem.inputs} == {
        "q": (batch, 8, 1, 64), "k": (batch, 2, 100, 64), "v": (batch, 2, 100, 64), "mask": (batch, 1, 1, 100),
    }  # fmt: skip
    assert dict(site.problem.params) == {"scale": 0.125}
    assert all(s.family != "attn_decode" for s in work.sites()[0].sites)


def test_what_it_is_not_for() -> None:
    q, kv, mask = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 40, 16), torch.ones(2, 1, 1, 40, dtype=torch.bool)
    assert len(found(attend, q, kv, kv, mask)) == 1
    assert not found(attend, torch.randn(2, 4, 3, 16), kv, kv, mask), "several query tokens"
    assert not found(attend, q, kv, kv, mask.float()), "a mask that is added"
    assert not found(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, kv, kv), "no mask"
    assert not found(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=0.1), q, kv, kv, mask)
    assert not found(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.expand(2, 4, 1, 40)), q, kv, kv, mask), "a mask a head"


CODE = """
import sys, tempfile
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
import torch
import test_attn_decode as here
from test_every_family import kernel
from jasperk_inductor import reference
from jasperk_inductor.contract import Site
from jasperk_inductor.evaluate import checks, inputs
from jasperk_inductor.families import family
for shape in (dict(), dict(heads=4, shared=4, width=16), dict(batch=1, heads=5, shared=1, capacity=33, width=24), dict(dtype="float16")):
    problem = here.problem(**shape)
    for params in family("attn_decode").space["triton"](problem.spec, 1)[:2]:
        run = kernel("triton", Site("", problem, {{}}, False, (), (), (), None), params, Path(tempfile.mkdtemp()))
        for style in ("normal", "zero_mean", "scaled", "outliers"):
            drawn = inputs.draw(problem, {{}}, style, 3, "cpu")
            given = [inputs.lay_out(t, drawn[t.role]) for t in problem.inputs]
            wanted, exact = reference.load(problem.reference)(*given), reference.exact(problem.reference, given)
            print("verdict", *checks.judge_outputs(problem.spec, problem.tolerance, run(*given), wanted, exact)[:2])
"""


def test_right_in_the_interpreter_for_full_short_and_broken_masks() -> None:
    pytest.importorskip("triton")
    code = CODE.format(root=str(ROOT), tests=str(ROOT / "tests"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
    )
    verdicts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("verdict")]
    assert verdicts == ["passed"] * 32, done.stdout[-2000:] + done.stderr[-3000:]


@whole_model_on_a_cpu
def test_in_a_model_it_reads_the_cache_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an identity swap on a CPU: the same tokens, and nothing of the cache's size is copied for the operator."""
    import dataclasses

    from torch._inductor.utils import run_and_get_code

    from jasperk_inductor import backend, explanation
    from jasperk_inductor.families import families

    monkeypatch.setitem(families(), "attn_decode", dataclasses.replace(family("attn_decode"), devices=("cpu",)))
    session = api.Workload("qwen3_8", "tiny", batch=4, capacity=80).session("cpu")
    options = {"cache_dir": str(tmp_path), "identity": True, "families": ["attn_decode"]}
    fn = torch.compile(session.model, backend=lambda gm, x: backend.jasperk(gm, x, options=options))
    token = session.prompt[:, :1]
    with torch.no_grad():
        session.mark()
        wanted = [session.decode(token).clone() for _ in range(3)]
        session.rewind()
        with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
            got, (code, *_) = run_and_get_code(lambda: [session.decode(token, fn).clone() for _ in range(3)])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, wanted, strict=True))
    assert explanation.Explanation(tuple(explanation.reports())).counts() == {"attn_decode": 1}
    assert "torch.ops.jasperk.attn_decode" in code
    assert "empty_strided_cpu((4, 8, 80, 64)" not in code
    assert "empty_strided_cpu((4, 2, 80, 64)" not in code
