"""The two questions a user asks about a model: which sites does it have, and what becomes of them?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import trace
from .contract import Kept, Site
from .explanation import Explanation, GraphReport, reports
from .settings import Options


@dataclass(frozen=True)
class Traced:
    """The sites of one graph of a model, and the matches that cannot be sites."""

    sites: tuple[Site, ...]
    kept: tuple[Kept, ...]


def sites(model: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[Traced]:
    """Traces one call of a model and lists the sites of each of its graphs. Nothing is optimised and nothing swapped.

    The call itself runs, eagerly, on copies of the arguments: caches and other inputs stay as they are.
    """
    found: list[Traced] = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        here, kept = trace.sites(gm.graph)
        found.append(Traced(tuple(here), tuple(kept)))
        return gm.forward

    _run(model, look, args, kwargs, dynamic)
    return found


def explain(
    model: Callable[..., Any] | None = None, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """What becomes of every site: swapped for which kernel, with what gain, or kept and why.

    Without a model: of all graphs that this process has compiled with backend="jasperk". With one: of one call of it with these
    arguments, as the cache stands; nothing is evaluated. The call runs eagerly on copies of the arguments.

    Args:
        model: a module or function, compiled or not. If it was compiled with backend="jasperk", its options are used.
        options: as for torch.compile; overrides those.
    """
    if model is None:
        return Explanation(tuple(reports()))
    from . import backend

    chosen = Options.parse({**_options_of(model), **(options or {}), "optimizer": "none"})
    found: list[GraphReport] = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        copied = backend._copy(gm)
        found.append(backend.plan_and_swap(copied.graph, chosen, len(found) + 1, {}))
        return gm.forward

    _run(getattr(model, "_orig_mod", model), look, args, kwargs, None)
    return Explanation(tuple(found))


def _run(model: Callable[..., Any], look: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool | None) -> None:
    arguments, keywords = copy.deepcopy((args, kwargs))  # together, so that what they share stays shared
    torch.compile(model, backend=look, dynamic=dynamic)(*arguments, **keywords)


def _options_of(model: Any) -> dict[str, Any]:
    """The options that a compiled module was given, as far as torch lets us see them."""
    backend = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while backend is not None and not hasattr(backend, "kwargs"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    kwargs = dict(getattr(backend, "kwargs", {}) or {})
    return dict(kwargs.get("options") or {})
