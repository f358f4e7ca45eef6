"""`jasperk cache list | pack | unpack`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..settings import default_cache_dir
from .common import CacheDir, Device, Json, emit, err, out, pick_device

app = typer.Typer(no_args_is_help=True, help="List, pack and unpack verified kernels.")


@app.command("list")
def cache_list(cache_dir: CacheDir = None, device: Device = "auto", as_json: Json = False) -> None:
    """Every entry: what it computes, its kernel, and whether it holds on this device."""
    from .. import device as devices
    from .. import stats
    from ..cache import Cache

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
        out().print(table)


@app.command("pack")
def cache_pack(
    file: Annotated[Path, typer.Argument(help="The file to write, e.g. kernels.tgz.")],
    family: Annotated[list[str] | None, typer.Option("--family", help="Only these families, by name.")] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Write all entries with their built kernels to one file, to be moved to another machine."""
    from ..bundle import pack
    from ..cache import Cache
    from ..families import family as known_family

    for name in family or ():
        known_family(name)
    count = pack(Cache(cache_dir or default_cache_dir()), file, set(family) if family else None)
    emit({"packed": count, "file": str(file), "bytes": file.stat().st_size}) if as_json else err.print(f"{count} entries in {file}")


@app.command("unpack")
def cache_unpack(
    file: Annotated[
        Path, typer.Argument(help="A file that `jasperk cache pack` wrote. Its kernels run in your processes: trust its maker.")
    ],
    cache_dir: CacheDir = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Add a packed cache to this one, and say of each entry whether it holds on this device. Builds and evaluates nothing."""
    from .. import device as devices
    from ..bundle import unpack
    from ..cache import Cache

    results = unpack(Cache(cache_dir or default_cache_dir()), file, devices.validity(pick_device(device)))
    for r in results:
        if as_json:
            emit(dataclasses.asdict(r))
        elif not r.usable:
            err.print(f"{r.family} M<={r.bucket} does not hold here: {r.reason}")
    if not as_json:
        err.print(f"{len(results)} entries, {sum(r.usable for r in results)} of them hold on this device")
