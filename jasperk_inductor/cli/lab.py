"""`jasperk optimize | evaluate`: finding kernels, and judging one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..contract import Candidate, Entry, Problem, Scalar, Sizes, Verdict, from_json
from ..errors import BadProblem
from ..settings import default_cache_dir
from .common import (
    Batches,
    CacheDir,
    Capacity,
    Context,
    Device,
    Dtype,
    Families,
    Json,
    Layers,
    Model,
    Phase,
    Size,
    emit,
    err,
    out,
    pick_device,
    pick_dtype,
    progress,
    workloads,
)  # fmt: skip


def optimize(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = 4,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 128,
    capacity: Capacity = None,
    dtype: Dtype = None,
    device: Device = "auto",
    family: Families = None,
    wanted: Annotated[bool, typer.Option("--wanted", help="Build what earlier compiles found missing, instead of a model's.")] = False,
    optimizer: Annotated[str, typer.Option(help="library: search the shipped kernels.")] = "library",
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds a problem; nothing new is started after.")] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Search also where the cache has an entry; the faster one stays.")] = False,
    save_tuned: Annotated[bool, typer.Option("--save-tuned", help="Write the winners' launch parameters into kernels/*/tuned/.")] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Fill the kernel cache ahead of time: search, verify and time a kernel for every family of a model."""
    from ..api import distinct
    from ..cache import Cache
    from ..evaluate import Evaluator
    from ..models import by_letter, card, letters
    from ..optimize import improve, library
    from ..optimize import optimizer as known_optimizer

    known_optimizer(optimizer)
    place = pick_device(device)
    cache = Cache(cache_dir or default_cache_dir())
    if wanted:
        jobs: list[tuple[Problem, Sizes]] = [(w.problem, dict(w.sizes)) for w in cache.wanted() if place.startswith(w.device)]
        known: dict[str, str] = {}
    else:
        known = letters(card(model))
        only = by_letter(card(model), family) if family else list(known)
        found = [
            w.sites(target_device=place.split(":")[0])
            for w in workloads(model, size, layers, phase, batch, context, capacity, pick_dtype(dtype, place))
        ]
        jobs = [(s.problem, s.sizes) for s in distinct([t for traced in found for t in traced]) if s.family in only]
    if not jobs:
        err.print("nothing to do: no problem is wanted" if wanted else "nothing to do: no site of these families in the graph")
    kept: list[Any] = []
    with Evaluator(place) as evaluator, progress() as bar:
        task = bar.add_task("optimizing", total=len(jobs))
        for problem, sizes in jobs:
            bar.update(task, description=f"{problem.family} M={problem.rows(sizes)}")
            result = improve(problem, sizes, cache=cache, evaluator=evaluator, name=optimizer, budget_s=budget, again=again)
            kept.append((problem, sizes, result))
            bar.advance(task)
            if as_json:
                emit(_describe(problem, sizes, result, known))
        evaluations = evaluator.evaluations
    if save_tuned:
        written = library.save_tuned([r for _, _, r in kept if isinstance(r, Entry)], place)
        err.print(f"wrote {len(written)} tuned files: {', '.join(p.parent.parent.name for p in written)}")
    if as_json:
        return
    table = Table(title=f"{evaluations} evaluations, cache {cache.root}")
    for name in ("", "family", "M", "kernel", "over eager", "over Inductor", "ms", "roofline"):
        table.add_column(name)
    for problem, sizes, result in kept:
        row = _describe(problem, sizes, result, known)
        if row["status"] != "passed":
            table.add_row(row["letter"] or "", row["family"], str(row["rows"]), f"none: {row['reason']}")
            continue
        table.add_row(
            row["letter"] or "", row["family"], str(row["rows"]), row["kernel"], row["over_eager"]["text"], row["over_inductor"]["text"],
            f"{row['ms']:.4f}", f"{row['roofline']:.0%}",
        )  # fmt: skip
    out().print(table)


def _describe(problem: Any, sizes: Any, result: Any, letters: dict[str, str]) -> dict[str, Any]:
    from .. import device as devices
    from .. import stats
    from ..families import family

    base = {"family": problem.family, "letter": letters.get(problem.family), "rows": problem.rows(sizes), "problem": problem.hash[:12]}
    if not isinstance(result, Entry):
        return {**base, "status": "none", "reason": result.reason}
    latency = result.verdict.latency
    assert latency is not None

    def over(samples: Any) -> dict[str, Any]:
        r = stats.ratio(samples, latency.candidate)
        return {"value": r.value, "low": r.low, "high": r.high, "text": str(r)}

    ms = stats.median(latency.candidate)
    place = "cuda" if result.validity.cuda else "cpu"
    limit = devices.peaks(place).limit_ms(problem.nbytes(sizes), family(problem.family).flops(problem, sizes))
    return {
        **base, "status": "passed", "kernel": result.candidate.describe(), "clock": latency.clock, "ms": ms, "roofline": limit / ms,
        "over_eager": over(latency.eager), "over_inductor": over(latency.inductor), "seconds": result.verdict.seconds,
    }  # fmt: skip


def evaluate(
    candidate: Annotated[Path | None, typer.Argument(help="A kernel's source: .py (Triton), .cpp or .cu.")] = None,
    problem: Annotated[
        str, typer.Option(help="MODEL:FAMILY, e.g. qwen3_8:G, or a file that `jasperk evaluate --problem … --show --json` wrote.")
    ] = "qwen3_8:ffn_down",
    size: Size = "tiny",
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 1,
    phase: Phase = "decode",
    context: Context = 16,
    capacity: Capacity = None,
    dtype: Dtype = None,
    device: Device = "auto",
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="A launch parameter, NAME=VALUE; may be repeated.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the Problem (reference, inputs, outputs) and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Judge one kernel: is it right on all trials, and how fast is it against eager and Inductor?"""
    from ..contract import to_json
    from ..evaluate import Evaluator
    from ..families import families

    place = pick_device(device)
    wanted, sizes = _problem(
        problem, place,
        lambda model: workloads(
            model, size, None if size == "tiny" else 4, phase, [batch], context, capacity, pick_dtype(dtype, place)
        ),
    )  # fmt: skip
    if show or candidate is None:
        if as_json:
            emit({"problem": to_json(wanted), "sizes": dict(sizes)})
        else:
            _show_problem(wanted, sizes)
        if candidate is None and not show:
            raise BadProblem("name a kernel's source file to have it judged: jasperk evaluate KERNEL.cpp --problem …")
        return
    kernel = _candidate(candidate, wanted, sizes, param or [])
    with Evaluator(place) as evaluator:
        verdict = evaluator.evaluate(wanted, kernel, sizes)
    if as_json:
        emit({"candidate": kernel.describe(), "verdict": to_json(verdict)})
    else:
        family = families().get(wanted.family)
        out().print(verdict_table(kernel, verdict, wanted, sizes, place, family.flops(wanted, sizes) if family else 0.0))
    raise typer.Exit(0 if verdict.passed else 1)


def _problem(name: str, place: str, workload: Callable[[str], list[Any]]) -> tuple[Problem, Sizes]:
    """The Problem that a name or a file stands for, and where to time it."""
    from ..api import distinct
    from ..models import by_letter, card

    if Path(name).suffix == ".json":
        try:
            data = json.loads(Path(name).read_text())
            return from_json(Problem, data["problem"]), {k: int(v) for k, v in data["sizes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadProblem(f"{name} is no Problem ({error}); make one with `jasperk evaluate --problem … --show --json`.") from error
    model, _, family = name.partition(":")
    if not family:
        raise BadProblem(f"--problem {name!r}: write MODEL:FAMILY, e.g. qwen3_8:ffn_down or qwen3_8:A, or name a .json file.")
    (wanted,) = by_letter(card(model), [family])
    (work,) = workload(model)
    found = [s for s in distinct(work.sites(target_device=place.split(":")[0])) if s.family == wanted]
    if not found:
        raise BadProblem(f"the {work.phase} graph of {model} has no site of {wanted}; `jasperk trace --model {model}` lists what it has.")
    return found[0].problem, found[0].sizes


def _candidate(path: Path, problem: Problem, sizes: Sizes, given: list[str]) -> Candidate:
    """Reads a kernel's source; launch parameters that are not given are the family's first guess."""
    from ..families import families
    from ..languages import LANGUAGES, bundle

    languages = {".py": "triton", ".cpp": "cpp", ".cu": "cuda"}
    if path.suffix not in languages:
        raise BadProblem(f"{path}: the language follows from the suffix; use {', '.join(languages)}.")
    if not path.is_file():
        raise BadProblem(f"there is no file {path}.")
    language = LANGUAGES[languages[path.suffix]].name
    source = bundle.read(path)
    params: dict[str, Scalar] = {}
    family = families().get(problem.family)
    if family is not None and language in family.space:
        guesses = family.space[language](problem.spec, problem.rows(sizes))
        params = {k: v for k, v in (guesses[0] if guesses else {}).items() if re.search(rf"\b{k}\b", source)}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise BadProblem(f"--param {item!r}: write NAME=VALUE.")
        params[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return Candidate(language, source, tuple(params.items()), str(path))


def _show_problem(problem: Problem, sizes: Sizes) -> None:
    console = out()
    console.print(f"[bold]{problem.family}[/bold] {problem.hash[:12]}, timed at {dict(sizes)}")
    for tensor in (*problem.inputs, *problem.outputs):
        where = "in " if tensor in problem.inputs else "out"
        console.print(f"  {where} {tensor.role}: {list(tensor.dims)} {tensor.dtype}, {tensor.layout}", highlight=False, markup=False)
    console.print(f"  constants: {dict(problem.params)}\n", highlight=False)
    console.print(problem.reference, highlight=False, markup=False)


def verdict_table(kernel: Candidate, verdict: Verdict, problem: Problem, sizes: Sizes, device: str, flops: float) -> Table:
    """What was tried, what failed and where, the times with their intervals, and the profile."""
    from .. import device as devices
    from .. import stats

    table = Table(title=f"{kernel.describe()} on {problem.family}", title_justify="left", show_header=False)
    table.add_row("verdict", f"[{'green' if verdict.passed else 'red'}]{verdict.status}[/]")
    if verdict.message:
        table.add_row("because", Text(verdict.message))
    if (accuracy := verdict.accuracy) is not None:
        table.add_row("elements within tolerance", f"{accuracy.within:.2%} (needs {problem.tolerance.within:.0%})")
        table.add_row("relative error", f"L1 {accuracy.l1:.2e}, L2 {accuracy.l2:.2e}, largest {accuracy.max_abs:.2e}")
        if accuracy.fp64 is not None:
            others = [f"eager {accuracy.eager_fp64:.2e}"] + ([f"Inductor {accuracy.inductor_fp64:.2e}"] if accuracy.inductor_fp64 else [])
            table.add_row("error against float64", f"{accuracy.fp64:.2e} ({', '.join(others)})")
    if (latency := verdict.latency) is not None:
        for name, samples in (("candidate", latency.candidate), ("eager", latency.eager), ("Inductor", latency.inductor)):
            if samples:
                low, high = stats.interval(samples)
                table.add_row(
                    f"{name}, ms ({latency.clock})", f"{stats.median(samples):.5f} [{low:.5f}, {high:.5f}], {len(samples)} samples"
                )
        table.add_row("over eager", str(stats.ratio(latency.eager, latency.candidate)))
        if latency.inductor:
            table.add_row("over Inductor", str(stats.ratio(latency.inductor, latency.candidate)))
        limit = devices.peaks(device).limit_ms(problem.nbytes(sizes), flops)
        table.add_row("roofline", f"{limit / stats.median(latency.candidate):.0%} of the limit {limit:.5f} ms")
    if verdict.profile is not None and verdict.profile.launches:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in verdict.profile.kernels)
        table.add_row("profile", Text(f"{verdict.profile.launches} launches: {shares}"))
    table.add_row("took", f"{verdict.seconds:.1f} s")
    return table
