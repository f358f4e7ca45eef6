"""torch.compile(model, backend="jasperk"): what a user sees, and what happens when something is wrong."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Layer, whole_model_on_a_cpu
from torch import nn

import jasperk_inductor
from jasperk_inductor import backend, explanation, planner, stats, swap
from jasperk_inductor.cache import Cache
from jasperk_inductor.contract import Kept, Swapped
from jasperk_inductor.errors import SwapFailed, UnknownOption

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = any(e.name == "jasperk" for e in importlib.metadata.entry_points(group="torch_dynamo_backends"))
COUNTS = {"ffn_down": 1, "ffn_gate_up": 1, "residual_rmsnorm": 1, "silu_mul": 1}


def compiled(model: Callable[..., Any], dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Callable[..., Any]:
    """torch.compile with our backend, also where the entry point is not installed."""

    def run(gm: Any, example_inputs: Any) -> Any:
        return backend.jasperk(gm, example_inputs, options=options)

    return torch.compile(model, backend=run, dynamic=dynamic, fullgraph=fullgraph)


def pair(batch: int = 2, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, width), torch.randn(batch, 3, width)


@pytest.fixture
def all_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verified kernel is swapped in, whatever this machine's noise says of its speed."""
    monkeypatch.setattr(planner._Planner, "gain", lambda self, entry: stats.Ratio(2.0, 1.9, 2.1))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the kernels of a Layer at 4 to 8 rows."""
    torch._dynamo.reset()
    explanation.forget()
    root = tmp_path_factory.mktemp("warm") / "cache"
    torch.manual_seed(0)
    with torch.no_grad():
        compiled(Layer(), cache_dir=str(root), budget_s=300.0, beat="eager")(*pair())
    (report,) = explanation.reports()
    assert report.failure is None
    assert report.evaluations >= 4, "one a problem; more where the first choice fell behind in the full trial"
    return root


def test_the_first_compile_fills_the_cache_and_the_second_evaluates_nothing(warm: Path, all_win: None) -> None:
    model = Layer()
    args = pair()
    with torch.no_grad():
        out = compiled(model, cache_dir=str(warm), beat="eager")(*args)
        assert torch.allclose(out, model(*args), atol=1e-5)
    (report,) = explanation.reports()
    assert report.evaluations == 0
    assert jasperk_inductor.explain().counts() == COUNTS
    assert swap.fallbacks == {}


def test_every_site_ends_swapped_or_kept_with_a_reason(warm: Path) -> None:
    with torch.no_grad():
        compiled(Layer(), cache_dir=str(warm), beat="inductor", optimizer="none")(*pair())
    for outcome in jasperk_inductor.explain().outcomes:
        assert isinstance(outcome, Swapped | Kept)
        if isinstance(outcome, Kept):
            assert "Inductor" in outcome.reason
            assert outcome.gain is not None
        else:
            assert outcome.gain > 1
            assert outcome.kernel.startswith("cpp(")


@pytest.mark.skipif(not INSTALLED, reason="the package is not installed, so there is no entry point")
def test_by_name_through_the_entry_point(warm: Path) -> None:
    model = Layer()
    args = pair()
    fn = torch.compile(model, backend="jasperk", options={"cache_dir": str(warm), "optimizer": "none", "beat": "eager"})
    with torch.no_grad():
        assert torch.allclose(fn(*args), model(*args), atol=1e-5)
        shown = jasperk_inductor.explain(fn, *args)
    assert {o.family for o in shown.outcomes} == set(COUNTS)
    assert shown.counts() == jasperk_inductor.explain().counts()


def test_identity_swap_on_dynamic_shapes_and_several_batches(cache_dir: Path) -> None:
    model = Layer()
    fn = compiled(model, cache_dir=str(cache_dir), identity=True)
    with torch.no_grad():
        for batch in (1, 4, 7, 2):
            args = pair(batch)
            assert torch.allclose(fn(*args), model(*args), atol=1e-5)
    reports = explanation.reports()
    assert len(reports) == 2, "one graph for batch 1, one dynamic graph for all others"
    assert [r.dynamic for r in reports] == [False, True]
    assert all(jasperk_inductor.explain().counts()[f] == 2 for f in COUNTS)


def test_dynamic_from_the_start_falls_back_outside_verified_rows_and_counts_it(warm: Path, all_win: None) -> None:
    model = Layer()
    fn = compiled(model, dynamic=True, cache_dir=str(warm), optimizer="none", beat="eager")
    with torch.no_grad():
        for batch in (2, 9):
            args = pair(batch)
            assert torch.allclose(fn(*args), model(*args), atol=1e-5)
    assert jasperk_inductor.explain().counts() == COUNTS
    assert sum(swap.fallbacks.values()) == 4, "27 rows: no kernel of the four was verified there"


def test_graph_breaks(cache_dir: Path) -> None:
    model = Layer()

    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = model(a, b)
        torch._dynamo.graph_break()
        return model(h, b)

    args = pair()
    with torch.no_grad():
        out = compiled(broken, cache_dir=str(cache_dir), identity=True)(*args)
        assert torch.allclose(out, broken(*args), atol=1e-4)
    assert len(explanation.reports()) == 2
    assert jasperk_inductor.explain().counts()["ffn_down"] == 2


def test_a_gradient_keeps_every_site_and_still_trains(cache_dir: Path) -> None:
    model = Layer()
    out = compiled(model, cache_dir=str(cache_dir), identity=True)(*pair())
    out.sum().backward()
    assert model.mlp.down.weight.grad is not None
    kept = jasperk_inductor.explain().kept
    assert len(kept) == 4
    assert all("gradient" in k.reason for k in kept)


def test_families_on_and_off(cache_dir: Path) -> None:
    with torch.no_grad():
        compiled(Layer(), cache_dir=str(cache_dir), identity=True, families={"silu_mul": False})(*pair())
    explained = jasperk_inductor.explain()
    assert "silu_mul" not in explained.counts()
    assert [k.reason for k in explained.kept] == ["switched off by the option 'families'"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cachedir": "x"}, "cache_dir"),
        ({"families": ["ffn_dwn"]}, "ffn_down"),
        ({"optimizer": "libary"}, "library"),
        ({"mode": "fastest"}, "Inductor has no mode"),
        ({"inductor": {"no_such_key": 1}}, "no_such_key"),
    ],
)
def test_a_wrong_option_raises_with_a_suggestion(options: dict[str, Any], said: str, cache_dir: Path) -> None:
    with pytest.raises(Exception, match=said) as raised, torch.no_grad():
        compiled(Layer(), **{"cache_dir": str(cache_dir), **options})(*pair())
    assert isinstance(raised.value.__cause__ or raised.value, UnknownOption) or "UnknownOption" in str(raised.value)


def test_our_failure_runs_the_pristine_graph_and_is_said_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(planner.swap, "apply", fail)
    model = Layer()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "jasperk"):
        for batch in (1, 4):
            args = pair(batch)
            out = compiled(model, cache_dir=str(cache_dir), identity=True)(*args)
            assert torch.allclose(out, model(*args), atol=1e-5)
            torch._dynamo.reset()
            explanation.forget()
    assert [r.getMessage() for r in caplog.records].count("graph 1 is compiled as it came: jasperk failed (RuntimeError: planted)") == 1


def test_strict_raises_our_failure(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(planner.swap, "apply", fail)
    with pytest.raises(Exception, match="planted") as raised, torch.no_grad():
        compiled(Layer(), cache_dir=str(cache_dir), identity=True, strict=True)(*pair())
    assert "SwapFailed" in str(raised.value) or isinstance(raised.value.__cause__, SwapFailed)


def test_a_kernel_that_breaks_in_inductor_still_gives_an_answer(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator whose fake is wrong fails inside Inductor: that is our failure too."""
    monkeypatch.setattr(swap.Operator, "fake", lambda self, *inputs: torch.empty(1, 2, 3, 4, 5))
    monkeypatch.setattr(swap, "_defined", {})
    monkeypatch.setattr(swap, "VERSION", "broken fake")
    model = Layer()
    args = pair()
    with torch.no_grad():
        assert torch.allclose(compiled(model, cache_dir=str(cache_dir), identity=True)(*args), model(*args), atol=1e-5)
    assert explanation.reports()[0].failure is not None


def test_without_a_budget_sites_are_kept_with_the_command_that_builds_them(cache_dir: Path) -> None:
    with torch.no_grad():
        compiled(Layer(), cache_dir=str(cache_dir), budget_s=0)(*pair())
    kept = jasperk_inductor.explain().kept
    assert len(kept) == 4
    assert all(f"jasperk optimize --wanted --cache-dir {cache_dir}" in k.reason for k in kept)
    assert {w.problem.family for w in Cache(cache_dir).wanted()} == set(COUNTS)


def test_without_a_compiler_of_ours_sites_are_kept_with_what_to_install(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JASPERK_CXX", "/nonexistent/g++")
    model = Layer()
    args = pair()
    with torch.no_grad():
        assert torch.allclose(compiled(model, cache_dir=str(cache_dir), budget_s=60.0)(*args), model(*args), atol=1e-5)
    kept = jasperk_inductor.explain().kept
    assert len(kept) == 4
    assert all("install g++" in k.reason for k in kept), kept


def test_a_cache_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    model = Layer()
    args = pair()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "jasperk"):
        out = compiled(model, cache_dir=str(blocked / "cache"), budget_s=0)(*args)
    assert torch.allclose(out, model(*args), atol=1e-5)
    assert sum("cannot be written" in r.getMessage() for r in caplog.records) == 1


def test_a_corrupt_entry_is_built_again_or_kept(warm: Path, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "copy"
    shutil.copytree(warm, root)
    for path in (root / "entries").iterdir():
        path.write_text(path.read_text()[:100])
    model = Layer()
    args = pair()
    with torch.no_grad():
        assert torch.allclose(compiled(model, cache_dir=str(root), optimizer="none")(*args), model(*args), atol=1e-5)
    assert len(jasperk_inductor.explain().kept) == 4
    assert len(list((root / "quarantine").iterdir())) == 4


def test_verify_keeps_a_kernel_that_turns_out_wrong(warm: Path, all_win: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_kernels", {})
    load = planner._Planner._load

    def worse(self: Any, entry: Any, site: Any) -> Any:
        kernel = load(self, entry, site)
        return lambda *inputs: tuple(t * 1.01 for t in kernel(*inputs))

    monkeypatch.setattr(planner._Planner, "_load", worse)
    monkeypatch.setattr(swap, "_defined", {})
    monkeypatch.setattr(swap, "VERSION", "wrong on purpose")
    with torch.no_grad():
        compiled(Layer(), cache_dir=str(warm), optimizer="none", beat="eager", verify=True)(*pair())
    explained = jasperk_inductor.explain()
    assert explained.swapped == ()
    assert all("verify" in k.reason for k in explained.kept)


def test_a_model_on_the_meta_device(cache_dir: Path) -> None:
    with torch.device("meta"):
        model, args = Layer(), (torch.empty(2, 3, 64), torch.empty(2, 3, 64))
    with torch.no_grad():
        out = compiled(model, cache_dir=str(cache_dir))(*args)
    assert out.shape == (2, 3, 64)
    assert all("'meta'" in k.reason for k in jasperk_inductor.explain().kept)


def test_a_model_with_no_known_family(cache_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(compiled(model, cache_dir=str(cache_dir))(x), model(x), atol=1e-6)
    assert "no known operator family" in str(jasperk_inductor.explain())


def test_explain_touches_neither_arguments_nor_cache(cache_dir: Path) -> None:
    layer = Layer()

    def step(a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return layer(a, a)

    a, state = torch.randn(2, 3, 64), torch.zeros(3)
    with torch.no_grad():
        shown = jasperk_inductor.explain(step, a, state, options={"cache_dir": str(cache_dir)})
    assert state.tolist() == [0, 0, 0]
    assert len(shown.kept) == 4
    assert "residual_rmsnorm" in str(shown)
    assert explanation.reports() == []
    assert {r["status"] for r in shown.rows()} == {"kept"}


def test_sites_of_a_model() -> None:
    with torch.no_grad():
        (traced,) = jasperk_inductor.sites(Layer(), *pair())
    assert {s.family for s in traced.sites} == set(COUNTS)


WARM = """
import sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
from helpers import Layer
from jasperk_inductor import backend, explanation, planner, stats
from torch._dynamo.utils import counters
planner._Planner.gain = lambda self, entry: stats.Ratio(2.0, 1.9, 2.1)
torch.manual_seed(0)
model, x, y = Layer(), torch.randn(2, 3, 64), torch.randn(2, 3, 64)
options = dict(cache_dir={cache!r}, optimizer="none", beat="eager")
fn = torch.compile(model, backend=lambda gm, ex: backend.jasperk(gm, ex, options=options))
with torch.no_grad():
    assert torch.allclose(fn(x, y), model(x, y), atol=1e-5)
(report,) = explanation.reports()
print(len([o for o in report.outcomes if o.status == "swapped"]), report.evaluations, counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_second_process_hits_torchs_caches_and_still_explains(warm: Path, tmp_path: Path) -> None:
    code = textwrap.dedent(WARM).format(root=str(ROOT), tests=str(ROOT / "tests"), cache=str(warm))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout.split()
        for _ in range(2)
    ]
    swapped, evaluations, *_ = map(int, said[0])
    assert (swapped, evaluations) == (4, 0)
    assert said[1][:2] == said[0][:2], "the same sites, on a warm start too"
    assert int(said[1][2]) + int(said[1][3]) >= 1, "torch's own caches hit"


@whole_model_on_a_cpu
def test_inputs_with_a_fixed_address_are_the_ones_that_inductor_sees(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and caches: without them Inductor takes no CUDA graph of a model that writes to its cache."""
    from torch._inductor import compile_fx

    from jasperk_inductor.api import Workload

    seen: list[list[int]] = []
    original = compile_fx._compile_fx_inner

    def look(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        seen.append(sorted(kwargs["static_input_idxs"]))
        return original(gm, example_inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", look)
    work = Workload("qwen3_8", "tiny", batch=2)
    for function in (lambda model: torch.compile(model), lambda model: compiled(model, cache_dir=str(cache_dir), identity=True)):
        torch._dynamo.reset()
        session = work.session("cpu")
        with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
            function(session.model)(**work.arguments(session))
    stock, ours = seen
    assert len(stock) > 60
    assert ours == stock


def test_many_traces_of_one_model_stay_possible_and_leave_it_to_its_user(cache_dir: Path) -> None:
    model, args = Layer(), pair()
    with torch.no_grad():
        for _ in range(12):
            (traced,) = jasperk_inductor.sites(model, *args)
            assert {s.family for s in traced.sites} == set(COUNTS)
        compiled(model, cache_dir=str(cache_dir), identity=True)(*args)
    assert jasperk_inductor.explain().counts() == COUNTS


def test_explain_finds_the_options_of_a_compiled_function_and_of_a_model_compiled_in_place(cache_dir: Path) -> None:
    model, args = Layer(), pair()

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return model(a, b)

    if not INSTALLED:
        pytest.skip("the package is not installed, so there is no entry point")
    options = {"cache_dir": str(cache_dir), "identity": True}
    with torch.no_grad():
        assert jasperk_inductor.explain(torch.compile(run, backend="jasperk", options=options), *args).counts() == COUNTS
        model.compile(backend="jasperk", options=options)
        model(*args)
        assert jasperk_inductor.explain(model, *args, options=options).counts() == COUNTS
        assert len(jasperk_inductor.sites(model, *args)[0].sites) == 4
        assert model._compiled_call_impl is not None, "it stays compiled"


@pytest.mark.parametrize("given", [None, 3, nn.Linear])
def test_what_cannot_be_traced_says_so(given: Any) -> None:
    from jasperk_inductor.errors import JasperkError

    with pytest.raises(JasperkError, match="a module or a function"):
        jasperk_inductor.sites(given)


def test_a_relative_cache_directory_does_not_move(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jasperk_inductor.settings import Options

    monkeypatch.chdir(tmp_path)
    chosen = Options.parse({"cache_dir": "here"})
    assert chosen.cache_dir == tmp_path / "here"
    for wrong in ({"cache_dir": ""}, {"cache_dir": "~no-such-user/x"}, {"families": [["silu_mul"]]}, {"families": {"silu_mul": "False"}},
                  {"inductor": {1: 2}}, {"budget_s": float("nan")}):  # fmt: skip
        with pytest.raises(UnknownOption):
            Options.parse(wrong)
    assert Options.parse({"families": None}).families is None
