"""The ledger: its rows are filled, its checks can fail, and what it writes is complete."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Demo
from helpers import FAMILIES, whole_model_on_a_cpu
from rich.progress import Progress

from jasperk_inductor import api, backend, explanation, planner, stats, swap
from jasperk_inductor.cache import Cache
from jasperk_inductor.errors import JasperkError
from jasperk_inductor.folders import package
from jasperk_inductor.settings import Options

package("jasperk_bench")
from jasperk_bench import ledger as ledgers  # noqa: E402
from jasperk_bench import run as bench_run  # noqa: E402
from jasperk_bench import show  # noqa: E402

pytestmark = whole_model_on_a_cpu
LADDER = ["eager", "inductor", *(f"+{c}" for c in "ABCDEFGHI"), "jasperk"]


def test_the_demo_fills_every_row_and_is_right(demo: Demo) -> None:
    record = demo.record
    assert record["tokens_equal"] is True
    assert record["correct"] is True
    assert record["evaluations"] >= 10
    assert set(record["swapped"]) | set(record["kept"]) == set("ABCDEFGHI")
    assert len(record["swapped"]) >= 7, record  # a tie on a noisy machine is kept, and shown
    assert record["logit_error"] <= 1.05 * record["inductor_logit_error"] + 1e-6
    rows = json.loads((demo.out / "ledger.json").read_text())
    assert [r["config"] for r in rows] == LADDER
    for row in rows:
        assert row["valid"], row["void"]
        assert len(row["samples_ms"]) >= 40
        assert math.isclose(row["ms_per_step"], stats.median(row["samples_ms"]), rel_tol=1e-3)
        assert math.isclose(row["tokens_per_s"], 8e3 / row["ms_per_step"], rel_tol=1e-6)
        assert row["layers"] == 4
        assert row["peak_memory_gb"] > 0
    assert all((demo.out / f"ledger.{kind}").stat().st_size > 5000 for kind in ("png", "svg"))


def test_a_second_demo_would_evaluate_nothing(demo: Demo) -> None:
    jobs = [(s.problem, s.sizes) for s in api.distinct(api.Workload("qwen3_8", "tiny", batch=8).sites())]
    results, evaluations = bench_run.optimise(jobs, Cache(demo.cache), "cpu", 60.0, Progress(disable=True))
    assert evaluations == 0
    assert len(results) == 10


def run_of(demo: Demo, **changes: Any) -> ledgers.Run:
    return dataclasses.replace(
        ledgers.Run(batch=8, context=16, capacity=96, steps=40, cache_dir=demo.cache, command="test"), **changes
    )  # fmt: skip


@pytest.fixture(scope="module")
def started(demo: Demo) -> tuple[ledgers.Ledger, Any, Any]:
    torch._dynamo.reset()
    one = ledgers.Ledger(run_of(demo))
    with torch.no_grad():
        one._start()
        return one, one._prepare("eager"), one._prepare("inductor")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_that_is_one_percent_off_turns_the_check_false(
    family: str, started: tuple[ledgers.Ledger, Any, Any], demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each family's real kernel, swapped alone: right as it is, wrong times 1.01. Without Inductor around it, to be quick."""
    ledger, eager, inductor = started
    monkeypatch.setattr(planner._Planner, "gain", lambda self, entry: stats.Ratio(2.0, 1.9, 2.1))
    options = Options.parse({"cache_dir": str(demo.cache), "families": [family], "optimizer": "none"})

    def compiled(name: str) -> Any:
        def run(gm: Any, example_inputs: Any) -> Any:
            copy = backend.pristine_copy(gm)
            explanation.record(planner.plan_and_swap(copy.graph, options, 1, {}))
            copy.recompile()
            return copy.forward

        return torch.compile(ledger.model, backend=run)

    monkeypatch.setattr(ledger, "_compile", compiled)
    with torch.no_grad():
        good = ledger._prepare("+X", eager)
        assert ledger._swapped(good.report), "the family is swapped"
        assert ledger._correct(good, inductor)
        torch._dynamo.reset()
        load = planner._Planner._load

        def off(self: Any, entry: Any, site: Any) -> Any:
            kernel = load(self, entry, site)
            return lambda *inputs: tuple(t * 1.01 for t in kernel(*inputs))

        monkeypatch.setattr(planner, "_kernels", {})
        monkeypatch.setattr(swap, "_defined", {})
        monkeypatch.setattr(swap, "VERSION", f"{family} times 1.01")
        monkeypatch.setattr(planner._Planner, "_load", off)
        bad = ledger._prepare("+X", eager)
        assert ledger._swapped(bad.report) == ledger._swapped(good.report)
        assert not ledger._correct(bad, inductor)
    assert bad.error > 10 * good.error


def test_in_bf16_the_error_as_a_whole_decides(started: tuple[ledgers.Ledger, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = started[0]
    monkeypatch.setattr(ledger, "run", dataclasses.replace(ledger.run, dtype="bfloat16"))
    inductor = ledgers._Compiled("inductor", None, rms=0.1, tokens_agree=0.95)
    assert ledger._correct(ledgers._Compiled("+A", None, rms=0.104, tokens_agree=0.95), inductor)
    assert not ledger._correct(ledgers._Compiled("+A", None, rms=0.106, tokens_agree=0.95), inductor)
    assert not ledger._correct(ledgers._Compiled("+A", None, rms=0.1, tokens_agree=0.8), inductor)


@pytest.mark.parametrize(
    ("what", "said"),
    [("fallback", "a kernel that fell back"), ("recompile", "a recompile"), ("cudagraph", "a skipped CUDA graph")],
)
def test_a_row_is_void_if_its_window_saw_something(what: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    before = ledgers._counters()
    assert ledgers._void(before, ledgers._counters()) == ""
    if what == "fallback":
        swap.fallbacks["silu_mul_000000000000"] += 1
    elif what == "recompile":
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    else:
        counters["inductor"]["cudagraph_skips"] += 1
    assert ledgers._void(before, ledgers._counters()) == said


def test_rows_by_name(started: tuple[ledgers.Ledger, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = started[0]
    assert ledger.names() == LADDER
    monkeypatch.setattr(ledger, "run", dataclasses.replace(ledger.run, rows=("jasperk", "eager")))
    assert ledger.names() == ["eager", "jasperk"]
    monkeypatch.setattr(ledger, "run", dataclasses.replace(ledger.run, rows=("+Z",)))
    with pytest.raises(JasperkError, match=r"no row '\+Z'; rows are eager, inductor, \+A"):
        ledger.names()


def rows_of(demo: Demo) -> list[ledgers.Row]:
    return [ledgers.Row(**r) for r in json.loads((demo.out / "ledger.json").read_text())]


def test_two_caches_give_two_curves_in_one_figure(demo: Demo, tmp_path: Path) -> None:
    rows = rows_of(demo)
    void = dataclasses.replace(rows[3], valid=False, void="a recompile")
    show.plot({"batch 8, ours": rows, "batch 8, theirs": [*rows[:3], void, *rows[4:]]}, tmp_path, "two generators")
    import re

    svg = (tmp_path / "ledger.svg").read_text()
    assert re.search("<!-- batch 8, ours -->", svg)
    assert re.search("<!-- batch 8, theirs -->", svg)
    bench_run.write({"a": rows[:2], "b": rows[2:3]}, tmp_path, "half a run")
    assert [r["config"] for r in json.loads((tmp_path / "ledger.json").read_text())] == ["eager", "inductor", "+A"]


def test_results_of_several_commands_are_kept_together(demo: Demo, tmp_path: Path) -> None:
    rows, path = rows_of(demo), tmp_path / "results" / "all.json"
    bench_run.keep(rows[:3], path)
    bench_run.keep([dataclasses.replace(rows[2], ms_per_step=1.0), dataclasses.replace(rows[2], batch=1)], path)
    kept = json.loads(path.read_text())
    assert [(r["config"], r["batch"]) for r in kept] == [("eager", 8), ("inductor", 8), ("+A", 8), ("+A", 1)]
    assert kept[2]["ms_per_step"] == 1.0
    path.write_text("{}")
    with pytest.raises(JasperkError, match="nothing was written"):
        bench_run.keep(rows, path)
    assert path.read_text() == "{}"


def test_the_table_says_why_a_row_is_void_or_wrong(demo: Demo) -> None:
    from rich.console import Console

    rows = rows_of(demo)
    rows[2] = dataclasses.replace(rows[2], valid=False, void="a recompile")
    rows[3] = dataclasses.replace(rows[3], correct=False)
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show.table(rows, "title"))
    text = console.export_text()
    assert "VOID: a recompile" in text
    assert "NOT CORRECT" in text


def test_weights_from_a_checkpoint(tmp_path: Path) -> None:
    from jasperk_inductor.models import card

    chosen = card("qwen3_8")
    model = chosen.build(chosen.config("tiny", hidden_size=64, intermediate_size=128, vocab_size=64), seed=3)
    model.save_pretrained(tmp_path / "ckpt")
    run = ledgers.Run(batch=1, context=4, capacity=40, weights=tmp_path / "ckpt", command="test")
    loaded = ledgers.Ledger(run).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(JasperkError, match=r"holds no config\.json"):
        ledgers.Ledger(dataclasses.replace(run, weights=tmp_path))
