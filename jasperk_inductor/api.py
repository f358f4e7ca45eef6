"""The two questions a user asks about a model: which sites does it have, and what becomes of them?"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import trace
from .contract import Kept, Site, bucket
from .errors import JasperkError
from .explanation import Explanation, GraphReport, reports
from .models import Session, card
from .settings import Options


@dataclass(frozen=True)
class Traced:
    """The sites of one graph of a model, and the matches that cannot be sites."""

    sites: tuple[Site, ...]
    kept: tuple[Kept, ...]


def sites(
    model: Callable[..., Any], *args: Any, dynamic: bool | None = None, target_device: str | None = None, **kwargs: Any
) -> list[Traced]:
    """Traces one call of a model and lists the sites of each of its graphs. Nothing is optimised and nothing swapped.

    The call itself runs, eagerly, on copies of the arguments: caches and other inputs stay as they are. What the model keeps in
    itself (a counter in a buffer) advances.

    Args:
        target_device: the kind of device it is meant to run on ("cuda"), where the model lies on another ("meta").
    """
    found: list[Traced] = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        here, kept = trace.sites(gm.graph, target=target_device)
        found.append(Traced(tuple(here), tuple(kept)))
        return gm.forward

    _run(_original(model), look, args, kwargs, dynamic)
    return found


def explain(model: Callable[..., Any] | None = None, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """What becomes of every site: swapped for which kernel, with what gain, or kept and why.

    Without a model: of all graphs that this process has compiled with backend="jasperk". With one: of one call of it with these
    arguments, as the cache stands; nothing is evaluated. The call runs eagerly on copies of the arguments.

    Args:
        model: a module or function, compiled or not. If it was compiled with backend="jasperk", its options are used.
        options: as for torch.compile; overrides those.
    """
    if model is None:
        return Explanation(tuple(reports()))
    from .backend import pristine_copy
    from .planner import check_names, plan_and_swap

    chosen = Options.parse({**_options_of(model), **(options or {})})
    check_names(chosen)
    chosen = dataclasses.replace(chosen, optimizer="none")
    found: list[GraphReport] = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        copied = pristine_copy(gm)
        found.append(plan_and_swap(copied.graph, chosen, len(found) + 1, {}))
        return gm.forward

    _run(_original(model), look, args, kwargs, None)
    return Explanation(tuple(found))


def _run(model: Callable[..., Any], look: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool | None) -> None:
    if isinstance(model, type) or not callable(model):
        raise JasperkError(f"give a module or a function, and the arguments of one call of it; {model!r} is neither.")
    try:
        arguments, keywords = copy.deepcopy((args, kwargs))  # together, so that what they share stays shared
    except (RuntimeError, TypeError) as error:
        raise JasperkError(f"the arguments cannot be copied, which keeps a trace from changing them ({error}).") from error

    def call(fn: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        return fn(*arguments, **keywords)

    # Dynamo keeps what it compiled with the code it compiled. Code of our own each time: many traces of one model neither reach its
    # recompile limit nor take the place of what its user compiles.
    fresh = types.FunctionType(call.__code__.replace(), call.__globals__, "call")
    own = vars(model).get("_compiled_call_impl") if isinstance(model, torch.nn.Module) else None
    if own is not None:  # model.compile(...) was called: look at the model itself
        model._compiled_call_impl = None  # type: ignore[attr-defined]
    try:
        torch.compile(fresh, backend=look, dynamic=dynamic)(model, arguments, keywords)
    finally:
        if own is not None:
            model._compiled_call_impl = own  # type: ignore[attr-defined]


def _original(model: Any) -> Any:
    """What was given to torch.compile, if this is its result."""
    return getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model


def _options_of(model: Any) -> dict[str, Any]:
    """The options that a compiled module was given, as far as torch lets us see them."""
    backend = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    for cell in getattr(model, "__closure__", None) or () if hasattr(model, "_torchdynamo_orig_callable") else ():
        backend = backend or getattr(cell.cell_contents, "callback", None)  # a compiled function holds its context
    while backend is not None and not hasattr(backend, "kwargs"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    kwargs = dict(getattr(backend, "kwargs", {}) or {})
    return dict(kwargs.get("options") or {})


@dataclass(frozen=True)
class Workload:
    """One way to call a model card's model: what the CLI's --model, --size, --phase, --batch … say.

    Attributes:
        layers: fewer than the size has, or None.
        phase: "prefill" (the whole context) or "decode" (one token).
        dtype: of the weights, e.g. "bfloat16".
    """

    model: str
    size: str = "tiny"
    layers: int | None = None
    phase: str = "decode"
    batch: int = 1
    context: int = 16
    capacity: int = 0
    dtype: str = "float32"
    dynamic: bool | None = None

    @property
    def card(self) -> Any:
        return card(self.model)

    def session(self, device: str) -> Session:
        """The model with random weights on a device, ready for the phase: for decode, the context has been read."""
        chosen = self.card
        config = chosen.config(self.size, self.layers)
        model = chosen.build(config, device=device, dtype=getattr(torch, self.dtype))
        session = Session(model, self.batch, self.context, self.capacity or self.context + 64)
        if self.phase == "decode":
            with torch.no_grad():
                session.prefill()
        return session

    def arguments(self, session: Session) -> dict[str, Any]:
        """Keyword arguments of the call."""
        return session.arguments(session.prompt if self.phase == "prefill" else session.prompt[:, :1])

    def sites(self, device: str = "meta", target_device: str | None = None) -> list[Traced]:
        """The sites of its graphs, as they would be on a device of kind `target_device`. On the meta device this needs no memory, also at
        full size.

        Raises:
            UnknownName: no such card or size.
        """
        session = self.session(device)
        with torch.no_grad():
            return sites(session.model, dynamic=self.dynamic, target_device=target_device, **self.arguments(session))


def distinct(found: Sequence[Traced]) -> list[Site]:
    """One site for each distinct problem and bucket of rows, largest first."""
    unique = {(s.problem.hash, bucket(s.rows)): s for t in found for s in t.sites}
    return sorted(unique.values(), key=lambda s: -s.problem.nbytes(s.sizes))
