"""The command `jasperk`: one subcommand a stage.

With --json every command writes one JSON object a line to stdout and nothing else there; tables, progress and logs go to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .errors import JasperkError
from .settings import ENVIRONMENT, default_cache_dir

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Verified kernels for torch.compile. Start with [bold]jasperk demo[/bold], or see what a model holds with "
    "[bold]jasperk trace --model qwen3_8[/bold].",
    epilog="Environment: " + "; ".join(f"{k}: {v}" for k, v in ENVIRONMENT.items()),
)  # fmt: skip
cache_app = typer.Typer(no_args_is_help=True, help="List, pack and unpack verified kernels.")
app.add_typer(cache_app, name="cache")

err = Console(stderr=True)

Model = Annotated[str, typer.Option("--model", "-m", help="A model card (a file of models/), e.g. qwen3_8.")]
Size = Annotated[str, typer.Option(help="A size of the card: tiny or full.")]
Layers = Annotated[int | None, typer.Option(help="Fewer layers than the size has.")]
Phase = Annotated[str, typer.Option(help="decode (one token a sequence) or prefill (the whole context).")]
Batches = Annotated[list[int], typer.Option("--batch", "-b", help="Sequences at a time; may be repeated.")]
Context = Annotated[int, typer.Option(help="Tokens of the prompt.")]
Dtype = Annotated[str | None, typer.Option(help="Type of the weights [default: bfloat16 on a GPU, float32 on a CPU].")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]
Families = Annotated[list[str] | None, typer.Option("--family", "-f", help="Only these families, by letter or name; may be repeated.")]
CacheDir = Annotated[Path | None, typer.Option(help="The kernel cache [default: JASPERK_CACHE_DIR or ~/.cache/jasperk].")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


def emit(record: Any) -> None:
    """One JSON line."""
    print(json.dumps(record, default=str), flush=True)


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err, transient=True
    )  # fmt: skip


def pick_device(device: str) -> str:
    """Resolves "auto", and checks that the device is there."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise JasperkError(f"there is no GPU that torch can use, so --device {device} cannot be had; use --device cpu.")
    try:
        torch.device(device)
    except RuntimeError as error:
        raise JasperkError(f"--device {device!r} is no device; use cpu, cuda or cuda:N.") from error
    return device


def pick_dtype(dtype: str | None, device: str) -> str:
    import torch

    chosen = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if not isinstance(getattr(torch, chosen, None), torch.dtype):
        raise JasperkError(f"--dtype {chosen!r} is no type of torch; use float32, bfloat16 or float16.")
    return chosen


def workloads(model: str, size: str, layers: int | None, phase: str, batches: Iterable[int], context: int, dtype: str) -> list[Any]:
    from .api import Workload

    if phase not in ("prefill", "decode"):
        raise JasperkError(f"--phase is prefill or decode, not {phase!r}.")
    return [Workload(model, size, layers, phase, batch, context, dtype=dtype) for batch in batches]


@app.command()
def trace(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = None,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 16,
    dtype: Dtype = None,
    dynamic: Annotated[bool, typer.Option(help="Trace with symbolic sizes.")] = False,
    as_json: Json = False,
) -> None:
    """List the operator families in a model's graph: every site, and every match that cannot be one. Needs no weights and no GPU."""
    from .models import card

    letters = card(model).LETTERS
    table = Table(title=f"{card(model).TITLE} ({size}), {phase}")
    for name in ("", "family", "sites", "M", "first module", "reference of", "status"):
        table.add_column(name)
    for work in workloads(model, size, layers, phase, batch, context, pick_dtype(dtype, "cpu")):
        groups: dict[Any, list[Any]] = {}
        for number, traced in enumerate(dataclasses.replace(work, dynamic=dynamic or None).sites(), 1):
            rows = [
                dict(
                    family=s.family, letter=letters.get(s.family), module=s.module, status="site", rows=s.rows, problem=s.problem.hash[:12]
                )
                for s in traced.sites
            ]
            rows += [
                dict(family=k.family, letter=letters.get(k.family), module=k.module, status="kept", reason=k.reason) for k in traced.kept
            ]
            for row in rows:
                if as_json:
                    emit({**row, "graph": number, "batch": work.batch, "phase": phase})
                groups.setdefault((row["letter"] or "?", row["family"], row["status"], row.get("rows"), row.get("problem")), []).append(row)
        for (letter, family, status, m, problem), members in sorted(groups.items(), key=str):
            table.add_row(
                letter, family, str(len(members)), str(m or ""), members[0]["module"], problem or "", members[0].get("reason", status)
            )
    if not as_json:
        Console().print(table)


@app.command()
def optimize(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = 4,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 128,
    dtype: Dtype = None,
    device: Device = "auto",
    family: Families = None,
    wanted: Annotated[bool, typer.Option("--wanted", help="Build what earlier compiles found missing, instead of a model's.")] = False,
    optimizer: Annotated[str, typer.Option(help="library: search the shipped kernels.")] = "library",
    budget: Annotated[float, typer.Option(help="Seconds a problem; nothing new is started after.")] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Search also where the cache has an entry; the faster one stays.")] = False,
    save_tuned: Annotated[bool, typer.Option("--save-tuned", help="Write the winners' launch parameters into kernels/*/tuned/.")] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Fill the kernel cache ahead of time: search, verify and time a kernel for every family of a model."""
    from .api import distinct
    from .cache import Cache
    from .contract import Entry, Problem, Sizes
    from .evaluate import Evaluator
    from .models import by_letter, card
    from .optimize import improve, library
    from .optimize import optimizer as known_optimizer

    known_optimizer(optimizer)
    place = pick_device(device)
    cache = Cache(cache_dir or default_cache_dir())
    if wanted:
        jobs: list[tuple[Problem, Sizes]] = [(w.problem, dict(w.sizes)) for w in cache.wanted() if place.startswith(w.device)]
        letters: dict[str, str] = {}
    else:
        letters = card(model).LETTERS
        only = by_letter(card(model), family) if family else list(letters)
        found = [w.sites() for w in workloads(model, size, layers, phase, batch, context, pick_dtype(dtype, place))]
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
                emit(_describe(problem, sizes, result, letters))
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
        row = _describe(problem, sizes, result, letters)
        if row["status"] != "passed":
            table.add_row(row["letter"] or "", row["family"], str(row["rows"]), f"none: {row['reason']}")
            continue
        table.add_row(
            row["letter"] or "", row["family"], str(row["rows"]), row["kernel"], row["over_eager"]["text"], row["over_inductor"]["text"],
            f"{row['ms']:.4f}", f"{row['roofline']:.0%}",
        )  # fmt: skip
    Console().print(table)


def _describe(problem: Any, sizes: Any, result: Any, letters: dict[str, str]) -> dict[str, Any]:
    from . import device as devices
    from . import stats
    from .contract import Entry
    from .families import family

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


@app.command()
def evaluate(
    candidate: Annotated[Path, typer.Argument(help="A kernel's source: .py (Triton), .cpp or .cu.")],
    problem: Annotated[
        str, typer.Option(help="MODEL:FAMILY, e.g. qwen3_8:G, or a Problem's JSON file (as `jasperk evaluate --show` writes it).")
    ] = "qwen3_8:ffn_down",
    size: Size = "tiny",
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 1,
    phase: Phase = "decode",
    context: Context = 16,
    dtype: Dtype = None,
    device: Device = "auto",
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="A launch parameter, NAME=VALUE; may be repeated.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the Problem (reference, inputs, outputs) and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Judge one kernel: is it right on all trials, and how fast is it against eager and Inductor?"""
    from .commands import evaluate_file

    place = pick_device(device)
    evaluate_file(candidate, problem, size, batch, phase, context, pick_dtype(dtype, place), place, param or [], show, as_json)


@app.command()
def explain(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = None,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 16,
    dtype: Dtype = None,
    device: Device = "auto",
    beat: Annotated[str, typer.Option(help="What a kernel must beat: inductor or eager.")] = "inductor",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """What would become of every site of a model, as the cache stands: swapped for which kernel, or kept and why."""
    import torch

    from .api import explain as explain_model
    from .explanation import Explanation
    from .models import card

    place = pick_device(device)
    options = {"beat": beat, "cache_dir": str(cache_dir or default_cache_dir())}
    for work in workloads(model, size, layers, phase, batch, context, pick_dtype(dtype, place)):
        session = work.session(place)
        with torch.no_grad():
            found = explain_model(session.model, options=options, **work.arguments(session))
        found = Explanation(found.graphs, card(model).LETTERS)
        if as_json:
            for row in found.rows():
                emit({**row, "batch": work.batch, "phase": phase})
        else:
            Console().print(found)


@app.command()
def bench(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = None,
    batch: Batches = [1],  # noqa: B006
    context: Context = 128,
    capacity: Annotated[int, typer.Option(help="Tokens that the static cache can hold.")] = 1280,
    dtype: Dtype = None,
    device: Device = "auto",
    mode: Annotated[str | None, typer.Option(help="Inductor's mode [default: reduce-overhead on a GPU, default on a CPU].")] = None,
    rows: Annotated[str, typer.Option(help="Rows to measure, e.g. eager,inductor,+A,+B,jasperk; all by default.")] = "",
    steps: Annotated[int, typer.Option(help="Decode steps timed a row.")] = 160,
    weights: Annotated[
        Path | None, typer.Option(help="A local checkpoint (config.json and safetensors); random weights by default.")
    ] = None,
    cache: Annotated[list[Path] | None, typer.Option("--cache", help="Kernel cache; repeated, each draws a curve.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds a row may spend on kernels that the cache lacks.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Where ledger.json, ledger.png and ledger.svg go.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tokens/s as each family is replaced: eager, Inductor, +A, +B, … and the default policy."""
    bench_run, ledger = _bench_package()
    place = pick_device(device)
    runs = [
        ledger.Run(
            model, size, layers, b, context, capacity, pick_dtype(dtype, place), place,
            mode or ("reduce-overhead" if place.startswith("cuda") else "default"),
            tuple(r for r in rows.split(",") if r), steps, weights, directory, budget,
        )
        for b in batch
        for directory in cache or [default_cache_dir()]
    ]  # fmt: skip
    curves = bench_run.bench(runs, out, err if as_json else Console(), progress())
    if as_json:
        for measured in curves.values():
            for row in measured:
                emit(ledger.as_record(row))


@app.command()
def demo(
    model: Model = "qwen3_8",
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 16,
    cache_dir: CacheDir = None,
    out: Annotated[Path, typer.Option(help="Where the ledger goes.")] = Path(".demo"),
) -> None:
    """The main job on this machine's CPU, in a few minutes: trace a tiny model, find and verify kernels, swap them in, measure."""
    bench_run, _ = _bench_package()
    record = bench_run.demo(model, batch, cache_dir or default_cache_dir(), out, Console(), progress())
    emit(record)
    raise typer.Exit(0 if record["correct"] else 1)


def _bench_package() -> tuple[Any, Any]:
    """bench_e2e's modules, which are importable once `folders` has found them."""
    import importlib

    from .folders import package

    package("jasperk_bench")
    return importlib.import_module("jasperk_bench.run"), importlib.import_module("jasperk_bench.ledger")


@cache_app.command("list")
def cache_list(cache_dir: CacheDir = None, device: Device = "auto", as_json: Json = False) -> None:
    """Every entry: what it computes, its kernel, and whether it holds on this device."""
    from . import device as devices
    from . import stats
    from .cache import Cache

    here = devices.validity(pick_device(device))
    cache = Cache(cache_dir or default_cache_dir())
    table = Table(title=str(cache.root))
    for name in ("family", "M up to", "kernel", "origin", "gain over Inductor", "device", "here"):
        table.add_column(name)
    for entry in cache.entries():
        latency = entry.verdict.latency
        assert latency is not None
        gain = stats.ratio(latency.baseline("inductor"), latency.candidate)
        reason = entry.validity.mismatch(here)
        record = {
            "family": entry.problem.family, "rows": entry.bucket, "kernel": entry.candidate.describe(), "origin": entry.candidate.origin,
            "gain": gain.value, "device": entry.validity.device, "usable": reason is None, "reason": reason, "problem": entry.problem.hash[:12],
        }  # fmt: skip
        if as_json:
            emit(record)
        table.add_row(
            entry.problem.family, str(entry.bucket), entry.candidate.describe(), entry.candidate.origin, str(gain), entry.validity.device,
            "yes" if reason is None else f"no: {reason}",
        )  # fmt: skip
    if not as_json:
        Console().print(table)


@cache_app.command("pack")
def cache_pack(
    file: Annotated[Path, typer.Argument(help="The file to write, e.g. kernels.tgz.")],
    family: Annotated[list[str] | None, typer.Option("--family", help="Only these families, by name.")] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Write all entries with their built kernels to one file, to be moved to another machine."""
    from .bundle import pack
    from .cache import Cache

    count = pack(Cache(cache_dir or default_cache_dir()), file, set(family) if family else None)
    emit({"packed": count, "file": str(file), "bytes": file.stat().st_size}) if as_json else err.print(f"{count} entries in {file}")


@cache_app.command("unpack")
def cache_unpack(
    file: Annotated[
        Path, typer.Argument(help="A file that `jasperk cache pack` wrote. Its kernels run in your processes: trust its maker.")
    ],
    cache_dir: CacheDir = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Add a packed cache to this one, and say of each entry whether it holds on this device. Builds and evaluates nothing."""
    from . import device as devices
    from .bundle import unpack
    from .cache import Cache

    results = unpack(Cache(cache_dir or default_cache_dir()), file, devices.validity(pick_device(device)))
    for r in results:
        if as_json:
            emit(dataclasses.asdict(r))
        elif not r.usable:
            err.print(f"{r.family} M<={r.bucket} does not hold here: {r.reason}")
    if not as_json:
        err.print(f"{len(results)} entries, {sum(r.usable for r in results)} of them hold on this device")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Runs the command; an error of ours is one clear line, not a traceback."""
    logger = logging.getLogger("jasperk")
    logger.addHandler(RichHandler(console=err, show_path=False, show_time=False))
    logger.setLevel(os.environ.get("JASPERK_LOG", "WARNING").upper())
    try:
        app()
    except JasperkError as error:
        err.print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
