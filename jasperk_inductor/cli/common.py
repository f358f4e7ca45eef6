"""What the subcommands share: options, and where output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import JasperkError

err = Console(stderr=True)


def out() -> Console:
    """Where tables go. A pipe has no width of its own: wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=150)


Model = Annotated[str, typer.Option("--model", "-m", help="A model card (a file of models/), e.g. qwen3_8.")]
Size = Annotated[str, typer.Option(help="A size of the card: tiny or full.")]
Layers = Annotated[int | None, typer.Option(help="Fewer layers than the size has.")]
Phase = Annotated[str, typer.Option(help="decode (one token a sequence) or prefill (the whole context).")]
Batches = Annotated[list[int], typer.Option("--batch", "-b", help="Sequences at a time; may be repeated.")]
Context = Annotated[int, typer.Option(help="Tokens of the prompt.")]
Capacity = Annotated[int | None, typer.Option(help="Tokens that the static cache can hold [default: the context and 64].")]
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

    chosen = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if chosen not in ("float32", "bfloat16", "float16", "float64"):
        raise JasperkError(f"--dtype {chosen!r} is no type for weights; use float32, bfloat16 or float16.")
    return chosen


def workloads(
    model: str, size: str, layers: int | None, phase: str, batches: Iterable[int], context: int, capacity: int | None, dtype: str
) -> list[Any]:
    from ..api import Workload

    if phase not in ("prefill", "decode"):
        raise JasperkError(f"--phase is prefill or decode, not {phase!r}.")
    batches = list(batches)
    for name, value in (("--batch", min(batches)), ("--context", context), ("--layers", layers)):
        if value is not None and value < 1:
            raise JasperkError(f"{name} is at least 1, not {value}.")
    if capacity is not None and capacity <= context:
        raise JasperkError(f"--capacity {capacity} must be larger than --context {context}: the cache holds the prompt too.")
    return [Workload(model, size, layers, phase, batch, context, capacity or 0, dtype) for batch in batches]
