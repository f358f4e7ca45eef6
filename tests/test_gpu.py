"""What only a GPU can show. Run all of it in one go: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, card_problems, scale_problem

from jasperk_inductor import api, backend, explanation, swap
from jasperk_inductor.contract import Candidate, Status
from jasperk_inductor.evaluate import Evaluator
from jasperk_inductor.families import family, kernels_dir
from jasperk_inductor.languages import LANGUAGES

pytestmark = pytest.mark.gpu

SCALE_CUDA = """
__global__ void scale(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 2 + 1;
}
extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int n = int(JK_SIZE(y, 0) * JK_SIZE(y, 1));
  scale<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(JK_DATA(x), JK_DATA(y), n);
  return int(cudaGetLastError());
}
"""


@pytest.fixture(scope="module")
def judge() -> Any:
    with Evaluator("cuda") as one:
        yield one


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("language", ["triton", "cuda"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_agree_with_the_users_subgraph(name: str, language: str, batch: int, tmp_path: Path) -> None:
    from test_every_family import judged, kernel

    site = card_problems(batch=batch, dtype="bfloat16")[name]
    if not (kernels_dir() / site.family / LANGUAGES[language].file).exists():
        pytest.skip("the family ships none in this language")
    space = family(site.family).space[language](site.problem.spec, site.rows)
    for params in space[:3]:
        run = kernel(language, site, params, tmp_path)
        for style in ("normal", "outliers", "scaled", "zero_mean"):
            assert judged(site, run, dict(site.sizes), style, device="cuda") == (Status.PASSED, ""), (params, style)


@pytest.mark.parametrize("name", ["silu_mul", "residual_rmsnorm", "ffn_down"])
def test_the_evaluator_passes_shipped_kernels(name: str, judge: Evaluator) -> None:
    from jasperk_inductor.languages import bundle

    site = card_problems(batch=4, dtype="bfloat16")[name]
    params = family(name).space["triton"](site.problem.spec, site.rows)[0]
    verdict = judge.evaluate(
        site.problem, Candidate("triton", bundle.read(kernels_dir() / name / "triton.py"), tuple(params.items())), site.sizes
    )
    assert verdict.status is Status.PASSED, verdict.message
    assert verdict.latency is not None
    assert verdict.latency.clock == "graph"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (SCALE_CUDA, Status.PASSED),
        (SCALE_CUDA.replace("* 2 + 1", "* 2 + 1.5f"), Status.MISMATCH),
        (SCALE_CUDA.replace("* 2 + 1", "* 2.002f + 1"), Status.LESS_ACCURATE),
        (SCALE_CUDA.replace("y[i] =", "y[i + (1ll << 40)] ="), Status.CRASHED),
        (SCALE_CUDA.replace("if (i < n)", "if (i < n) const_cast<float*>(x)[i] = 3; if (i < n)"), Status.INPUT_CHANGED),
        (SCALE_CUDA + "// and healthy again\n", Status.PASSED),
    ],
)
def test_each_failure_has_its_name_and_the_next_job_is_healthy(source: str, status: Status, judge: Evaluator) -> None:
    verdict = judge.evaluate(scale_problem(4096), Candidate("cuda", source), {"r0": 64})
    assert verdict.status is status, verdict.message


def compiled(work: api.Workload, **options: Any) -> tuple[Any, Any]:
    session = work.session("cuda")
    return session, torch.compile(session.model, backend=lambda gm, x: backend.jasperk(gm, x, options=options))


def test_a_cuda_graph_is_taken_and_tokens_agree(tmp_path: Path) -> None:
    """With operators in the graph, and a cache that the model writes in place."""
    from torch._dynamo.utils import counters

    skips = counters["inductor"]["cudagraph_skips"]
    work = api.Workload("qwen3_8", "tiny", batch=4, dtype="bfloat16")
    session, fn = compiled(work, cache_dir=str(tmp_path), identity=True, mode="reduce-overhead", strict=True)
    with torch.no_grad():
        session.mark()
        token = session.prompt[:, :1]
        wanted = [session.decode(token).clone() for _ in range(6)]
        session.rewind()
        got = [session.decode(token, fn).clone() for _ in range(6)]
    assert counters["inductor"]["cudagraph_skips"] == skips
    assert swap.fallbacks == {}
    for a, b in zip(got, wanted, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.05
    assert explanation.Explanation(tuple(explanation.reports())).counts()["residual_rmsnorm"] == 8


def test_real_kernels_in_a_cuda_graph_over_several_batches(tmp_path: Path) -> None:
    for batch in (1, 4):
        torch._dynamo.reset()
        explanation.forget()
        work = api.Workload("qwen3_8", "tiny", batch=batch, dtype="bfloat16")
        session, fn = compiled(
            work, cache_dir=str(tmp_path), mode="reduce-overhead", beat="eager", families=["residual_rmsnorm", "qk_norm_rope"],
            budget_s=120.0, strict=True,
        )  # fmt: skip
        with torch.no_grad():
            session.mark()
            token = session.prompt[:, :1]
            wanted = [session.decode(token).clone() for _ in range(4)]
            session.rewind()
            got = [session.decode(token, fn).clone() for _ in range(4)]
        for a, b in zip(got, wanted, strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.05
        assert explanation.Explanation(tuple(explanation.reports())).counts(), "something is swapped"
        assert swap.fallbacks == {}


def test_on_another_device_than_the_current_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(2, 64, device="cuda:1")
    op = swap.operator(scale_problem(), {})
    assert torch.equal(op.run(x), x * 2 + 1)
