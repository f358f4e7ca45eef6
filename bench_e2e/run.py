"""`jasperk bench` and `jasperk demo`: run ledgers, show them, keep them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jasperk_inductor import stats
from jasperk_inductor.api import Workload, distinct
from jasperk_inductor.cache import Cache
from jasperk_inductor.contract import Entry, Problem, Sizes
from jasperk_inductor.errors import JasperkError
from jasperk_inductor.evaluate import Evaluator
from jasperk_inductor.models import letters
from jasperk_inductor.optimize import NotFound, improve

from . import show
from .ledger import Ledger, Row, Run, as_record


def bench(runs: Sequence[Run], out: Path | None, console: Console, progress: Progress, results: Path | None = None) -> dict[str, list[Row]]:
    """Measures several runs (batches, caches), shows each, and writes ledger.json, .png and .svg into `out`, after each run.

    Args:
        results: a list of rows of several commands, to which these are added.
    """
    curves: dict[str, list[Row]] = {}
    caches = {run.cache_dir for run in runs}
    for run in runs:
        ledger = Ledger(run)
        names = ledger.names()
        rows: list[Row] = []
        with progress:
            task = progress.add_task(f"ledger, batch {run.batch}", total=len(names))
            for row in ledger.rows():
                rows.append(row)
                progress.update(task, advance=1, description=f"ledger, batch {run.batch}: {row.config}")
            progress.remove_task(task)
        label = f"batch {run.batch}" + (f", {run.cache_dir.name}" if len(caches) > 1 else "")
        curves[label] = rows
        title = f"{ledger.card.TITLE} ({run.size}, {ledger.config.num_hidden_layers} layers), decode, {label}, {rows[0].device}"
        console.print(show.table(rows, title))
        del ledger
        if results is not None:
            keep(rows, results)
        if out is not None:
            write(curves, out, title)
    return curves


def write(curves: dict[str, list[Row]], out: Path, title: str) -> None:
    """Writes what has been measured so far, so that a broken run loses nothing."""
    out.mkdir(parents=True, exist_ok=True)
    records = [as_record(row) for rows in curves.values() for row in rows]
    temporary = out / "ledger.json.tmp"
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")
    temporary.replace(out / "ledger.json")
    show.plot(curves, out, title)


def keep(rows: Sequence[Row], path: Path) -> None:
    """Adds rows to a list of results; a row measured before (same model depth, batch, cache and configuration) is replaced.

    Raises:
        JasperkError: the file is there and is no such list; it is left as it is.
    """
    try:
        old = json.loads(path.read_text()) if path.exists() else []
        if not isinstance(old, list):
            raise TypeError(f"it holds a {type(old).__name__}")
        known = {_place(r): r for r in old}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JasperkError(f"{path} is no list of ledger rows ({error}); nothing was written to it.") from error
    known |= {_place(r): r for r in map(as_record, rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in known.values()) + "\n]\n")
    temporary.replace(path)


def _place(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("layers", "batch", "cache", "config"))


def optimise(
    problems: Iterable[tuple[Problem, Sizes]], cache: Cache, device: str, budget_s: float, progress: Progress
) -> tuple[list[tuple[Problem, Sizes, Entry | NotFound]], int]:
    """Makes sure that the cache has a kernel for each problem. Returns the results and the number of evaluations."""
    jobs = list(problems)
    results = []
    with Evaluator(device) as evaluator, progress:
        task = progress.add_task("kernels", total=len(jobs))
        for problem, sizes in jobs:
            progress.update(task, description=f"kernels: {problem.family}")
            results.append((problem, sizes, improve(problem, sizes, cache=cache, evaluator=evaluator, budget_s=budget_s)))
            progress.advance(task)
        progress.remove_task(task)
        return results, evaluator.evaluations


def demo(model: str, batch: int, cache_dir: Path, out: Path, console: Console, progress: Progress) -> dict[str, Any]:
    """The main job on a CPU with a tiny model. Returns the record that `make demo` prints last."""
    started = time.monotonic()
    run = Run(model, "tiny", None, batch, context=16, capacity=96, steps=60, cache_dir=cache_dir, command="jasperk demo")
    work = Workload(model, "tiny", batch=batch, context=run.context)
    known = letters(work.card)
    found = work.sites()
    jobs = [(s.problem, s.sizes) for s in distinct(found)]
    console.print(f"{work.card.TITLE}, tiny: {sum(len(t.sites) for t in found)} sites, {len(jobs)} distinct problems")
    results, evaluations = optimise(jobs, Cache(cache_dir), "cpu", 60.0, progress)
    speedups = _speedups(results, known)
    for letter, row in sorted(speedups.items()):
        console.print(f"  {letter}  {row['family']:<18} {row['text']}", highlight=False)
    rows = next(iter(bench([run], out, console, progress).values()))
    last = rows[-2]  # every family that beats eager
    checks = {row.config: row.correct and row.valid for row in rows}
    return {
        "swapped": last.swapped, "tokens_equal": all(r.tokens_equal for r in rows), "logit_error": last.logit_error,
        "inductor_logit_error": last.inductor_logit_error, "correct": all(r.correct for r in rows), "rows": checks,
        "tokens_per_s": {r.config: round(r.tokens_per_s, 1) for r in rows},
        "speedup_over_eager": {k: [round(v[x], 3) for x in ("value", "low", "high")] for k, v in sorted(speedups.items()) if "value" in v},
        "kept": last.kept, "default_policy": {"swapped": rows[-1].swapped, "kept": rows[-1].kept},
        "evaluations": evaluations + sum(r.evaluations for r in rows), "seconds": round(time.monotonic() - started, 1),
        "ledger": str(out / "ledger.json"),
    }  # fmt: skip


def _speedups(results: Sequence[tuple[Problem, Sizes, Entry | NotFound]], known: dict[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for problem, _, result in results:
        letter = known.get(problem.family, problem.family)
        if not isinstance(result, Entry) or result.verdict.latency is None:
            found[letter] = {"family": problem.family, "text": f"no kernel: {getattr(result, 'reason', '')}"}
            continue
        latency = result.verdict.latency
        ratio = stats.ratio(latency.eager, latency.candidate)
        rival = stats.ratio(latency.inductor, latency.candidate)
        text = f"{ratio} over eager ({ratio.verdict}), {rival} over Inductor   {result.candidate.describe()}"
        found[letter] = {"family": problem.family, "value": ratio.value, "low": ratio.low, "high": ratio.high, "text": text}
    return found
