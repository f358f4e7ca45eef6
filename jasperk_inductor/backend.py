"""The torch.compile backend: trace, look up, swap, hand the rest to Inductor.

Registered only through the entry point `torch_dynamo_backends: jasperk` (a decorator as well would register it twice, and the
first compile would fail). Dynamo calls `jasperk` once per graph, also when torch's caches hit later, so planning, registering the
operators and reporting all happen in this call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import _disable_current_modes

from . import explanation
from .contract import Swapped
from .errors import SwapFailed, UnknownOption, nearest
from .graph import mark_shared_memory
from .planner import check_names, once, plan_and_swap
from .settings import Options, log_level

log = logging.getLogger("jasperk")
if (level := log_level()) and log.level == logging.NOTSET:
    log.setLevel(level)


def jasperk(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    Args:
        gm, example_inputs: from Dynamo. The inputs are real, and include live caches: they are only looked at.
        mode: torch.compile's mode, for Inductor.
        options: see `jasperk_inductor.settings.Options`.

    Raises:
        UnknownOption: an option is misspelt or of the wrong kind.
        SwapFailed: our part failed and `strict` is set; otherwise the graph is compiled as it came, which is said once.
    """
    chosen = Options.parse(options, mode)
    check_names(chosen)
    inductor = inductor_config(chosen)
    number = len(explanation.reports()) + 1
    started = time.monotonic()
    try:
        edited = pristine_copy(gm)
        mark_shared_memory(edited.graph, example_inputs)
        with _disable_current_modes():  # planning runs kernels for real
            report = plan_and_swap(edited.graph, chosen, number, inductor)
        edited.recompile()
        compiled = _inductor(edited, example_inputs, inductor) if report.operators else None
    except TorchDynamoException:  # not a failure: how Inductor asks Dynamo to trace again
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if chosen.strict:
            raise SwapFailed(f"jasperk failed on graph {number} ({what}); drop strict=True to run it unswapped") from error
        once(f"graph {number} is compiled as it came: jasperk failed ({what})")
        log.debug("the failure", exc_info=True)
        report, compiled = explanation.GraphReport(number, failure=what, seconds=time.monotonic() - started), None
    explanation.record(report)
    _summarise(report)
    return compiled if compiled is not None else _inductor(gm, example_inputs, inductor)


def inductor_config(options: Options) -> dict[str, Any]:
    """Inductor's config patches for these options.

    Raises:
        UnknownOption: Inductor knows no such mode or key.
    """
    from torch._inductor import config, list_mode_options

    modes = list_mode_options()
    if options.mode not in modes:
        raise UnknownOption(f"Inductor has no mode {options.mode!r}.{nearest(options.mode, modes)}")
    known = config.get_config_copy() if options.inductor else {}
    for key in options.inductor:
        if key.replace("-", "_") not in known:
            raise UnknownOption(f"Inductor has no option {key!r} (given under options['inductor']).")
    return {**modes[options.mode], **{k.replace("-", "_"): v for k, v in options.inductor.items()}}


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], config: Mapping[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=dict(config))
    return compiled


def pristine_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same parameters and submodules: edits leave the original pristine."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, mapping)
    old_output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    new_output = graph.output(result)
    new_output.meta.update(old_output.meta)
    graph._codegen = gm.graph._codegen
    copy = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    # Dynamo leaves notes on the module and its nodes: which inputs are parameters and which have a fixed address, without which
    # Inductor takes no CUDA graph of a model that writes to its cache.
    for old, new in [(gm, copy), *mapping.items()]:
        new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
    copy.meta.update(gm.meta)
    return copy


def _summarise(report: explanation.GraphReport) -> None:
    swapped = sum(isinstance(o, Swapped) for o in report.outcomes)
    log.info("graph %d: %d of %d sites swapped, %d evaluations", report.number, swapped, len(report.outcomes), report.evaluations)
