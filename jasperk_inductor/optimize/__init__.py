"""Optimizers: something that proposes kernels for a Problem until one passes. To add one: a file, and a line in `OPTIMIZERS`.

`improve` is the only way from an optimizer into the cache: one builder per key, only passed verdicts, and a search that found
nothing is remembered so that the next compile does not repeat it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import device as devices
from ..cache import Cache
from ..contract import Attempt, Entry, Problem, Sizes, bucket
from ..errors import UnknownName, nearest
from ..evaluate import Evaluator
from ..evaluate.sandbox import scratch
from . import library
from .base import Found, NotFound


@dataclass(frozen=True)
class Optimizer:
    """`run` searches until a deadline; `fingerprint` changes whenever `run` would try something else."""

    run: Callable[[Problem, Sizes, Evaluator, float, Path], Found | NotFound]
    fingerprint: Callable[[Problem, Sizes, str], str]


OPTIMIZERS: dict[str, Optimizer] = {"library": Optimizer(library.optimize, library.fingerprint)}


def optimizer(name: str) -> Optimizer:
    """The optimizer of that name.

    Raises:
        UnknownName: there is none; the message names the nearest.
    """
    try:
        return OPTIMIZERS[name]
    except KeyError:
        raise UnknownName(f"no optimizer {name!r}.{nearest(name, [*OPTIMIZERS, 'none'])}") from None


def improve(
    problem: Problem,
    sizes: Sizes,
    *,
    cache: Cache,
    evaluator: Evaluator,
    name: str = "library",
    budget_s: float = 60.0,
    again: bool = False,
) -> Entry | NotFound:
    """Makes sure that the cache has the best kernel this optimizer finds for a problem.

    Args:
        sizes: where to time; the entry holds for the whole bucket of rows around it.
        budget_s: seconds after which nothing new is started (what runs then still ends).
        again: search even if the cache already has an entry or knows of a search that found nothing.
    """
    chosen = optimizer(name)
    here = devices.validity(evaluator.device)
    rows = problem.rows(sizes)
    deadline = time.monotonic() + budget_s
    fingerprint = chosen.fingerprint(problem, sizes, evaluator.device)

    def known() -> Entry | NotFound | None:
        if again:
            return None
        if (entry := cache.get(problem, rows, here)) is not None:
            return entry
        tried = cache.attempt(problem, rows, here, fingerprint)
        return NotFound(tried.reason) if tried is not None else None

    if (found := known()) is not None:
        return found
    with cache.building(problem, rows, timeout=budget_s) as mine:
        if (found := known()) is not None:
            return found
        if not mine:
            return NotFound("another process is still building it")
        folder = scratch("jasperk-optimize-")
        try:
            result = chosen.run(problem, sizes, evaluator, deadline, folder)
            if isinstance(result, Found):
                entry = Entry(problem, bucket(rows), result.candidate, result.verdict, here)
                cache.settle(problem, sizes)
                return cache.put(entry, result.folder)
            if time.monotonic() < deadline:  # cut short, it may find something with more time
                cache.put_attempt(Attempt(problem.hash, bucket(rows), here, fingerprint, result.reason), problem)
            return result
        finally:
            shutil.rmtree(folder, ignore_errors=True)


__all__ = ["OPTIMIZERS", "Found", "NotFound", "Optimizer", "improve", "optimizer"]
