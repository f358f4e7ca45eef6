"""`jasperk trace | explain | bench | demo`: what a model holds, what becomes of it, and what that gains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import JasperkError
from ..settings import default_cache_dir
from .common import (
    Batches,
    CacheDir,
    Capacity,
    Context,
    Device,
    Dtype,
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


def trace(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = None,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 16,
    capacity: Capacity = None,
    dtype: Dtype = None,
    device: Annotated[str, typer.Option(help="What it is to run on, cpu or cuda, which need not be here; auto: what is here.")] = "auto",
    dynamic: Annotated[bool, typer.Option(help="Trace with symbolic sizes.")] = False,
    as_json: Json = False,
) -> None:
    """List the operator families in a model's graph: every site, and every match that cannot be one. Needs no weights and no GPU."""
    from ..models import card, letters

    known = letters(card(model))
    if (kind := pick_device(device) if device == "auto" else device) not in ("cpu", "cuda"):
        raise JasperkError(f"--device is auto, cpu or cuda here, not {device!r}.")
    table = Table(title=f"{card(model).TITLE} ({size}), {phase}, on {kind}")
    for name in ("", "family", "sites", "M", "first module", "reference of", "status"):
        table.add_column(name)
    for work in workloads(model, size, layers, phase, batch, context, capacity, pick_dtype(dtype, "cpu")):
        groups: dict[Any, list[Any]] = {}
        for number, traced in enumerate(dataclasses.replace(work, dynamic=dynamic or None).sites(target_device=kind), 1):
            rows = [
                dict(family=s.family, letter=known.get(s.family), module=s.module, status="site", rows=s.rows, problem=s.problem.hash[:12])
                for s in traced.sites
            ]
            rows += [
                dict(family=k.family, letter=known.get(k.family), module=k.module, status="kept", reason=k.reason) for k in traced.kept
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
        out().print(table)


def explain(
    model: Model = "qwen3_8",
    size: Size = "tiny",
    layers: Layers = None,
    phase: Phase = "decode",
    batch: Batches = [1],  # noqa: B006
    context: Context = 16,
    capacity: Capacity = None,
    dtype: Dtype = None,
    device: Device = "auto",
    beat: Annotated[str, typer.Option(help="What a kernel must beat: inductor or eager.")] = "inductor",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """What would become of every site of a model, as the cache stands: swapped for which kernel, or kept and why."""
    import torch

    from ..api import explain as explain_model
    from ..explanation import Explanation
    from ..models import card, letters

    place = pick_device(device)
    options = {"beat": beat, "cache_dir": str(cache_dir or default_cache_dir())}
    for work in workloads(model, size, layers, phase, batch, context, capacity, pick_dtype(dtype, place)):
        session = work.session(place)
        with torch.no_grad():
            found = explain_model(session.model, options=options, **work.arguments(session))
        found = Explanation(found.graphs, letters(card(model)))
        if as_json:
            for row in found.rows():
                emit({**row, "batch": work.batch, "phase": phase})
        else:
            out().print(found)


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
    folder: Annotated[Path | None, typer.Option("--out", help="Where ledger.json, ledger.png and ledger.svg go.")] = None,
    results: Annotated[Path | None, typer.Option(help="A JSON list of rows of several runs, to which these are added.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tokens/s as each family is replaced: eager, Inductor, +A, +B, … and the default policy."""
    bench_run, ledger = _bench_module("run"), _bench_module("ledger")
    place = pick_device(device)
    workloads(model, size, layers, "decode", batch, context, capacity, "float32")  # checks what they have in common
    runs = [
        ledger.Run(
            model, size, layers, b, context, capacity, pick_dtype(dtype, place), place,
            mode or ("reduce-overhead" if place.startswith("cuda") else "default"),
            tuple(r for r in rows.split(",") if r), steps, weights, directory, budget,
        )
        for b in batch
        for directory in cache or [default_cache_dir()]
    ]  # fmt: skip
    curves = bench_run.bench(runs, folder, err if as_json else out(), progress(), results)
    if as_json:
        for measured in curves.values():
            for row in measured:
                emit(ledger.as_record(row))


def demo(
    model: Model = "qwen3_8",
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at a time.")] = 8,
    cache_dir: CacheDir = None,
    folder: Annotated[Path, typer.Option("--out", help="Where the ledger goes.")] = Path(".demo"),
) -> None:
    """The main job on this machine's CPU, in a few minutes: trace a tiny model, find and verify kernels, swap them in, measure."""
    record = _bench_module("run").demo(model, batch, cache_dir or default_cache_dir(), folder, out(), progress())
    emit(record)
    raise typer.Exit(0 if record["correct"] else 1)


def figures(
    readme: Annotated[Path, typer.Argument(help="The file whose tables are computed.")] = Path("README.md"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a figure is not what the samples say.")] = False,
) -> None:
    """Recompute the README's tables from the raw samples in bench_e2e/results/."""
    if not readme.is_file():
        raise JasperkError(f"there is no file {readme}; run this in the checkout, or name the file.")
    text = readme.read_text()
    fresh = _bench_module("figures").rewritten(text)
    if check and fresh != text:
        raise JasperkError(f"{readme} shows other figures than its samples give; run `jasperk figures` to mend it.")
    if not check:
        readme.write_text(fresh)


def _bench_module(name: str) -> Any:
    """A module of bench_e2e, which is importable once `folders` has found it."""
    import importlib

    from ..folders import package

    package("jasperk_bench")
    return importlib.import_module(f"jasperk_bench.{name}")
